"""What the templates need and Django does not have: sizes, moments, status words, memory bars."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from models_app.models import Instance, Operation
from models_app.presentation import actions, kv_meter, memory_bar, words
from models_app.presentation.board import Row

register = template.Library()

register.filter("gib", words.gib)
register.filter("size", words.size)
register.filter("duration", words.duration)


register.filter("milliseconds", words.milliseconds)


@register.filter
def thousands(number: int) -> str:
    """1234567 as 1,234,567."""
    return f"{number:,}"


@register.filter
def state_word(instance: Instance) -> words.Word:
    return words.state_word(instance)


@register.filter
def limit_word(instance: Instance) -> words.Word:
    return words.limit_word(instance)


@register.filter
def stage_text(instance: Instance) -> str:
    return words.stage_text(instance)


@register.filter
def why(instance: Instance) -> str:
    return words.why(instance)


@register.filter
def next_step(instance: Instance) -> str:
    return words.next_step(instance)


@register.filter
def enforcer(instance: Instance) -> str:
    """Who holds the engine to its limit."""
    return words.ENFORCERS.get(instance.provider, words.ENFORCERS[""])


@register.filter
def limit_sentence(row: Row) -> str:
    return words.limit_sentence(row.instance, row.share.footprint_bytes)


@register.filter
def operation_word(operation: Operation) -> words.Word:
    return words.OPERATION_WORDS[operation.state]


@register.filter
def step_word(step: dict[str, Any]) -> words.Word:
    return words.STEP_WORDS.get(str(step.get("state")), words.QUEUED)


@register.filter
def unlocalized(number: float) -> str:
    """A number as HTML attributes want it."""
    return f"{number:.4f}"


@register.filter
def times(number: float | None, factor: int) -> float | None:
    return None if number is None else number * factor


@register.filter(name="words")
def split_words(text: str) -> list[str]:
    return text.split()


@register.filter
def percent_of(part: float | None, whole: float | None) -> int | None:
    """Whole percent, or None where either is not known."""
    return None if part is None or not whole else round(part / whole * 100)


@register.simple_tag
def badge(word: words.Word) -> SafeString:
    """A status word with its icon; the colour only repeats what word and shape say."""
    return format_html(
        '<span class="state tone-{}"><i class="ti ti-{}" aria-hidden="true"></i>{}</span>',
        word.tone,
        word.icon,
        word.text,
    )


@register.simple_tag
def icon(name: str) -> SafeString:
    return format_html('<i class="ti ti-{}" aria-hidden="true"></i>', name)


@register.simple_tag
def moment(when: datetime | None, style: str = "time") -> SafeString:
    """A point in time; the script shows it in the reader's zone. ``style``: time, date, or ago."""
    if when is None:
        return format_html('<span class="text-secondary">{}</span>', "–")
    if style == "ago":
        text = f"{words.duration((timezone.now() - when).total_seconds())} ago"
    else:
        text = f"{when:%Y-%m-%d %H:%M:%S} UTC"
    return format_html(
        '<time datetime="{}" data-show="{}" title="{}">{}</time>',
        when.isoformat(timespec="seconds"),
        style,
        f"{when:%Y-%m-%d %H:%M:%S} UTC",
        text,
    )


@register.simple_tag
def since(when: datetime | None) -> SafeString:
    """How long something has lasted, kept running by the script."""
    if when is None:
        return format_html("{}", "")
    return format_html(
        '<time datetime="{}" data-show="for" title="since {}">{}</time>',
        when.isoformat(timespec="seconds"),
        f"{when:%Y-%m-%d %H:%M:%S} UTC",
        words.duration((timezone.now() - when).total_seconds()),
    )


@register.simple_tag
def membar(bar: memory_bar.Bar, bar_id: str = "", compact: bool = False) -> SafeString:
    return memory_bar.render(bar, bar_id=bar_id, compact=compact)


@register.simple_tag
def kvbar(share: memory_bar.Share, scale_bytes: int | None = None) -> SafeString:
    return kv_meter.render(share, scale_bytes=scale_bytes)


@register.simple_tag
def row_actions(row: Row) -> SafeString:
    return actions.render(row.instance.pk, row.key, row.label, row.actions, row.more)


@register.simple_tag
def swatch(share: memory_bar.Share) -> SafeString:
    return kv_meter.swatch(share)


@register.simple_tag(takes_context=True)
def query(context: dict[str, Any], **changes: object) -> str:
    """The page's query string with some parameters changed, for paging and filters."""
    params = context["request"].GET.copy()
    for name, value in changes.items():
        if value in (None, ""):
            params.pop(name, None)
        else:
            params[name] = str(value)
    return f"?{params.urlencode()}"
