"""A request asks for a model that is asleep or not there: wake it or start it, if its model allows that."""

from __future__ import annotations


def model_demand(served_model_name: str) -> None:
    """Wake a sleeping replica, else launch one, when the model is ``on_demand``; otherwise do nothing. Idempotent."""
    raise NotImplementedError
