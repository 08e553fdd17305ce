"""One kit for two engines: the simulated one, and a real vLLM when ``SARDEENZ_ENGINE_VENV`` names its environment.

``make test-engine`` sets that variable (``run.sh`` makes the environment) together with ``SARDEENZ_ENGINE_REQUIRED``,
which turns the skipping of the real half into a failure. Without it, only the simulated half runs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpus_app.probes.sim_ledger import ensure_gpus
from models_app.engines.identity import installation_id
from models_app.engines.process import cleanup, end_processes, find_marked, terminate
from models_app.engines.rundir import run_dirs
from tests.contract import make_model
from tests.contract.kit import Kit, Started

_ROOT = Path(__file__).resolve().parent.parent.parent
VENV = os.environ.get("SARDEENZ_ENGINE_VENV")
#: What a CPU build needs, and secrets of ours that must never arrive in an engine.
_HOST = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DATABASE_URL": "postgresql://owner:secret-database@db/sardeenz",
    "SARDEENZ_SECRET_KEY": "secret-signing-key",
    "REDIS_URL": "redis://:secret-broker@broker/0",
    "VLLM_API_KEY": "secret-engine-key",
}


@contextlib.contextmanager
def _watchdog(runs: Path) -> Iterator[None]:
    """Engines end with this process, also when it is killed."""
    command = [sys.executable, "-m", "tests.contract.watchdog", str(runs)]
    dog = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=_ROOT, start_new_session=True)
    try:
        yield
    finally:
        dog.communicate(timeout=120)


@pytest.fixture(
    scope="session",
    params=["simulated", pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.slow])],
)
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """Starts engines of one kind, and ends whatever a test left."""
    kind = request.param
    if kind == "vllm" and not VENV:
        if os.environ.get("SARDEENZ_ENGINE_REQUIRED"):
            pytest.fail("SARDEENZ_ENGINE_VENV is not set: the real half would be skipped")
        pytest.skip("needs a real vLLM: make test-engine")
    root = tmp_path_factory.mktemp(kind)
    home, models = root / "home", root / "models"
    for name, architecture in (("tiny", "LlamaForCausalLM"), ("strange", "MadeUpForCausalLM")):
        make_model.make(models / name, architecture)
        if VENV:
            script = Path(make_model.__file__)
            python = Path(VENV) / "bin" / "python"
            subprocess.run([python, script, models / name, "--architecture", architecture], check=True)
    with pytest.MonkeyPatch.context() as patch, _watchdog(root / "runs"):
        for name, value in _HOST.items():
            patch.setenv(name, value)
        if kind == "vllm":
            patch.setenv("VLLM_CACHE_ROOT", f"{VENV}/.vllm-cache")
        yield Kit(
            kind=kind,
            installation=installation_id(home),
            runs=root / "runs",
            models=models,
            vllm_command=f"{VENV}/bin/vllm",
            sim_dir=root / "gpus",
            gpu=ensure_gpus(root / "gpus", 1, 80 << 30, "contract")[0].uuid if kind == "simulated" else None,
        )
    for run_dir in run_dirs(root / "runs"):
        assert terminate(run_dir, limit_s=0).done
        cleanup(run_dir)
    assert end_processes(find_marked(installation_id(home))) == []


@pytest.fixture(scope="module")
def served(kit: Kit) -> Started:
    """One engine that serves; shared by the tests that leave it as it is. The module's last test ends it."""
    started = kit.start()
    started.wait_ready()
    return started
