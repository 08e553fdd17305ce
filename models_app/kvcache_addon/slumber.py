"""Sleep and wake, EngineCore's half: what the executor holds, and the order in which its parts come back. Engine's
thread.

vLLM keeps no note of the level it sleeps at, and a level-2 sleeper that is woken plainly serves from weights that are
gone. So the level is kept here, and waking goes weights → reload → KV cache → prefix cache reset in one call, between
two steps: no request can slip in before the end (vLLM 0.19 resumes scheduling even after a partial wake).
"""

from __future__ import annotations

import os
from typing import Any

from models_app.kvcache_addon.wire import WAKE_TAGS, Refused

#: Set to 1 by the add-on's own tests on machines where vLLM cannot sleep for real.
SELF_TEST = "SARDEENZ_ADDON_SELFTEST"
#: vLLM 0.19–0.24 compare the whole card's free memory before and after: a neighbour that grows meanwhile fails a sleep
#: that has in fact happened.
FALSE_ALARM = "Memory usage increased after sleeping"


class Slumber:
    """The sleep of one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._level: int | None = None
        #: Weights are mapped again but not yet read again: level 2, half-way.
        self._needs_reload = False

    def asleep_tags(self) -> list[str]:
        """What is not back yet: ``weights``, ``kv_cache``."""
        executor = self.engine.model_executor
        tags = set(getattr(executor, "sleeping_tags", None) or ()) if executor.is_sleeping else set()
        if executor.is_sleeping and not tags:
            tags = set(WAKE_TAGS)
        if self._needs_reload:
            tags.add("weights")
        return [tag for tag in WAKE_TAGS if tag in tags]

    def facts(self) -> dict[str, Any]:
        """For status: the level (None when awake; 2 when it is not known), what sleeps, whether scheduling is off."""
        tags = self.asleep_tags()
        state = getattr(self.engine.scheduler, "pause_state", None)
        return {
            "level": (self._level or 2) if tags else None,
            "asleep_tags": tags,
            "paused": getattr(state, "name", "UNPAUSED") != "UNPAUSED",
            "enabled": self.enabled(),
        }

    def enabled(self) -> bool:
        config = getattr(self.engine.vllm_config, "model_config", None)
        return bool(getattr(config, "enable_sleep_mode", False)) or os.environ.get(SELF_TEST) == "1"

    def _load_format(self) -> str:
        config = getattr(self.engine.vllm_config, "load_config", None)
        return str(getattr(config, "load_format", "") or "")

    def prepare(self, level: int) -> dict[str, Any]:
        """Note the level before vLLM is told to sleep. ``already``: it sleeps at this level. Raises ``Refused``
        (409)."""
        if not self.enabled():
            raise Refused(409, "sleep_disabled", "this engine was started without --enable-sleep-mode")
        if level == 2 and self._load_format() == "dummy":
            raise Refused(409, "sleep_disabled", "level 2 drops the weights, and dummy weights cannot be read again")
        facts = self.facts()
        if facts["level"] is not None:
            if facts["level"] != level or len(facts["asleep_tags"]) < len(WAKE_TAGS):
                raise Refused(409, "asleep", "the engine sleeps already, or is half-way awake: wake it first", **facts)
            return {"already": True}
        self._level = level
        return {"already": False}

    def settle(self, error: str) -> dict[str, Any]:
        """After vLLM's sleep: ``error`` is what it failed with. A false alarm is told apart from a failure, for which
        ``Refused`` (500) is raised."""
        executor = self.engine.model_executor
        if FALSE_ALARM in error and not executor.is_sleeping:
            executor.is_sleeping = True
            executor.sleeping_tags = set(WAKE_TAGS)
        elif error:
            raise Refused(500, "sleep_failed", f"the engine did not fall asleep: {error}", **self.facts())
        return self.facts()

    def wake(self, tags: list[str] | None) -> dict[str, Any]:
        """Bring back the named parts (all when None), in the right order. Scheduling is *not* resumed here.

        Raises ``Refused`` (500) with what is still asleep; asking again goes on from there.
        """
        executor = self.engine.model_executor
        level = self._level or 2
        wanted = [tag for tag in WAKE_TAGS if tag in self.asleep_tags() and (tags is None or tag in tags)]
        was_asleep = bool(self.asleep_tags())
        for tag in wanted:
            try:
                if executor.is_sleeping and tag in (getattr(executor, "sleeping_tags", None) or WAKE_TAGS):
                    executor.wake_up([tag])
                    self._needs_reload = self._needs_reload or (tag == "weights" and level == 2)
                if tag == "weights" and self._needs_reload:
                    executor.collective_rpc("reload_weights")
                    self._needs_reload = False
            except Exception as exc:
                facts = self.facts()
                raise Refused(500, "wake_failed", f"waking the {tag} failed: {exc}", **facts) from exc
        if was_asleep and not self.asleep_tags():
            self.engine.reset_prefix_cache()
            self._level = None
        return self.facts()
