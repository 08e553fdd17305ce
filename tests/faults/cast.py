"""Who plays in a run: the models of an engine, the stack's settings, and what may happen to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Never stopped, put to sleep or killed by a step, so its clients must never notice anything.
STEADY = "steady"
OURS = ("web", "router", "control", "beat", "host", "sampler", "valkey")
#: Of an engine's start: the process that keeps it, its API server, and the process with the weights.
PARTS = ("guardian", "engine", "core")
EVENING, NIGHT = "evening", "night"

_LIMITS = {
    "SARDEENZ_RESTART_BACKOFF_S": "0.5",
    "SARDEENZ_RESTART_BACKOFF_MAX_S": "2",
    "SARDEENZ_RESTART_LIMIT": "1000",
    "SARDEENZ_RESIDENCE_S": "2",
}


@dataclass(frozen=True)
class Cast:
    """``models``: served name → fields. ``presets``: name → models that run when it is saved. ``kinds``: step → how
    often it comes, and of whom. ``clients``: models that are streamed from all the time.
    """

    engine: str
    models: Mapping[str, Mapping[str, object]]
    presets: Mapping[str, tuple[str, ...]]
    clients: tuple[str, ...]
    kinds: Mapping[str, tuple[int, tuple[str, ...]]]
    settings: Mapping[str, str]
    #: Tokens of a client's stream: long enough that most faults fall into one, short enough for the drain limit.
    tokens: int
    #: Seconds between two streams of a client: a real engine on a CPU takes a core for each.
    pause_s: float
    #: Within so many seconds after the last act of a burst everything must be right; a start has so many.
    quiet_s: float
    start_s: float
    edit: tuple[int, int] = field(default=(2048, 4096))
    #: Models that no preset runs and every request may bring up; each must come when it is asked for.
    on_demand: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(name for name in self.models if name != STEADY)


_SMALL = ("alpha", "beta")
_VICTIMS = ("alpha", "beta", "wide", "big")

#: ``wide`` spans both GPUs; ``big`` takes most of one, so that others must give way.
SIMULATED = Cast(
    engine="simulated",
    models={
        STEADY: {"model": "Qwen/Qwen3-0.6B", "pinned": True},
        "alpha": {"model": "Qwen/Qwen3-0.6B", "enable_sleep_mode": True},
        "beta": {"model": "meta-llama/Llama-3.2-1B-Instruct", "enable_sleep_mode": True, "restart_policy": "always"},
        "wide": {"model": "Qwen/Qwen2.5-0.5B-Instruct", "tensor_parallel_size": 2},
        "big": {"model": "Qwen/Qwen3-8B", "enable_sleep_mode": True, "memory_policy": {"priority": 60}},
    },
    presets={NIGHT: (STEADY, "alpha"), EVENING: (STEADY, "alpha", "beta", "wide")},
    clients=(STEADY, "alpha", "beta"),
    kinds={
        "launch": (14, _VICTIMS),
        "scale": (2, ("beta",)),
        "stop": (4, _VICTIMS),
        "force_stop": (2, _VICTIMS),
        "restart": (2, _VICTIMS),
        "sleep": (5, _VICTIMS),
        "wake": (5, _VICTIMS),
        "move": (5, (STEADY, *_SMALL, "big")),
        "edit": (4, (STEADY, *_SMALL, "big")),
        "cancel": (3, (STEADY, *_SMALL, "big", "")),
        "limit": (6, (STEADY, *_VICTIMS)),
        "trim": (3, (STEADY, *_VICTIMS)),
        "make_room": (4, ("big",)),
        "preset": (3, (EVENING, NIGHT)),
        "kill": (12, OURS),
        "kill_engine": (8, PARTS),
        "database": (3, ("",)),
    },
    settings={
        **_LIMITS,
        "SARDEENZ_SIM_SPEED": "20",
        "SARDEENZ_SIM_GPUS": "2",
        "SARDEENZ_SIM_GPU_BYTES": "24GiB",
        "SARDEENZ_START_GRACE_S": "8",
        "SARDEENZ_PLACE_LIMIT_S": "30",
    },
    tokens=300,
    pause_s=0.3,
    quiet_s=120.0,
    start_s=120.0,
)

#: A model made for the run in ``{models}``; bfloat16 needs AMX, which not every machine has.
_TINY: dict[str, object] = {
    "source": "local",
    "model": "{models}/tiny",
    "max_model_len": 448,
    "dtype": "float32",
    "enforce_eager": True,
    "kvcached": False,
    "load_format": "dummy",
    "extra_args": "--max-num-seqs 8 --gpu-memory-utilization 0.2",
}

#: vLLM's build for CPUs, which neither sleeps nor shares KV memory; a start takes it half a minute or more, so that one
#: victim has to do.
VLLM = Cast(
    engine="vllm",
    models={STEADY: {**_TINY, "pinned": True}, "alpha": {**_TINY, "restart_policy": "always"}},
    presets={EVENING: (STEADY, "alpha")},
    clients=(STEADY, "alpha"),
    kinds={
        "launch": (3, ("alpha",)),
        "restart": (1, ("alpha",)),
        "move": (1, (STEADY, "alpha")),
        "edit": (1, (STEADY, "alpha")),
        "cancel": (1, (STEADY, "alpha", "")),
        "preset": (1, (EVENING,)),
        "kill": (8, OURS),
        "kill_engine": (5, PARTS),
        "database": (1, ("",)),
    },
    settings={
        **_LIMITS,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    },
    tokens=100,
    pause_s=3.0,
    quiet_s=300.0,
    start_s=240.0,
    edit=(256, 448),
)

_RIVALS = ("first", "second")

#: Two models on a card that holds one of them: every request for the other has room made.
ON_DEMAND = Cast(
    engine="simulated",
    models={
        name: {
            "model": "Qwen/Qwen3-0.6B",
            "max_model_len": 4096,
            "on_demand": True,
            "enable_sleep_mode": sleeps,
            "restart_policy": "on_failure",
        }
        for name, sleeps in zip(_RIVALS, (True, False), strict=True)
    },
    presets={},
    clients=(),
    kinds={
        "ask": (16, _RIVALS),
        "sleep": (2, _RIVALS),
        "wake": (2, _RIVALS),
        "stop": (2, _RIVALS),
        "restart": (1, _RIVALS),
        "limit": (2, _RIVALS),
        "cancel": (2, _RIVALS),
        "kill": (6, OURS),
        "kill_engine": (8, PARTS),
        "database": (2, ("",)),
    },
    settings={
        **_LIMITS,
        "SARDEENZ_SIM_SPEED": "20",
        "SARDEENZ_SIM_GPUS": "1",
        "SARDEENZ_SIM_GPU_BYTES": "6GiB",
        "SARDEENZ_START_GRACE_S": "8",
        "SARDEENZ_RESIDENCE_S": "0",
        "SARDEENZ_ROUTER_QUEUE_WAIT_S": "60",
    },
    tokens=0,
    pause_s=0.0,
    quiet_s=120.0,
    start_s=120.0,
    on_demand=_RIVALS,
)

CASTS = {"simulated": SIMULATED, "vllm": VLLM, "on-demand": ON_DEMAND}
