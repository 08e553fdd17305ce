"""The id of the request being answered, for the log lines written meanwhile."""

from __future__ import annotations

import contextvars
import logging

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class RequestIdFilter(logging.Filter):
    """Gives each record ``request``: empty outside requests, else the id in brackets."""

    def filter(self, record: logging.LogRecord) -> bool:
        current = REQUEST_ID.get()
        record.request_id = f" [{current}]" if current else ""
        return True
