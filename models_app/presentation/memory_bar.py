"""One horizontal bar per GPU: who holds what, who may grow how far, what is free; drawn as SVG without styles.

Positions are percentages, so the picture needs neither script nor style attribute to fit its column;
``static/js/bars.js`` moves the same rectangles when a reading arrives. Above the bar each instance has a lane of its
own, from the start of its KV memory to its limit: labels cannot collide, and a limit that reaches over a neighbour is
seen as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from django.utils.safestring import SafeString, mark_safe

from models_app.presentation.words import gib

HUES = 8
BAR_HEIGHT = 34
#: Part of the width up to which a number still fits behind the end of its lane, on a phone too.
LABEL_ROOM = 0.89


@dataclass(frozen=True, slots=True)
class Share:
    """What one instance holds on one GPU, bytes, with the marks that its policy sets."""

    key: str
    label: str
    slot: int
    baseline_bytes: int = 0
    used_bytes: int = 0
    prealloc_bytes: int = 0
    reserved_bytes: int = 0
    limit_bytes: int | None = None
    effective_limit_bytes: int | None = None
    guarantee_bytes: int = 0
    floor_bytes: int | None = None
    href: str = ""
    asleep: bool = False

    @property
    def footprint_bytes(self) -> int:
        return self.used_bytes + self.prealloc_bytes

    @property
    def resident_bytes(self) -> int:
        return self.baseline_bytes + self.footprint_bytes

    @property
    def over_bytes(self) -> int:
        """KV memory held above the limit asked for."""
        return 0 if self.limit_bytes is None else max(0, self.footprint_bytes - self.limit_bytes)

    @property
    def hue(self) -> int:
        return self.slot % HUES

    @property
    def pattern(self) -> int:
        return self.slot // HUES % 4


@dataclass(frozen=True, slots=True)
class Bar:
    """The memory of one GPU at one moment, bytes."""

    uuid: str
    title: str
    total_bytes: int
    shares: Sequence[Share]
    other_bytes: int = 0
    reserve_bytes: int = 0
    known: bool = True
    suffix: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        return sum(share.resident_bytes for share in self.shares) + self.other_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def promised_bytes(self) -> int:
        """Reserved by starting instances and not resident yet."""
        return sum(max(0, share.reserved_bytes - share.resident_bytes) for share in self.shares)

    @property
    def scale_bytes(self) -> int:
        return max(self.total_bytes, self.used_bytes, 1)

    @property
    def marks(self) -> list[str]:
        """The inner numbers of the scale, GiB."""
        return [gib(self.total_bytes * part / 4, 0) for part in (1, 2, 3)]

    @property
    def near_full(self) -> bool:
        """Less free than the reserve asks for, or than 5 % of the card where none is set."""
        return self.known and self.free_bytes < (self.reserve_bytes or self.total_bytes // 20)

    @property
    def sentence(self) -> str:
        """The whole picture in words, for those who do not see it."""
        if not self.known:
            return f"{self.title}: no reading."
        parts = []
        for share in self.shares:
            text = f"{share.label}: weights {gib(share.baseline_bytes)}, KV used {gib(share.used_bytes)}"
            if share.prealloc_bytes:
                text += f", KV mapped idle {gib(share.prealloc_bytes)}"
            if share.limit_bytes is not None:
                text += f", limit {gib(share.limit_bytes)}"
            parts.append(text)
        if self.other_bytes:
            parts.append(f"other processes {gib(self.other_bytes)}")
        parts.append(f"free {gib(self.free_bytes)} of {gib(self.total_bytes)}")
        return f"{self.title}, GiB: " + "; ".join(parts) + "."


def with_distinct_slots(shares: Sequence[Share]) -> list[Share]:
    """The same shares, no two of one picture in one colour and pattern while there are enough of them."""
    taken: set[int] = set()
    found = []
    for share in shares:
        slot = share.slot
        while slot in taken and len(taken) < HUES * 4:
            slot = (slot + 1) % (HUES * 4)
        taken.add(slot)
        found.append(share if slot == share.slot else replace(share, slot=slot))
    return found


def lane_height(count: int) -> int:
    """Room for a number while few lanes stand above the bar, thin lines when there are many."""
    return 14 if count <= 4 else 7 if count <= 8 else 4


def render(bar: Bar, *, bar_id: str = "", compact: bool = False) -> SafeString:
    """The SVG of one bar. ``compact``: a thin one for lists, without lanes, marks and keyboard."""
    if not bar.known:
        return mark_safe(  # noqa: S308  numbers and escaped text only
            f'<svg class="membar membar-unknown" height="{BAR_HEIGHT}" role="img" aria-label="{escape(bar.sentence)}">'
            f'<rect class="membar-frame" x="0" y="0" width="100%" height="{BAR_HEIGHT}" rx="6"/>'
            f'<text x="50%" y="{BAR_HEIGHT // 2 + 4}" text-anchor="middle">no reading</text></svg>'
        )
    lanes = [] if compact else [share for share in bar.shares if share.limit_bytes is not None and not share.asleep]
    step = lane_height(len(lanes))
    top = step * len(lanes) + (4 if lanes else 0)
    height = 12 if compact else BAR_HEIGHT
    out = [
        f'<svg class="membar{" membar-compact" if compact else ""}" height="{top + height}"'
        f' data-membar="{escape(bar_id or bar.uuid)}" data-total="{bar.scale_bytes}" data-top="{top}"'
        + (
            f' role="img" aria-label="{escape(bar.sentence)}">'
            if compact
            else f' role="group" aria-label="Memory of {escape(bar.title)}; arrow keys walk its parts">'
        ),
        f'<rect class="membar-frame" x="0" y="{top}" width="100%" height="{height}" rx="{3 if compact else 6}"/>',
    ]
    place = 0
    starts: dict[str, int] = {}
    first = True
    for share in bar.shares:
        name = escape(share.label)
        starts[share.key] = place + share.baseline_bytes
        for part, value, words in (
            ("weights", share.baseline_bytes, "weights and engine"),
            ("used", share.used_bytes, "KV in use"),
            ("idle", share.prealloc_bytes, "KV mapped, idle"),
        ):
            asleep = " asleep" if share.asleep else ""
            out.append(
                _segment(
                    bar,
                    f"seg seg-{part} hue-{share.hue}{asleep}",
                    place,
                    value,
                    top,
                    height,
                    f"{name}: {words} {gib(value)} GiB",
                    key=share.key,
                    part=part,
                    overlays=([f"pat-{share.pattern}"] if share.pattern else [])
                    + (["hatch"] if part == "idle" else []),
                    focus=None if compact else (0 if first else -1),
                )
            )
            place += value
            first = False
    out.append(
        _segment(
            bar,
            "seg seg-other",
            place,
            bar.other_bytes,
            top,
            height,
            f"other processes {gib(bar.other_bytes)} GiB",
            key="other",
            part="other",
            overlays=[],
            focus=None if compact else (0 if first else -1),
        )
    )
    place += bar.other_bytes
    for share in bar.shares:
        promised = max(0, share.reserved_bytes - share.resident_bytes)
        if promised:
            out.append(
                _segment(
                    bar,
                    f"seg seg-promised hue-{share.hue}",
                    place,
                    min(promised, max(0, bar.scale_bytes - place)),
                    top,
                    height,
                    f"{escape(share.label)}: promised to its start {gib(promised)} GiB",
                    key=share.key,
                    part="promised",
                    overlays=[],
                    focus=None if compact else -1,
                )
            )
            place += promised
    if not compact:
        out.append(
            _segment(
                bar,
                "seg seg-free",
                bar.used_bytes,
                bar.free_bytes,
                top,
                height,
                f"free {gib(bar.free_bytes)} GiB",
                key="free",
                part="free",
                overlays=[],
                focus=-1,
            )
        )
        if 0 < bar.reserve_bytes < bar.total_bytes:
            x = _percent(bar, bar.total_bytes - bar.reserve_bytes)
            out.append(
                f'<g class="mark-reserve"><title>reserve {gib(bar.reserve_bytes)} GiB, kept free for the next deploy'
                f'</title><line x1="{x}" x2="{x}" y1="{top}" y2="{top + height}"/></g>'
            )
        for number, share in enumerate(lanes):
            out.append(_lane(bar, share, starts[share.key], step * number + step // 2, step, top, height))
    out.append("</svg>")
    return mark_safe("".join(out))  # noqa: S308  numbers and escaped text only


def _percent(bar: Bar, value: int) -> str:
    return f"{min(100.0, max(0.0, value / bar.scale_bytes * 100)):.3f}%"


def _segment(
    bar: Bar,
    classes: str,
    start: int,
    value: int,
    top: int,
    height: int,
    words: str,
    *,
    key: str,
    part: str,
    overlays: list[str],
    focus: int | None,
) -> str:
    x, width = _percent(bar, start), _percent(bar, max(0, value))
    shape = f'x="{x}" y="{top}" width="{width}" height="{height}"'
    keyboard = "" if focus is None else f' tabindex="{focus}" role="img"'
    extra = "".join(f'<rect {shape} fill="url(#{name})"/>' for name in overlays)
    return (
        f'<g class="{classes}" data-key="{escape(key)}" data-part="{part}"{keyboard}><title>{words}</title>'
        f'<rect {shape} class="fill"/>{extra}</g>'
    )


def _lane(bar: Bar, share: Share, start: int, y: int, step: int, top: int, height: int) -> str:
    """From the start of an instance's KV memory to its limit; thicker up to its guarantee, a notch at its floor."""
    limit = share.limit_bytes or 0
    end = start + limit
    x1, x2 = _percent(bar, start), _percent(bar, end)
    over = " lane-over" if share.over_bytes else ""
    words = f"{escape(share.label)}: limit {gib(limit)} GiB"
    if share.effective_limit_bytes is not None and share.effective_limit_bytes != limit:
        words += f" asked, {gib(share.effective_limit_bytes)} GiB in force"
    if share.guarantee_bytes:
        words += f", guarantee {gib(share.guarantee_bytes)} GiB"
    if share.floor_bytes:
        words += f", safety floor {gib(share.floor_bytes)} GiB"
    parts = [
        f'<g class="lane hue-{share.hue}{over}" data-lane="{escape(share.key)}" data-limit="{limit}"'
        f' data-guarantee="{share.guarantee_bytes}" data-floor="{share.floor_bytes or 0}"><title>{words}</title>',
        f'<line class="lane-span" x1="{x1}" x2="{x2}" y1="{y}" y2="{y}"/>',
    ]
    if share.guarantee_bytes:
        parts.append(
            f'<line class="lane-guarantee" x1="{x1}" x2="{_percent(bar, start + share.guarantee_bytes)}"'
            f' y1="{y}" y2="{y}"/>'
        )
    if share.floor_bytes:
        floor = _percent(bar, start + share.floor_bytes)
        parts.append(f'<line class="lane-floor" x1="{floor}" x2="{floor}" y1="{y - 3}" y2="{y + 3}"/>')
    parts.append(f'<line class="lane-end" x1="{x2}" x2="{x2}" y1="{y - step // 2 + 1}" y2="{y + step // 2}"/>')
    if share.over_bytes:
        parts.append(f'<line class="lane-drop" x1="{x2}" x2="{x2}" y1="{y}" y2="{top + height}"/>')
    if step >= 14:
        left = end / bar.scale_bytes > LABEL_ROOM  # no room behind its end: the number stands before its start
        parts.append(
            f'<text class="lane-text" x="{x1 if left else x2}" y="{y + 4}" dx="{-6 if left else 6}"'
            f' text-anchor="{"end" if left else "start"}">{gib(limit)}</text>'
        )
    parts.append("</g>")
    return "".join(parts)
