"""The composition root: the only room that knows every other."""

from __future__ import annotations
