"""Which GPUs a launch goes to, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Strategy(StrEnum):
    """``spread``: the GPU with most bytes left, so that every KV cache can grow. ``pack``: the fullest that fits."""

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One card as the placer sees it.

    ``free_measured_bytes`` is NVML's live figure (None: not read); ``ledger_free_bytes`` is what our own book leaves
    (see ``ledger_free``), reserve and foreign memory already taken off. The worse of the two counts.
    """

    uuid: str
    host: str
    index: int
    name: str
    total_bytes: int
    free_measured_bytes: int | None
    ledger_free_bytes: int
    reserve_bytes: int = 0
    foreign_bytes: int = 0
    foreign_names: tuple[str, ...] = ()
    cordoned: bool = False
    host_cordoned: bool = False
    host_reachable: bool = True
    faulty: str = ""  # the reason, empty when it works
    starting: bool = False  # an instance is starting here: a further start waits for it
    instances: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be placed. ``gpu_uuids`` given = chosen by hand, in that order; ``avoid`` = GPUs with its replicas."""

    need_bytes: int
    tensor_parallel_size: int = 1
    host: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()
    strategy: Strategy = Strategy.SPREAD
    anyway: bool = False  # place although the bytes are short (needs permission; checked by the caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why one GPU was not taken. ``code``: cordoned, host_cordoned, unreachable, faulty, other_host, short, set."""

    uuid: str
    host: str
    index: int
    code: str
    sentence: str
    available_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``gpus`` is empty when nothing was found; ``reason`` is a sentence in both cases."""

    gpus: tuple[GpuState, ...]
    reason: str
    rejections: tuple[Rejection, ...] = ()
    largest_bytes: int = 0  # per GPU, the most that a set of the asked size could be given
    waits: bool = False  # a start is under way on a chosen GPU

    @property
    def host(self) -> str | None:
        return self.gpus[0].host if self.gpus else None


def ledger_free(
    total_bytes: int, holdings: Iterable[tuple[int, int]], *, reserve_bytes: int = 0, foreign_bytes: int = 0
) -> int:
    """What our book leaves: total − reserve − foreign − Σ max(reserved, resident) of ``holdings``; may be negative."""
    held = sum(max(reserved, resident) for reserved, resident in holdings)
    return total_bytes - reserve_bytes - foreign_bytes - held


def choose(gpus: Sequence[GpuState], request: Request) -> Decision:
    """The GPUs for one instance, all on one host. The same input gives the same answer."""
    raise NotImplementedError
