"""How things are said and drawn on the pages: words, numbers, bars. Reads rows and records; writes nothing."""

from __future__ import annotations
