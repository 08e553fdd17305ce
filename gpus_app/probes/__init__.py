"""Readings of this machine: GPUs, kvcached segments, run directories, engine metrics. Plain Python."""

from __future__ import annotations
