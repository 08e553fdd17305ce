"""From rows to what an engine is asked to run: the spec of a model, the context of a start, and who can run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from gpus_app.models import Gpu, Host
from models_app.engines.base import ENGINES, Command, Engine, EngineSpec, LaunchContext
from models_app.models import Instance, LaunchAttempt, Model
from models_app.services.access import this_installation


def spec_of(model: Model, aliases: Sequence[str] | None = None) -> EngineSpec:
    """The model's options, as they are now. ``aliases``: of a model that is not saved yet."""
    if aliases is None:
        aliases = [alias.name for alias in model.aliases.all()] if model.pk else []  # a form's model is not saved yet
    return EngineSpec(
        model=model.model,
        source=model.source,
        hf_revision=model.hf_revision,
        served_model_names=(model.served_model_name, *aliases),
        max_model_len=model.max_model_len,
        dtype=model.dtype,
        quantization=model.quantization,
        tensor_parallel_size=model.tensor_parallel_size,
        enforce_eager=model.enforce_eager,
        enable_sleep_mode=model.enable_sleep_mode,
        enable_prefix_caching=model.enable_prefix_caching,
        kvcached=model.kvcached,
        kv_layout=model.kv_layout,
        extra_args=model.extra_args,
        load_format=model.load_format,
        spec_revision=model.spec_revision,
        facts=model.facts or {},
    )


def engine_of(host: Host | None) -> Engine:
    """The kind of engine that a host runs; without a host, what this machine would run."""
    return ENGINES[host.engine_kind if host else settings.SARDEENZ_ENGINE]


def context_of(row: Instance, attempt: LaunchAttempt, host: Host) -> LaunchContext:
    """Where and as what an attempt is started on this machine."""
    indices = dict(Gpu.objects.filter(uuid__in=row.gpu_uuids).values_list("uuid", "index"))
    return LaunchContext(
        installation=this_installation(),
        instance_id=row.pk,
        attempt_id=attempt.pk,
        run_dir=Path(attempt.run_dir),
        bind_host=host.address,
        port=row.port or 0,
        gpu_uuids=tuple(row.gpu_uuids),
        gpu_indices=tuple(indices[uuid] for uuid in row.gpu_uuids if uuid in indices),
        ipc_name=row.ipc_name,
        initial_limit_bytes=row.limit_bytes,
        hf_token=settings.SARDEENZ_HF_TOKEN,
        hf_home=settings.SARDEENZ_HF_HOME,
        vllm_command=settings.SARDEENZ_VLLM,
        versions=host.versions,
        sim=sim_settings(),
    )


def sim_settings() -> dict[str, Any]:
    faults = settings.SARDEENZ_SIM_FAULTS
    return {
        "sim_dir": str(settings.SARDEENZ_SIM_DIR),
        "speed": str(settings.SARDEENZ_SIM_SPEED),
        "faults": None if faults == "none" else faults,
    }


def preview(model: Model, host: Host | None, aliases: Sequence[str] | None = None) -> Command:
    """The command of a launch that has not been made: port, instance and attempt stand as 0."""
    gpus = list(Gpu.objects.filter(uuid__in=model.gpu_uuids)) if model.gpu_uuids else []
    context = LaunchContext(
        installation="0" * 8,
        instance_id=0,
        attempt_id=0,
        run_dir=Path(settings.SARDEENZ_RUN_DIR) / "0",
        bind_host=host.address if host else settings.SARDEENZ_HOST_ADDRESS,
        port=0,
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
        gpu_indices=tuple(gpu.index for gpu in gpus),
        ipc_name="sz-00000000-i0-a0",
        initial_limit_bytes=model.initial_limit_bytes,
        hf_token=settings.SARDEENZ_HF_TOKEN,
        hf_home=settings.SARDEENZ_HF_HOME,
        vllm_command=settings.SARDEENZ_VLLM,
        versions=host.versions if host else {},
        sim=sim_settings(),
    )
    return engine_of(host).command(spec_of(model, aliases), context)


def unusable_hosts(model: Model) -> dict[str, str]:
    """Hosts that cannot run the model's options, by name, with the reason (an unsupported pair of versions …)."""
    spec = spec_of(model)
    found = {}
    for host in Host.objects.all():
        errors = engine_of(host).check(spec, host.versions, allow_risky=True)
        if errors:
            found[host.name] = errors[0].message
    return found


def gpu_choice_errors(uuids: Sequence[str], tensor_parallel_size: int, host_name: str | None) -> dict[str, str]:
    """What is wrong with GPUs chosen by hand; empty when they exist, differ, share a host and are as many as needed."""
    if len(set(uuids)) != len(uuids):
        return {"gpu_uuids": "A GPU is chosen twice; each can hold one part of the model."}
    if len(uuids) != tensor_parallel_size:
        return {
            "gpu_uuids": f"{len(uuids)} GPUs are chosen, but the tensor parallel size is {tensor_parallel_size}: "
            f"choose exactly {tensor_parallel_size}."
        }
    gpus = list(Gpu.objects.filter(uuid__in=uuids).select_related("host"))
    unknown = set(uuids) - {gpu.uuid for gpu in gpus}
    if unknown:
        return {"gpu_uuids": f"There is no GPU {sorted(unknown)[0]} on any host."}
    names = sorted({gpu.host.name for gpu in gpus})
    if len(names) > 1:
        return {"gpu_uuids": f"The chosen GPUs are on {len(names)} hosts ({', '.join(names)}); choose them on one."}
    if host_name and names != [host_name]:
        return {"gpu_uuids": f"The chosen GPUs are on {names[0]}, not on {host_name}."}
    return {}
