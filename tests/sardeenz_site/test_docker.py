"""What is shipped for containers, as far as it can be held to something without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import compose_spec
import httpx
import pytest
import yaml

from tests.sardeenz_site.stack import free_port, wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = ROOT / "docker"
GIVEN = {"POSTGRES_PASSWORD": "p", "SECRET_KEY": "s", "SARDEENZ_ADMIN_PASSWORD": "a"}
COMPOSE_FILES = ("compose.yaml", "compose.demo.yaml")


def interpolated(value: Any) -> Any:
    """As compose does it: ``${NAME}``, ``${NAME:-default}``, ``${NAME:?error}``."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", lambda m: GIVEN.get(m[1]) or m[3], value)
    return value


def compose(name: str) -> dict[str, Any]:
    loaded = interpolated(yaml.safe_load((DOCKER / name).read_text()))
    assert isinstance(loaded, dict)
    return loaded


# --- compose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_file_is_what_the_specification_allows(name: str) -> None:
    compose_spec.PyCompose.from_json(json.dumps(compose(name))).to_spec()


def test_compose_check_would_find_a_misspelt_key() -> None:
    with pytest.raises(ValueError, match="comand"):
        compose_spec.PyCompose.from_json('{"services": {"a": {"image": "x", "comand": ["y"]}}}')


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_services_build_targets_that_exist_and_run_roles_that_exist(name: str) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    roles = set(
        re.findall(r"[a-z-]+", " ".join(re.findall(r"^([a-z |-]+)\)$", (DOCKER / "entry.sh").read_text(), re.M)))
    )
    for service in compose(name)["services"].values():
        if "build" not in service:
            continue
        assert service["build"]["target"] in targets
        if service["build"]["target"] != "proxy":
            assert service.get("command", ["gpu-host"])[0] in roles


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_environment_of_services_holds_settings_that_exist(name: str) -> None:
    table = set(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    for service in compose(name)["services"].values():
        names = {n for n in service.get("environment", {}) if not n.startswith("POSTGRES_")}
        assert names <= table


def test_every_process_of_the_launcher_has_its_place_in_compose() -> None:
    services = compose("compose.yaml")["services"]
    assert {"postgres", "valkey", "prepare", "web", "router", "control", "beat", "gpu-host", "proxy"} == set(services)
    # Engines are detached from the worker: something must reap them, NVML's pids must be ours, and segments need room.
    host = services["gpu-host"]
    assert host["init"] is True
    assert host["pid"] == "host"
    assert host["shm_size"] == "16gb"
    assert host["stop_grace_period"] == "3m"
    # Only the proxy is reachable from outside, and from this machine alone unless told otherwise.
    published = {name: s["ports"] for name, s in services.items() if "ports" in s}
    assert published == {"proxy": ["127.0.0.1:8080:80"]}


def test_secrets_have_no_default() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for name in GIVEN:
        assert re.search(rf"\$\{{{name}:\?", text)
        assert not re.search(rf"\$\{{{name}(:-[^}}]+)?\}}", text)


# --- Dockerfile ----------------------------------------------------------------------------------------------


def test_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_copies_only_what_is_there() -> None:
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source


def test_build_context_holds_what_is_copied_and_no_state() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*"
    assert not {"!var", "!.env", "!.git", "!tests"} & set(rules)
    for folder in ("models_app", "gpus_app", "sardeenz_site", "templates", "static", "docker"):
        assert f"!{folder}" in rules


# --- entry script ----------------------------------------------------------------------------------------------


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A ``python`` that says how it was called; as a launcher it stays until SIGTERM."""
    script = tmp_path / "python"
    script.write_text(
        "#!/usr/bin/env bash\n"
        'echo "called: $*" >> "$STUB_LOG"\n'
        'if [[ "$*" == *"--role host"* ]]; then\n'
        '  trap \'echo "launcher ended" >> "$STUB_LOG"; exit 3\' TERM\n'
        "  for _ in $(seq 300); do sleep 0.1; done\n"
        "fi\n"
    )
    script.chmod(0o755)
    yield {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "STUB_LOG": str(tmp_path / "log")}


def calls(env: dict[str, str]) -> list[str]:
    log = Path(env["STUB_LOG"])
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["web"], "called: -m sardeenz_site.run --only web"),
        (["sampler"], "called: -m sardeenz_site.run --only sampler"),
        (["demo"], "called: -m sardeenz_site.run"),
        (["prepare", "--no-admin"], "called: manage.py prepare --no-admin"),
        (["manage", "create_api_key", "x"], "called: manage.py create_api_key x"),
    ],
)
def test_role_becomes_its_process(stub: dict[str, str], words: list[str], call: str) -> None:
    subprocess.run([DOCKER / "entry.sh", *words], env=stub, check=True, timeout=30)
    assert calls(stub) == [call]


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_unknown_role_is_refused_with_those_that_exist(stub: dict[str, str], words: list[str]) -> None:
    done = subprocess.run(
        [DOCKER / "entry.sh", *words], env=stub, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 64
    assert "gpu-host" in done.stderr
    assert calls(stub) == []


def test_gpu_host_ends_its_engines_before_its_workers_and_passes_the_exit_code_on(stub: dict[str, str]) -> None:
    process = subprocess.Popen([DOCKER / "entry.sh", "gpu-host"], env=stub)
    try:
        wait_for(lambda: len(calls(stub)) == 1, 20, "the launcher is called")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3
    finally:
        process.kill()
    assert calls(stub) == [
        "called: -m sardeenz_site.run --role host",
        "called: manage.py stop_engines --all --limit 30",
        "launcher ended",
    ]


# --- nginx -------------------------------------------------------------------------------------------------------

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


class Upstream(BaseHTTPRequestHandler):
    """Answers who it is and what it was told; streams two pieces with a wait for the test between them."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/v1/stream":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nfirst\r\n")
            self.wfile.flush()
            type(self).go_on.wait(10)
            self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")
            return
        body = json.dumps({"port": self.server.server_address[1], "path": self.path, "headers": dict(self.headers)})
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    servers = {name: ThreadingHTTPServer(("127.0.0.1", 0), Upstream) for name in ("web", "router")}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    port = free_port()
    (folder / "static").mkdir()
    (folder / "static" / "a.css").write_text("a{}")
    (folder / "mime.types").write_text("types { text/css css; }\n")
    text = (DOCKER / "nginx.conf").read_text()
    for old, new in (
        ("server web:8000;", f"server 127.0.0.1:{servers['web'].server_address[1]};"),
        ("server router:8001;", f"server 127.0.0.1:{servers['router'].server_address[1]};"),
        ("listen 80;", f"listen 127.0.0.1:{port};"),
        ("/srv/static/", f"{folder}/static/"),
        ("/tmp/nginx.pid", f"{folder}/nginx.pid"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    if os.getuid() == 0:  # its workers run as another user and must reach the files
        for part in (folder, *folder.parents[:3]):
            part.chmod(0o755)
    process = subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf", "-g", "daemon off;"])
    base = f"http://127.0.0.1:{port}"

    def up() -> bool:
        try:
            return httpx.get(f"{base}/").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(up, 20, "nginx answers")
        yield {"base": base, **{name: server.server_address[1] for name, server in servers.items()}}
    finally:
        process.terminate()
        process.wait(20)
        for server in servers.values():
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize(
    ("path", "to"),
    [("/", "web"), ("/gpus/", "web"), ("/api/v1/models", "web"), ("/v1/models", "router"), ("/ws/live", "web")],
)
def test_proxy_sends_each_path_to_its_process(proxy: dict[str, Any], path: str, to: str) -> None:
    answer = httpx.get(f"{proxy['base']}{path}", headers={"X-Forwarded-For": "198.51.100.7"}).json()
    assert (answer["port"], answer["path"]) == (proxy[to], path)
    # What the client claims comes first, what the proxy saw comes last: the login limit counts the last.
    assert answer["headers"]["X-Forwarded-For"] == "198.51.100.7, 127.0.0.1"
    assert answer["headers"]["Host"] == proxy["base"].removeprefix("http://")


def test_proxy_serves_static_files_itself(proxy: dict[str, Any]) -> None:
    answer = httpx.get(f"{proxy['base']}/static/a.css")
    assert (answer.text, answer.headers["Content-Type"]) == ("a{}", "text/css")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert httpx.get(f"{proxy['base']}/static/none.css").status_code == 404


def test_proxy_passes_tokens_on_as_they_come(proxy: dict[str, Any]) -> None:
    Upstream.go_on.clear()
    with httpx.stream("GET", f"{proxy['base']}/v1/stream", timeout=20) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"first"
        Upstream.go_on.set()
        assert b"".join(pieces) == b"last"


def test_proxy_hands_a_websocket_through(proxy: dict[str, Any]) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    answer = httpx.get(f"{proxy['base']}/ws/live", headers=headers).json()
    assert answer["headers"]["Upgrade"] == "websocket"
    assert answer["headers"]["Connection"] == "upgrade"
