"""Rows for tests, in plain functions: keyword-only, sensible by default, what a test is about is overridden."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import date
from typing import Any

from django.contrib.auth.models import Group, User
from django.utils import timezone

from gpus_app.models import Gpu, GpuPolicy, Host
from models_app.models import ApiKey, Instance, LaunchAttempt, MemoryPolicy, Model, ModelAlias, UsageRecord
from models_app.permissions import roles_ensure
from models_app.services.keys import api_key_create
from models_app.states import DesiredState, InstanceState, Stage

GIB = 1024**3
_numbers = itertools.count(1)

#: Facts of a small model (the shape of Qwen3-0.6B), as ``Model.facts`` holds them.
SMALL_FACTS: dict[str, Any] = {
    "architecture": "Qwen3ForCausalLM",
    "num_layers": 28,
    "num_attention_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
    "weights_bytes": 1_503_300_328,
    "kv_bytes_per_token_per_gpu": 114_688,
}


def make_user(
    *, name: str = "", role: str | None = "operator", password: str = "a-long-password", **fields: Any
) -> User:
    """A user in the group of ``role``; None: logged in but in no group, which makes a viewer."""
    user = User.objects.create_user(name or f"user{next(_numbers)}", password=password, **fields)
    if role is not None:
        roles_ensure()
        user.groups.add(Group.objects.get(name=role))
    return user


def make_host(*, name: str = "gpu-a", seen: bool = True, **fields: Any) -> Host:
    """A host that was heard of just now (``seen``), running simulated engines."""
    now = timezone.now()
    defaults: dict[str, Any] = {
        "engine_kind": Host.EngineKind.SIMULATED,
        "worker_seen_at": now if seen else None,
        "sampler_seen_at": now if seen else None,
        "versions": {"vllm": "0.24.0", "kvcached": "0.1.6"},
    }
    return Host.objects.create(name=name, **(defaults | fields))


def make_gpu(*, host: Host | None = None, index: int = 0, total_bytes: int = 80 * GIB, **fields: Any) -> Gpu:
    host = host or Host.objects.first() or make_host()
    defaults: dict[str, Any] = {"uuid": f"GPU-{host.name}-{index}", "name": "Simulated H100 80GB"}
    gpu = Gpu.objects.create(host=host, index=index, total_bytes=total_bytes, **(defaults | fields))
    GpuPolicy.objects.create(gpu=gpu)
    return gpu


def make_model(*, served_model_name: str = "", aliases: Sequence[str] = (), **fields: Any) -> Model:
    """A small catalogue model with known facts."""
    defaults: dict[str, Any] = {
        "source": Model.Source.CATALOGUE,
        "model": "Qwen/Qwen3-0.6B",
        "facts": dict(SMALL_FACTS),
    }
    model = Model.objects.create(
        served_model_name=served_model_name or f"model-{next(_numbers)}", **(defaults | fields)
    )
    MemoryPolicy.objects.create(model=model)
    for alias in aliases:
        ModelAlias.objects.create(name=alias, model=model)
    return model


def make_instance(
    *,
    model: Model | None = None,
    host: Host | None = None,
    gpus: Sequence[Gpu] = (),
    state: str = "ready",
    **fields: Any,
) -> Instance:
    """An instance as it would stand in ``state``: placed, with a port and an attempt once it has a process."""
    model = model or make_model()
    host = host or (gpus[0].host if gpus else Host.objects.first() or make_host())
    chosen = list(gpus) or list(host.gpus.all()[:1]) or [make_gpu(host=host)]
    placed = state != InstanceState.PENDING
    defaults: dict[str, Any] = {
        "state": state,
        "desired_state": DesiredState.STOPPED if state == InstanceState.STOPPED else DesiredState.RUNNING,
        "stage": Stage.READY if state == InstanceState.READY else Stage.STARTING,
        "host": host if placed else None,
        "gpu_uuids": [gpu.uuid for gpu in chosen] if placed else [],
        "reserved_bytes": 4 * GIB if placed else 0,
        "spec_revision": model.spec_revision,
    }
    started = state not in (InstanceState.PENDING, InstanceState.SCHEDULED)
    if started:
        defaults["port"] = 20000 + next(_numbers)
    if state == InstanceState.READY:
        defaults |= {
            "ready_at": timezone.now(),
            "capacity_bytes": 40 * GIB,
            "bundle_bytes": 117_440_512,
            "hard_minimum_bytes": 2 * 117_440_512,
            "safety_floor_bytes": 9 * 117_440_512,
            "effective_limit_bytes": 40 * GIB,
            "provider": "addon",
        }
    instance = Instance.objects.create(model=model, **(defaults | fields))
    if started:
        attempt = make_attempt(instance=instance)
        instance.attempt = attempt
        instance.ipc_name = f"sz-test0000-i{instance.pk}-a{attempt.pk}"
        instance.save()
    return instance


def make_attempt(*, instance: Instance, number: int = 1, **fields: Any) -> LaunchAttempt:
    assert instance.host is not None
    attempt = LaunchAttempt.objects.create(
        instance=instance, number=number, host=instance.host, **({"exec_at": timezone.now(), "run_dir": ""} | fields)
    )
    if not attempt.run_dir:
        attempt.run_dir = f"/nonexistent/{attempt.pk}"
        attempt.save()
    return attempt


def make_key(*, name: str = "", role: str = "operator", **fields: Any) -> tuple[ApiKey, str]:
    """A key and its secret."""
    return api_key_create(name or f"key{next(_numbers)}", role=role, actor="test", **fields)


def make_usage(
    *, day: date, key: str, model: str, requests: int = 1, prompt: int = 0, completion: int = 0, **fields: Any
) -> UsageRecord:
    """What a key used of a model in a day, as the control worker has added it up."""
    return UsageRecord.objects.create(
        day=day,
        key_name=key,
        served_model_name=model,
        requests=requests,
        prompt_tokens=prompt,
        completion_tokens=completion,
        **fields,
    )


def make_record(
    host: Host, *, used: dict[str, int] | None = None, instances: Sequence[Instance] = ()
) -> dict[str, Any]:
    """A sample record of one host as the sampler writes it: ``used`` by GPU UUID, instances holding 1 GiB each."""
    used = used or {}
    gpus = []
    for gpu in host.gpus.all():
        mine = [row for row in instances if gpu.uuid in row.gpu_uuids]
        taken = used.get(gpu.uuid, len(mine) * GIB)
        gpus.append(
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "name": gpu.name,
                "total": gpu.total_bytes,
                "used": taken,
                "free": gpu.total_bytes - taken,
                "util": 0.0,
                "temp": None,
                "power": None,
                "power_limit": None,
                "error": None,
                "other": taken - len(mine) * GIB,
                "other_processes": [],
                "instances": [
                    {"id": row.pk, "name": row.model.served_model_name, "resident": GIB, "state": "ok"} for row in mine
                ],
            }
        )
    return {"type": "sample", "host": host.name, "t": time.time(), "seq": 1, "sampler": {"lag_s": 0.0}, "gpus": gpus}
