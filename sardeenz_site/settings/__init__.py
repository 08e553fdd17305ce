"""Settings, read from the environment by the typed readers of ``sardeenz_site.env``."""

from __future__ import annotations

from sardeenz_site.settings.base import *  # noqa: F403
