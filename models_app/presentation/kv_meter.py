"""The KV memory of one instance against its limit: a small bar with its floor, guarantee and the limit in force."""

from __future__ import annotations

from django.utils.safestring import SafeString, mark_safe

from models_app.presentation.memory_bar import Share
from models_app.presentation.words import gib

HEIGHT = 12


def scale_of(share: Share) -> int:
    """Bytes at the right end: the largest of what is held, asked and in force."""
    marks = (share.limit_bytes, share.effective_limit_bytes, share.footprint_bytes, share.floor_bytes)
    return max([mark for mark in marks if mark] or [1])


def render(share: Share, *, scale_bytes: int | None = None) -> SafeString:
    """SVG whose ``data-*`` let the script move its parts. ``scale_bytes``: the right end, where it is fixed."""
    scale = max(scale_bytes or 0, scale_of(share))
    limit = share.limit_bytes or 0

    def at(value: int) -> str:
        return f"{min(100.0, value / scale * 100):.2f}%"

    held = share.footprint_bytes
    words = f"KV in use {gib(share.used_bytes)}"
    if share.prealloc_bytes:
        words += f", mapped idle {gib(share.prealloc_bytes)}"
    if share.limit_bytes is not None:
        words += f", limit {gib(share.limit_bytes)}"
    out = [
        f'<svg class="kvbar hue-{share.hue}" height="{HEIGHT}" role="img" aria-label="{words} GiB"'
        f' data-kv="{share.key}" data-scale="{scale}" data-limit="{limit}">',
        f'<rect class="kvbar-frame" x="0" y="1" width="100%" height="{HEIGHT - 2}" rx="3"/>',
        f'<g class="seg-used"><rect class="fill" data-part="used" x="0" y="1" width="{at(share.used_bytes)}"'
        f' height="{HEIGHT - 2}"/></g>',
        f'<g class="seg-idle"><rect class="fill" data-part="idle" x="{at(share.used_bytes)}" y="1"'
        f' width="{at(share.prealloc_bytes)}" height="{HEIGHT - 2}"/>'
        f'<rect data-part="idle" x="{at(share.used_bytes)}" y="1" width="{at(share.prealloc_bytes)}"'
        f' height="{HEIGHT - 2}" fill="url(#hatch)"/></g>',
    ]
    if limit and held > limit:
        out.append(
            f'<rect class="over" data-part="over" x="{at(limit)}" y="{HEIGHT - 4}" width="{at(held - limit)}"'
            ' height="3"/>'
        )
    for css, value, title in (
        ("tick-floor", share.floor_bytes, "safety floor"),
        ("tick-guarantee", share.guarantee_bytes, "guarantee"),
        ("tick", share.effective_limit_bytes if share.effective_limit_bytes != limit else None, "limit in force"),
        ("tick", limit if limit and limit < scale else None, "limit asked"),
    ):
        if value and value <= scale:
            x = at(value)
            out.append(
                f"<g><title>{title} {gib(value)} GiB</title>"
                f'<line class="{css}" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/></g>'
            )
    out.append("</svg>")
    return mark_safe("".join(out))  # noqa: S308  numbers only


def swatch(share: Share) -> SafeString:
    """The colour and pattern of an instance, for legends and table lines."""
    pattern = f'<rect width="14" height="14" fill="url(#pat-{share.pattern})"/>' if share.pattern else ""
    return mark_safe(  # noqa: S308  numbers only
        f'<svg class="swatch hue-{share.hue}" width="14" height="14" aria-hidden="true">'
        f'<rect class="fill" width="14" height="14"/>{pattern}</svg>'
    )
