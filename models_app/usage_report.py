"""What was used, as pages, REST and files show it: sums over days, keys and models, and times out of histograms."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Literal, get_args

from django.db.models import QuerySet

from models_app.errors import InvalidInput
from models_app.models import UsageRecord
from models_app.router.usage import INTER_TOKEN_BOUNDS_MS, TTFT_BOUNDS_MS

#: What a line stands for: one key on one model in one day, or the sum over all but one of these.
By = Literal["all", "day", "key", "model"]
GROUPINGS: tuple[By, ...] = get_args(By)
MOST_DAYS = 366
_DEFAULT_DAYS = 7
_CSV_ROWS = 500


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which usage is meant. Days are UTC and both are part of it; no key or model means every one."""

    start: date
    end: date
    key: str | None = None
    model: str | None = None

    @property
    def days(self) -> list[date]:
        return [self.start + timedelta(days=n) for n in range((self.end - self.start).days + 1)]


def today() -> date:
    return datetime.now(UTC).date()


def days_of(start: date | None = None, end: date | None = None) -> tuple[date, date]:
    """First and last day: today and the six days before where none are given. Raises InvalidInput for a wrong span."""
    end = end or today()
    start = start or end - timedelta(days=min(_DEFAULT_DAYS - 1, (end - date.min).days))
    if start > end:
        raise InvalidInput({"start": "The first day lies after the last one."})
    if (end - start).days >= MOST_DAYS:
        raise InvalidInput({"start": f"Choose at most {MOST_DAYS} days."})
    return start, end


def quantile(histogram: Mapping[str, int], bounds: Sequence[int], share: float) -> float | None:
    """The value that ``share`` (0 to 1) of all values do not exceed, by straight line within its bucket.

    ``histogram`` counts by upper bound, "inf" above the last. None for an empty one; what lies above the last bound is
    told as that bound, for nothing more is known of it.
    """
    total = sum(histogram.values())
    if not total:
        return None
    rank, below, lower = share * total, 0, 0
    for bound in bounds:
        count = histogram.get(str(bound), 0)
        if count and below + count >= rank:
            return lower + (bound - lower) * max(0.0, rank - below) / count
        below += count
        lower = bound
    return float(bounds[-1])


@dataclass(slots=True)
class UsageSum:
    """Requests, tokens and times added up. Times are milliseconds; those of the first token are of streams only."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: Counter[str] = field(default_factory=Counter)
    inter_token: Counter[str] = field(default_factory=Counter)

    def add(self, row: UsageRecord) -> None:
        self.requests += row.requests
        self.errors += row.errors
        self.prompt_tokens += row.prompt_tokens
        self.completion_tokens += row.completion_tokens
        self.ttft.update(row.ttft_histogram)
        self.inter_token.update(row.inter_token_histogram)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def ttft_p50_ms(self) -> float | None:
        return quantile(self.ttft, TTFT_BOUNDS_MS, 0.5)

    @property
    def ttft_p95_ms(self) -> float | None:
        return quantile(self.ttft, TTFT_BOUNDS_MS, 0.95)

    @property
    def inter_token_p50_ms(self) -> float | None:
        return quantile(self.inter_token, INTER_TOKEN_BOUNDS_MS, 0.5)

    @property
    def inter_token_p95_ms(self) -> float | None:
        return quantile(self.inter_token, INTER_TOKEN_BOUNDS_MS, 0.95)


@dataclass(slots=True)
class UsageLine(UsageSum):
    """A sum with what it is of; None where it is over all."""

    day: date | None = None
    key: str | None = None
    model: str | None = None


@dataclass(slots=True)
class UsageReport:
    """Lines, newest day or largest first, their total, and the total of each day that has any."""

    lines: list[UsageLine]
    totals: UsageSum
    days: dict[date, UsageSum]


def usage_rows(wanted: UsageFilter) -> QuerySet[UsageRecord]:
    """The rows that are meant, oldest day first."""
    rows = UsageRecord.objects.filter(day__gte=wanted.start, day__lte=wanted.end)
    if wanted.key is not None:
        rows = rows.filter(key_name=wanted.key)
    if wanted.model is not None:
        rows = rows.filter(served_model_name=wanted.model)
    return rows.order_by("day", "key_name", "served_model_name")


def usage_report(wanted: UsageFilter, by: By = "all") -> UsageReport:
    """One query, read row by row: histograms lie in JSON, which no database adds up."""
    lines: dict[tuple[date | None, str | None, str | None], UsageLine] = {}
    totals, days = UsageSum(), dict[date, UsageSum]()
    for row in usage_rows(wanted).iterator(chunk_size=1000):
        of = (
            row.day if by in ("all", "day") else None,
            row.key_name if by in ("all", "key") else None,
            row.served_model_name if by in ("all", "model") else None,
        )
        line = lines.get(of)
        if line is None:
            line = lines[of] = UsageLine(day=of[0], key=of[1], model=of[2])
        for each in (line, totals, days.setdefault(row.day, UsageSum())):
            each.add(row)
    ordered = list(lines.values())
    if by in ("all", "day"):  # sorted is stable: within a day, keys and models stay in their order
        ordered.sort(key=lambda line: line.day or date.min, reverse=True)
    else:
        ordered.sort(key=lambda line: (-line.tokens, -line.requests, line.key or "", line.model or ""))
    return UsageReport(ordered, totals, days)


def usage_names() -> tuple[list[str], list[str]]:
    """Every key and every model that has ever been used, for choosing."""
    keys = UsageRecord.objects.order_by("key_name").values_list("key_name", flat=True).distinct()
    models = UsageRecord.objects.order_by("served_model_name").values_list("served_model_name", flat=True).distinct()
    return list(keys), list(models)


# --- CSV -------------------------------------------------------------------------------------------

CSV_COLUMNS = (
    "day", "key", "model", "requests", "errors", "prompt_tokens", "completion_tokens",
    "ttft_p50_ms", "ttft_p95_ms", "inter_token_p50_ms", "inter_token_p95_ms",
)  # fmt: skip
#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(text: str) -> str:
    """Text that no spreadsheet runs: what looks like a formula gets an apostrophe before it."""
    return f"'{text}" if text.startswith(_FORMULA) else text


class _Echo:
    """What ``csv.writer`` writes to, so that it hands lines back instead of keeping them."""

    def write(self, value: str) -> str:
        return value


def usage_csv(wanted: UsageFilter) -> Iterator[bytes]:
    """RFC 4180 with a header line, a block of rows at a time: it never lies in memory as a whole."""
    writer = csv.writer(_Echo())
    lines: list[str] = [writer.writerow(CSV_COLUMNS)]
    for row in usage_rows(wanted).iterator(chunk_size=_CSV_ROWS):
        total = UsageSum()
        total.add(row)
        times = (total.ttft_p50_ms, total.ttft_p95_ms, total.inter_token_p50_ms, total.inter_token_p95_ms)
        lines.append(
            writer.writerow(
                [
                    row.day.isoformat(),
                    cell(row.key_name),
                    cell(row.served_model_name),
                    *(row.requests, row.errors, row.prompt_tokens, row.completion_tokens),
                    *("" if one is None else f"{one:.1f}" for one in times),
                ]
            )
        )
        if len(lines) >= _CSV_ROWS:
            yield "".join(lines).encode()
            lines.clear()
    if lines:
        yield "".join(lines).encode()


def csv_name(wanted: UsageFilter) -> str:
    return f"usage-{wanted.start.isoformat()}-{wanted.end.isoformat()}.csv"
