"""Forms of the pages, one module per subject. They read what was typed; the services decide."""

from __future__ import annotations
