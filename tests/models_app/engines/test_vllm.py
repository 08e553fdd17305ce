"""Command line and environment of an engine start."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from models_app.engines.base import ENGINES, EngineSpec, LaunchContext
from models_app.engines.environment import extra_names
from models_app.engines.vllm import MIDDLEWARE, masked
from models_app.errors import InvalidInput

QWEN = EngineSpec(model="Qwen/Qwen3-8B", served_model_names=("qwen3-8b", "qwen"))


def context(tmp_path: Path, **more: object) -> LaunchContext:
    values: dict[str, object] = {
        "installation": "0a1b2c3d", "instance_id": 3, "attempt_id": 12, "run_dir": tmp_path / "12",
        "bind_host": "127.0.0.1", "port": 23456, "gpu_uuids": ("GPU-aa", "GPU-bb"), "ipc_name": "sz-0a1b2c3d-i3-a12",
        "vllm_command": "/opt/vllm/bin/vllm", "versions": {"vllm": "0.24.0", "kvcached": "0.1.6"},
    }  # fmt: skip
    return LaunchContext(**{**values, **more})  # type: ignore[arg-type]


def after(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_command_line_holds_what_is_ours_and_the_options(tmp_path: Path) -> None:
    spec = dataclasses.replace(
        QWEN, max_model_len=8192, tensor_parallel_size=2, enforce_eager=True, enable_sleep_mode=True, dtype="bfloat16",
        quantization="awq", load_format="dummy", hf_revision="main", extra_args="--max_num_seqs=8",
    )  # fmt: skip
    argv = ENGINES["vllm"].command(spec, context(tmp_path)).argv
    assert argv[:3] == ("/opt/vllm/bin/vllm", "serve", "Qwen/Qwen3-8B")
    assert after(argv, "--host") == "127.0.0.1"
    assert after(argv, "--port") == "23456"
    assert argv[argv.index("--served-model-name") + 1 :][:2] == ("qwen3-8b", "qwen")
    assert after(argv, "--tensor-parallel-size") == "2"
    assert after(argv, "--max-model-len") == "8192"
    assert after(argv, "--middleware") == MIDDLEWARE
    assert after(argv, "--max-num-seqs") == "8"
    assert "/metrics" in after(argv, "--disable-access-log-for-endpoints").split(",")
    assert {"--enforce-eager", "--enable-sleep-mode", "--enable-prefix-caching", "--shutdown-timeout"} <= set(argv)


def test_what_is_not_given_is_left_to_vllm(tmp_path: Path) -> None:
    argv = ENGINES["vllm"].command(QWEN, context(tmp_path)).argv
    assert not {"--max-model-len", "--dtype", "--quantization", "--load-format", "--revision"} & set(argv)


def test_prefix_caching_off_uses_the_spelling_that_every_version_takes(tmp_path: Path) -> None:
    spec = dataclasses.replace(QWEN, enable_prefix_caching=False)
    assert "--no-enable-prefix-caching" in ENGINES["vllm"].command(spec, context(tmp_path)).argv


def test_gpus_are_addressed_by_uuid_in_a_fixed_order(tmp_path: Path) -> None:
    env = ENGINES["vllm"].command(QWEN, context(tmp_path)).env
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_kvcached_gets_a_segment_name_of_this_start(tmp_path: Path) -> None:
    env = ENGINES["vllm"].command(QWEN, context(tmp_path, initial_limit_bytes=4 << 30)).env
    assert (env["ENABLE_KVCACHED"], env["KVCACHED_AUTOPATCH"]) == ("true", "1")
    assert env["KVCACHED_IPC_NAME"] == "sz-0a1b2c3d-i3-a12"
    assert env["SARDEENZ_INITIAL_LIMIT_BYTES"] == str(4 << 30)
    assert "KVCACHED_CONTIGUOUS_LAYOUT" not in env
    assert "VLLM_PLUGINS" not in env


@pytest.mark.parametrize(("vllm", "value"), [("0.19.1", "0"), ("0.24.0", "0"), ("0.28.0", None), ("0.30.0+cpu", None)])
def test_old_runner_is_asked_for_below_028(tmp_path: Path, vllm: str, value: str | None) -> None:
    env = ENGINES["vllm"].command(QWEN, context(tmp_path, versions={"vllm": vllm})).env
    assert env.get("VLLM_USE_V2_MODEL_RUNNER") == value


@pytest.mark.parametrize(("layout", "value"), [("contiguous", "true"), ("non_contiguous", "false")])
def test_layout_is_carried_when_chosen(tmp_path: Path, layout: str, value: str) -> None:
    env = ENGINES["vllm"].command(dataclasses.replace(QWEN, kv_layout=layout), context(tmp_path)).env
    assert env["KVCACHED_CONTIGUOUS_LAYOUT"] == value


def test_kvcached_off_is_said_so(tmp_path: Path) -> None:
    env = ENGINES["vllm"].command(dataclasses.replace(QWEN, kvcached=False), context(tmp_path)).env
    assert env["ENABLE_KVCACHED"] == "false"
    assert "KVCACHED_IPC_NAME" not in env
    assert "VLLM_USE_V2_MODEL_RUNNER" not in env


def test_no_secret_of_the_worker_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "DATABASE_URL", "REDIS_URL", "SECRET_KEY", "SARDEENZ_SECRET_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY",
        "SARDEENZ_REDIS_URL", "HF_TOKEN", "DJANGO_SETTINGS_MODULE", "VLLM_SERVER_DEV_MODE", "PYTHONPATH",
    )  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, f"secret-{name}")
    monkeypatch.setenv("SARDEENZ_ENGINE_ENV", ",".join(secrets[:8]) + ",MY_TUNING")
    monkeypatch.setenv("MY_TUNING", "yes")
    command = ENGINES["vllm"].command(QWEN, context(tmp_path))
    assert not [value for value in command.env.values() if value.startswith("secret-") and "AWS" not in value]
    assert command.env["MY_TUNING"] == "yes"
    monkeypatch.setenv("SARDEENZ_ENGINE_ENV", "")
    assert "AWS_SECRET_ACCESS_KEY" not in ENGINES["vllm"].command(QWEN, context(tmp_path)).env


def test_names_that_are_ours_cannot_be_let_through() -> None:
    names, errors = extra_names("MY_TUNING, VLLM_SERVER_DEV_MODE")
    assert names == ["MY_TUNING"]
    assert "VLLM_SERVER_DEV_MODE" in errors[0]


def test_cpu_settings_of_the_host_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    env = ENGINES["vllm"].command(QWEN, context(tmp_path)).env
    assert (env["VLLM_CPU_KVCACHE_SPACE"], env["OMP_NUM_THREADS"]) == ("1", "1")


def test_hub_token_goes_by_environment_never_by_command_line(tmp_path: Path) -> None:
    command = ENGINES["vllm"].command(QWEN, context(tmp_path, hf_token="hf_secret", offline=True))
    assert command.env["HF_TOKEN"] == "hf_secret"
    assert command.env["HF_HUB_OFFLINE"] == "1"
    assert not [word for word in (*command.argv, *command.masked_argv) if "hf_secret" in word]


def test_plugin_allow_list_of_the_operator_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert ENGINES["vllm"].command(QWEN, context(tmp_path)).env["VLLM_PLUGINS"] == "lora_resolver,sardeenz"


def test_only_our_package_is_put_on_the_path_not_the_repository(tmp_path: Path) -> None:
    command = ENGINES["vllm"].command(QWEN, context(tmp_path))
    assert command.env["PYTHONPATH"] == str(tmp_path / "12" / "addon")
    assert list(command.links) == ["addon/models_app"]
    entry_points = next(text for name, text in command.files.items() if name.endswith("dist-info/entry_points.txt"))
    assert "[vllm.general_plugins]\nsardeenz = models_app.kvcache_addon.engine_core:register" in entry_points


def test_temporary_folder_leaves_room_for_socket_names(tmp_path: Path) -> None:
    env = ENGINES["vllm"].command(QWEN, context(tmp_path, attempt_id=2**63)).env
    assert len(env["TMPDIR"]) + 1 + 36 <= 107
    assert not env["TORCHINDUCTOR_CACHE_DIR"].startswith(env["TMPDIR"])


def test_simulated_engine_takes_the_same_command_line(tmp_path: Path) -> None:
    spec = dataclasses.replace(QWEN, facts={"num_layers": 36})
    sim = {"sim_dir": tmp_path / "sim", "speed": 20.0, "faults": {"slow_load": 2, "hang": None}}
    real = ENGINES["vllm"].command(spec, context(tmp_path))
    command = ENGINES["simulated"].command(spec, context(tmp_path, sim=sim))
    assert command.argv[:3] == (sys.executable, "-m", "models_app.simulator")
    assert command.argv[3:] == real.argv[1:]
    assert json.loads(command.env["SARDEENZ_SIM_FACTS"]) == {"num_layers": 36}
    assert command.env["SARDEENZ_SIM_DIR"] == str(tmp_path / "sim")
    assert command.env["SARDEENZ_SIM_SPEED"] == "20.0"
    assert command.env["SARDEENZ_SIM_FAULTS"] == "slow_load:2,hang"
    assert {name: command.env[name] for name in ("SARDEENZ_INSTANCE", "TMPDIR", "CUDA_VISIBLE_DEVICES")} == {
        name: real.env[name] for name in ("SARDEENZ_INSTANCE", "TMPDIR", "CUDA_VISIBLE_DEVICES")
    }


def test_spec_survives_json() -> None:
    assert EngineSpec.from_json(json.dumps({**QWEN.to_json(), "of_a_newer_version": 1})) == QWEN


def test_masking_hides_values_of_secret_looking_flags() -> None:
    assert masked(["serve", "--hf-token", "x", "--api-key=y", "--port", "1"]) == (
        "serve", "--hf-token", "***", "--api-key=***", "--port", "1"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"model": "-evil"}, "model", "dash"),
        ({"model": "a/b/c"}, "model", "not a Hugging Face id"),
        ({"model": "a;b"}, "model", "not a Hugging Face id"),
        ({"source": "local", "model": "relative"}, "model", "full path"),
        ({"tensor_parallel_size": 3, "facts": {"num_attention_heads": 32}}, "tensor_parallel_size", "1, 2, 4, 8, 16"),
        ({"max_model_len": 9000, "facts": {"max_position_embeddings": 4096}}, "max_model_len", "at most 4096 tokens"),
        ({"max_model_len": 0}, "max_model_len", "at least 1"),
        ({"extra_args": "--port 1"}, "extra_args", "--port cannot be given"),
        ({"dtype": "float16", "extra_args": "--dtype bfloat16"}, "extra_args", "own field already (float16)"),
        ({"extra_args": "--trust-remote-code"}, "extra_args", "permission"),
        ({"served_model_names": ()}, "served_model_names", "needed"),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_starts(change: dict[str, object], field: str, sentence: str) -> None:
    for engine in ENGINES.values():
        errors = engine.check(dataclasses.replace(QWEN, **change))  # type: ignore[arg-type]
        assert [e.field for e in errors] == [field]
        assert sentence in errors[0].message


def test_a_bad_extra_argument_is_never_dropped_from_the_command(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--no-such-flag"):
        ENGINES["vllm"].command(dataclasses.replace(QWEN, extra_args="--no-such-flag"), context(tmp_path))


def test_versions_that_do_not_fit_are_refused_by_check() -> None:
    errors = ENGINES["vllm"].check(QWEN, {"vllm": "0.32.0", "kvcached": "0.1.6"})
    assert "kvcached 0.1.6 with vLLM 0.32.0" in errors[0].message
    assert ENGINES["vllm"].check(QWEN, {"vllm": "0.30.0", "kvcached": "0.1.6", "autopatch": True}) == []
