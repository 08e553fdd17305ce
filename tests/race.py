"""Acts that begin at the same moment, each on a thread and a database connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.db import connection

from models_app.errors import SardeenzError

#: Seconds. Longer means that it hangs.
_LIMIT_S = 60


def race(*acts: Callable[[], Any]) -> list[Any]:
    """What each returned, or the refusal it raised, in the order of the ends."""
    barrier = threading.Barrier(len(acts))
    results: list[Any] = []

    def run(act: Callable[[], Any]) -> None:
        try:
            barrier.wait(10)
            results.append(act())
        except SardeenzError as exc:
            results.append(exc)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
        assert not thread.is_alive()
    assert len(results) == len(acts)
    return results
