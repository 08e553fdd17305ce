"""The ``model`` and ``stream`` fields of a multipart form (audio), and how to give ``model`` another value.

The parsing is python-multipart's; the form is never rebuilt, so the file inside stays as it was sent, byte for byte.
"""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from models_app.router.errors import bad_request

_WANTED = frozenset({b"model", b"stream", b"response_format"})
_MAX_FIELD_BYTES = 1024


class Form:
    """Where the small fields lie in a form's bytes."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        """Raises 400 (as RouterError) for what is not a well-formed multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise bad_request("This route takes a multipart/form-data body.", code="invalid_content_type")
        self.body = body
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._header_name = b""
        self._header_value = b""
        self._field: bytes | None = None
        self._ended = False
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_piece,
                "on_header_end": self._header_end,
                "on_part_data": self._part_data,
                "on_end": self._end,
            },
        )
        try:
            parser.write(body)
            parser.finalize()
        except FormParserError as exc:
            raise bad_request(f"The multipart body cannot be read: {exc}.", code="invalid_body") from exc
        if not self._ended:
            raise bad_request("The multipart body is cut off.", code="invalid_body")

    def field(self, name: bytes) -> str | None:
        span = self._spans.get(name)
        return None if span is None else self.body[span[0] : span[1]].decode("utf-8", "replace").strip()

    def with_field(self, name: bytes, value: str) -> bytes:
        """The body with another value in a field that it has."""
        start, end = self._spans[name]
        return self.body[:start] + value.encode() + self.body[end:]

    # --- the parser's callbacks: offsets into the one piece that was written -------------------------------

    def _part_begin(self) -> None:
        self._field = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_piece(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            name = parse_options_header(self._header_value)[1].get(b"name", b"")
            self._field = name if name in _WANTED else None
            if self._field in self._spans:
                raise bad_request(f"The field '{name.decode()}' is given twice.", code="invalid_body")
        self._header_name = self._header_value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        name = self._field
        if name is None:
            return
        first = self._spans.get(name, (start, start))[0]
        if end - first > _MAX_FIELD_BYTES:
            raise bad_request(f"The field '{name.decode()}' is too long.", code="invalid_body")
        self._spans[name] = (first, end)

    def _end(self) -> None:
        self._ended = True
