"""Settings, read from the environment by the typed readers of ``sardeenz_site.env``."""

from __future__ import annotations

import os

# Python imports this package before ``settings.test``, which must change the environment before anything is read.
if os.environ.get("DJANGO_SETTINGS_MODULE") != "sardeenz_site.settings.test":
    from sardeenz_site.settings.base import *  # noqa: F403
