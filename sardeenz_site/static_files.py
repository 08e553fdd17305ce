"""``/static`` for ``make run``, in front of Django: files are found once at start and sent with validators.

Behind nginx (docker/) these requests never arrive here.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from servestatic import ServeStaticASGI


def _add_headers(headers: Any, path: str, url: str) -> None:
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"


def static_app(application: Any) -> ServeStaticASGI:
    """``application`` with every file of the staticfiles finders before it; the first finder wins, as in Django."""
    app = ServeStaticASGI(
        application,
        autorefresh=settings.DEBUG,
        max_age=0,  # files have no digest in their names: ask each time, answer 304
        allow_all_origins=False,
        add_headers_function=_add_headers,
    )
    roots = [
        storage.location
        for finder in get_finders()
        for storage in getattr(finder, "storages", {}).values()
        if getattr(storage, "location", None)
    ]
    for root in reversed(roots):  # a later call overrides an earlier one
        app.add_files(root, prefix=settings.STATIC_URL)
    return app
