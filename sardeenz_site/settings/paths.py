"""Where the code and the state of this installation lie; reads the ``.env`` file first, for every other module."""

from __future__ import annotations

from pathlib import Path

from sardeenz_site.env import env_path, load_env_file

BASE_DIR = Path(__file__).resolve().parent.parent.parent
load_env_file(BASE_DIR / ".env")
SARDEENZ_HOME = env_path("SARDEENZ_HOME", BASE_DIR / "var")
SARDEENZ_HOME.mkdir(parents=True, exist_ok=True, mode=0o700)
