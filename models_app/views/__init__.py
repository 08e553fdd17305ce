"""The human door: one function view per page and fragment, one module per subject."""

from __future__ import annotations
