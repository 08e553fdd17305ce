"""Rules of GPUs are entered on the Policies page: see models_app.forms.policy."""

from __future__ import annotations
