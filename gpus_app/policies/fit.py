"""What a launch needs per GPU, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpus_app.policies.base import GpuView, InstanceView, Plan
from gpus_app.policies.placement import Decision, GpuState, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What is known of a launch before it starts. Bytes are of the whole model unless named otherwise."""

    weights_bytes: int
    tensor_parallel_size: int = 1
    bundle_bytes: int = 0  # per GPU
    floor_bytes: int = 0  # safety floor of the KV cache, per GPU
    hidden_size: int = 0
    vocab_size: int = 0
    num_layers: int = 0
    enforce_eager: bool = False
    max_num_seqs: int | None = None  # None: vLLM's default for the card
    max_num_batched_tokens: int | None = None
    initial_limit_bytes: int | None = None
    kvcached: bool = True
    gpu_memory_utilization: float = 0.9  # only matters without kvcached: a static reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured in an earlier run of the same model, options and kind of GPU (``MemoryProfile``)."""

    baseline_bytes: int
    bundle_bytes: int | None = None
    floor_bytes: int | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedLine:
    """One term of a need, with where the number comes from."""

    label: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes per GPU that must be free for a start to succeed and make progress."""

    total_bytes: int
    baseline_bytes: int
    kv_bytes: int
    measured: bool  # from a profile rather than an estimate
    lines: tuple[NeedLine, ...]


class Verdict(StrEnum):
    FITS = "fits"
    AFTER_ROOM = "fits_after_making_room"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``plans`` (one a GPU, same order as ``gpus``) is filled for AFTER_ROOM; ``largest_bytes`` for DOES_NOT_FIT."""

    verdict: Verdict
    sentence: str
    gpus: tuple[GpuState, ...]
    decision: Decision
    plans: tuple[Plan, ...] = ()
    largest_bytes: int = 0
    suggested_tensor_parallel_size: int | None = None


def need(facts: LaunchFacts, *, gpu_total_bytes: int, profile: Profile | None = None) -> Need:
    """What one GPU must have free for this launch."""
    raise NotImplementedError


def judge(
    wanted: Need,
    request: Request,
    gpus: Sequence[GpuState],
    views: Mapping[str, tuple[GpuView, Sequence[InstanceView]]],
    now: float,
    *,
    facts: LaunchFacts | None = None,
    priority: int = 50,
) -> Judgement:
    """Fits now, fits after making room (with the plans), or does not fit (with the largest that would).

    ``views`` maps GPU UUIDs to what ``make_room`` needs; ``facts`` allows the suggestion of a tensor parallel size.
    """
    raise NotImplementedError
