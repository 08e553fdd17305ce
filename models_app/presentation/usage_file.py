"""Usage as a CSV file that is sent as it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse

from models_app.usage_report import UsageFilter, csv_name, usage_csv


def csv_response(request: HttpRequest, wanted: UsageFilter) -> StreamingHttpResponse:
    """Streamed, under ASGI (as in service) and WSGI alike."""
    chunks = usage_csv(wanted)
    response = StreamingHttpResponse(
        _in_turn(chunks) if isinstance(request, ASGIRequest) else chunks, content_type="text/csv; charset=utf-8"
    )
    response.headers["Content-Disposition"] = f'attachment; filename="{csv_name(wanted)}"'
    response.headers["Cache-Control"] = "no-store"
    return response


async def _in_turn(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each block is read in the thread that holds the database connection, when the one before has gone out."""

    def step() -> bytes | None:
        return next(chunks, None)

    while (chunk := await sync_to_async(step)()) is not None:
        yield chunk
