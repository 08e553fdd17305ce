"""``python -m sardeenz_site.run``: the whole of Sardeenz on one machine, under one foreground command.

This package stays small in memory: it imports neither Django's ORM nor Celery; whatever needs them runs as a child.
"""

from __future__ import annotations
