"""Pages of hosts and GPUs are put together with what runs on them: see models_app.views."""

from __future__ import annotations
