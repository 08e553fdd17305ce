"""What the launcher needs to know before it starts anything, read from the environment and ``.env``."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from sardeenz_site.engine_choice import choose_engine
from sardeenz_site.env import env_choice, env_path, env_port, env_secret, env_str, load_env_file
from sardeenz_site.redis_url import redis_url

BASE_DIR = Path(__file__).resolve().parent.parent.parent

_FIRST_ADMIN = ("SARDEENZ_ADMIN_PASSWORD", "SARDEENZ_ADMIN_PASSWORD_FILE")
ROLES = ("all", "control", "host")


class CannotStart(Exception):
    """A reason not to start, as one sentence for the person at the terminal."""


@dataclass(frozen=True)
class Config:
    """``redis`` is None when the launcher is to start its own Valkey."""

    role: str
    home: Path
    host: str
    port: int
    router_port: int
    host_name: str
    redis: str | None
    engine: str
    engine_reason: str

    @property
    def browser_host(self) -> str:
        """The address to show and to ask on: a wildcard cannot be typed into a browser."""
        if self.host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            return "127.0.0.1" if self.host == "0.0.0.0" else "[::1]"  # noqa: S104
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def url(self) -> str:
        return f"http://{self.browser_host}:{self.port}/"

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"


def read_config(role: str = "all") -> Config:
    """Raises ImproperlyConfigured with a sentence for a value that makes no sense."""
    load_env_file(BASE_DIR / ".env")
    engine, reason = choose_engine(
        env_choice("SARDEENZ_ENGINE", "auto", ("auto", "vllm", "simulated")), env_str("SARDEENZ_VLLM", "vllm")
    )
    home = env_path("SARDEENZ_HOME", BASE_DIR / "var")
    given = env_secret("REDIS_URL")
    if role == "host" and given is None:
        raise CannotStart("A GPU host needs the broker of the others: set REDIS_URL (and DATABASE_URL).")
    return Config(
        role=role,
        home=home,
        host=env_str("HOST", "127.0.0.1"),
        port=env_port("PORT", 8000),
        router_port=env_port("ROUTER_PORT", 8001),
        host_name=env_str("SARDEENZ_HOST_NAME", socket.gethostname().split(".")[0][:64]),
        redis=None if given is None else redis_url(given, home),
        engine=engine,
        engine_reason=reason,
    )


def first_admin_environment() -> dict[str, str]:
    """What only ``prepare`` may see."""
    return {name: os.environ[name] for name in _FIRST_ADMIN if name in os.environ}


def child_environment(config: Config, redis: str) -> dict[str, str]:
    """The launcher's own environment with every choice made, less what only the first start may see."""
    env = dict(os.environ)
    env["SARDEENZ_ENV_FILE"] = os.devnull  # read already; read again it would bring the first password back
    # Without byte code every start compiles some 2,000 modules again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in (*_FIRST_ADMIN, "REDIS_URL_FILE"):
        env.pop(name, None)
    env.update(
        DJANGO_SETTINGS_MODULE="sardeenz_site.settings",
        SARDEENZ_HOME=str(config.home),
        SARDEENZ_HOST_NAME=config.host_name,
        SARDEENZ_ENGINE=config.engine,
        REDIS_URL=redis,
        PYTHONUNBUFFERED="1",
        # Django's checks would load every page and form into each worker; ``prepare`` has run what matters.
        CELERY_SKIP_CHECKS="1",
        # Thread pools otherwise keep an arena of freed memory per thread.
        MALLOC_ARENA_MAX="2",
        PATH=os.pathsep.join((str(Path(sys.executable).parent), env.get("PATH", os.defpath))),
    )
    return env
