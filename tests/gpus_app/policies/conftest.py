"""How hard the laws are tried: a little in every run, a lot with ``HYPOTHESIS_PROFILE=deep``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No time limits: a busy machine is no counterexample.
_EASY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("suite", max_examples=25, **_EASY)
settings.register_profile("deep", max_examples=2000, **_EASY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
