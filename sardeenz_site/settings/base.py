"""Everything that is not Celery's, Channels', logging's or security's own. Every variable stands in README's table."""

from __future__ import annotations

import socket
from importlib.metadata import distribution
from pathlib import Path

from sardeenz_site.engine_choice import choose_engine
from sardeenz_site.env import (
    env_bytes,
    env_choice,
    env_float,
    env_int,
    env_list,
    env_path,
    env_secret,
    env_str,
)
from sardeenz_site.settings.database import database_from_url
from sardeenz_site.settings.paths import BASE_DIR
from sardeenz_site.settings.paths import SARDEENZ_HOME as SARDEENZ_HOME  # a setting itself

# --- this machine -------------------------------------------------------------------------------
SARDEENZ_HOST_NAME = env_str("SARDEENZ_HOST_NAME", socket.gethostname().split(".")[0][:64])
SARDEENZ_HOST_ADDRESS = env_str("SARDEENZ_HOST_ADDRESS", "127.0.0.1")
SARDEENZ_VLLM = env_str("SARDEENZ_VLLM", "vllm")  # command that starts vLLM: a name on PATH or a path
SARDEENZ_ENGINE_ENV = env_list("SARDEENZ_ENGINE_ENV", [])  # read again, and judged, by models_app.engines.environment
# What this machine runs, never "auto" here, and why in a sentence.
SARDEENZ_ENGINE, SARDEENZ_ENGINE_REASON = choose_engine(
    env_choice("SARDEENZ_ENGINE", "auto", ("auto", "vllm", "simulated")), SARDEENZ_VLLM
)
SARDEENZ_HINT_SENDER = "models_app.hints.send_hint"  # whom the sampler tells that an engine ended or a limit changed
SARDEENZ_RUN_DIR = env_path("SARDEENZ_RUN_DIR", SARDEENZ_HOME / "runs")
SARDEENZ_MODEL_ROOTS = [Path(p) for p in env_list("SARDEENZ_MODEL_ROOTS", [str(SARDEENZ_HOME / "models")])]
SARDEENZ_HF_HOME = env_str("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
SARDEENZ_HF_TOKEN = env_secret("HF_TOKEN")
SARDEENZ_SIM_GPUS = env_int("SARDEENZ_SIM_GPUS", 2, minimum=0, maximum=64)
SARDEENZ_SIM_GPU_BYTES = env_bytes("SARDEENZ_SIM_GPU_BYTES", 80 * 1024**3)
SARDEENZ_SIM_DIR = env_path("SARDEENZ_SIM_DIR", SARDEENZ_HOME / "simgpu" / SARDEENZ_HOST_NAME)
SARDEENZ_SIM_SPEED = env_float("SARDEENZ_SIM_SPEED", 1.0, minimum=0.01, maximum=1000.0)
SARDEENZ_SIM_FAULTS = env_str("SARDEENZ_SIM_FAULTS", "none")  # of simulated engines, to see how one copes
SARDEENZ_MAX_INSTANCES = env_int("SARDEENZ_MAX_INSTANCES", 64, minimum=1, maximum=1000)

# --- limits of time, all in seconds ----------------------------------------------------------------
HOST_HEARTBEAT_LIMIT_S = env_float("SARDEENZ_HEARTBEAT_LIMIT_S", 15.0, minimum=2.0)
START_LIMIT_S = env_float("SARDEENZ_START_LIMIT_S", 1800.0, minimum=5.0)
DOWNLOAD_LIMIT_S = env_float("SARDEENZ_DOWNLOAD_LIMIT_S", 4 * 3600.0, minimum=5.0)
DRAIN_LIMIT_S = env_float("SARDEENZ_DRAIN_LIMIT_S", 30.0)
STOP_LIMIT_S = env_float("SARDEENZ_STOP_LIMIT_S", 30.0, minimum=1.0)
MEMORY_BACK_LIMIT_S = env_float("SARDEENZ_MEMORY_BACK_LIMIT_S", 15.0)
CONTROL_CALL_LIMIT_S = env_float("SARDEENZ_CONTROL_CALL_LIMIT_S", 10.0, minimum=0.5)
PLACE_LIMIT_S = env_float("SARDEENZ_PLACE_LIMIT_S", 300.0, minimum=1.0)  # pending with no room, until it fails
RESIDENCE_S = env_float("SARDEENZ_RESIDENCE_S", 60.0)  # ready for less: no victim for a newcomer
START_GRACE_S = env_float("SARDEENZ_START_GRACE_S", 15.0, minimum=2.0)  # claimed, but no engine process yet
ROUTE_GRACE_S = env_float("SARDEENZ_ROUTE_GRACE_S", 0.5)  # routers' time to hear that a route has gone
WAKE_LIMIT_S = env_float("SARDEENZ_WAKE_LIMIT_S", 300.0, minimum=1.0)  # asked to answering
WAKE_CALL_LIMIT_S = env_float("SARDEENZ_WAKE_CALL_LIMIT_S", 45.0, minimum=1.0, maximum=50.0)
RESTART_RESET_S = env_float("SARDEENZ_RESTART_RESET_S", 600.0, minimum=1.0)  # ready so long: failures are forgotten
EVENTS_KEEP_S = env_float("SARDEENZ_EVENTS_KEEP_S", 30 * 86400.0, minimum=3600.0)
RUNS_KEEP_S = env_float("SARDEENZ_RUNS_KEEP_S", 7 * 86400.0, minimum=3600.0)  # logs of ended starts
LOG_DOWNLOAD_BYTES = env_bytes("SARDEENZ_LOG_DOWNLOAD_BYTES", 16 * 1024**2)  # of one start's log, the newest
HUNG_AFTER_S = env_float("SARDEENZ_HUNG_AFTER_S", 60.0, minimum=1.0)  # requests run and nothing moves, then a probe
PROBE_EVERY_S = env_float("SARDEENZ_PROBE_EVERY_S", 300.0)  # idle so long: one token; 0 is never
PROBE_LIMIT_S = env_float("SARDEENZ_PROBE_LIMIT_S", 30.0, minimum=1.0, maximum=40.0)
HOST_BACK_AFTER_S = env_float("SARDEENZ_HOST_BACK_AFTER_S", 5.0)  # out of the routes at least so long: no flapping
HOST_LOST_S = env_float("SARDEENZ_HOST_LOST_S", 300.0)  # its instances start elsewhere; 0 is never
CAPTURE_MAX_S = env_float("SARDEENZ_CAPTURE_MAX_S", 86400.0, minimum=60.0)  # longest capture of a key's requests
RESTART_LIMIT = env_int("SARDEENZ_RESTART_LIMIT", 5, minimum=0, maximum=1000)
RESTART_BACKOFF_S = env_float("SARDEENZ_RESTART_BACKOFF_S", 10.0, minimum=0.1)
RESTART_BACKOFF_MAX_S = env_float("SARDEENZ_RESTART_BACKOFF_MAX_S", 300.0, minimum=0.1)
RESTART_JITTER = env_float("SARDEENZ_RESTART_JITTER", 0.25, maximum=1.0)  # share of the wait by which it is spread
KILL_LIMIT_S = env_float("SARDEENZ_KILL_LIMIT_S", 20.0, minimum=1.0)  # after SIGKILL: what is there then, hangs
OPERATION_LIMIT_S = env_float("SARDEENZ_OPERATION_LIMIT_S", 7200.0, minimum=60.0)  # move, edit, preset, drain
SLEEP_RAM_BYTES = env_bytes("SARDEENZ_SLEEP_RAM_BYTES", 0)  # of each host, for sleepers of level 1; 0 is half of it

# --- Django ----------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "django_htmx",
    "gpus_app",
    "models_app",
    "sardeenz_site",
]
MIDDLEWARE = [
    "sardeenz_site.middleware.request_id",
    "sardeenz_site.middleware.security_headers",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]
# For its page of the REST interface. Not in INSTALLED_APPS, where every worker would load pydantic for it.
NINJA = Path(str(distribution("django-ninja").locate_file("ninja")))
ROOT_URLCONF = "sardeenz_site.urls"
ASGI_APPLICATION = "sardeenz_site.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates", NINJA / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "models_app.presentation.shell.shell",
            ]
        },
    }
]


DATABASES = {
    "default": database_from_url(
        env_secret("DATABASE_URL") or f"sqlite:///{SARDEENZ_HOME / 'sardeenz.sqlite3'}", base=BASE_DIR
    )
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LANGUAGE_CODE = "en"
USE_I18N = False
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
STATIC_ROOT = SARDEENZ_HOME / "static"
STATICFILES_DIRS = [BASE_DIR / "static", NINJA / "static"]
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"

from sardeenz_site.settings.celery import *  # noqa: E402, F403
from sardeenz_site.settings.channels import *  # noqa: E402, F403
from sardeenz_site.settings.logging import *  # noqa: E402, F403
from sardeenz_site.settings.security import *  # noqa: E402, F403
