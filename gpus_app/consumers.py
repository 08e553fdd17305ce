"""Readings reach browsers through the one socket of models_app.consumers."""

from __future__ import annotations
