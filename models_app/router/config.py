"""The router's limits of size, time and number, in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Seconds end in ``_s``, sizes in ``_bytes``. There is no limit on how long a stream may run in all."""

    # what a client may send
    max_body_bytes: int = 32 * MIB
    max_upload_bytes: int = 200 * MIB  # multipart (audio)
    body_idle_s: float = 30.0  # silence of the client while it sends its body
    max_buffered_bytes: int = 1024 * MIB  # bodies of all requests in this process together

    # towards the engine
    connect_s: float = 3.0
    first_byte_s: float = 600.0  # of a stream
    answer_s: float = 3600.0  # of an answer that is not a stream: its first byte comes when it is complete
    idle_s: float = 300.0  # between two pieces of an answer
    keepalive_s: float = 4.0  # vLLM's server closes idle connections after 5 s: be first, and never race it
    max_idle_connections: int = 256  # kept per engine
    attempts: int = 3  # engines tried for one request, all before the first byte
    buffer_bytes: int = 64 * 1024  # of an answer held for a slow reader before the engine is paused
    sweep_s: float = 0.25  # how often the limits above are looked at

    # passive health
    cool_down_s: float = 2.0  # after a connection error; doubles with each further one
    cool_down_max_s: float = 30.0
    failures_to_cool: int = 3  # 5xx answers in a row that cool an engine which still takes connections
    suspect_pause_s: float = 3.0  # between two hints to the control side to look at one engine

    # waiting for a model
    queue_limit: int = 512  # per model
    queue_wait_s: float = 900.0
    slot_wait_s: float = 30.0  # for a place under the model's concurrency cap
    slot_queue_limit: int = 64
    demand_repeat_s: float = 5.0  # the wish is a hint: say it again while someone waits
    failed_demand_s: float = 30.0  # a failed model is asked for again no more often than this
    commit_stream_s: float = 5.0  # a waiting stream gets its headers and comments from then on
    comment_s: float = 10.0  # silence after which a stream gets an SSE comment

    # trust in what was last heard
    key_age_limit_s: float = 3600.0

    # accounting
    usage_flush_s: float = 2.0
    # daphne never waits for a slow reader and cannot cut an answer off: with this set, answers are bounded, and those
    # that are no streams begin only when they are complete
    max_response_bytes: int | None = None
    metrics_open: bool = False  # /metrics without a key
