"""The command line, read as ``vllm serve`` reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from models_app.simulator import arguments, config


def parse(*argv: str, version: str = "0.30.0"):
    return arguments.parse(argv, version)


def test_model_is_positional_or_a_flag() -> None:
    assert parse("org/name").model == "org/name"
    assert parse("--model", "org/other").model == "org/other"
    assert parse("org/name", "--model", "org/other").model == "org/name"


@pytest.mark.parametrize(
    "spelling",
    [
        ("--max-num-seqs", "7"),
        ("--max_num_seqs", "7"),
        ("--max-num-seqs=7",),
        ("--max_num_seqs=7",),
        ("--max-num-seq", "7"),
    ],
)
def test_every_spelling_of_argparse_is_taken(spelling: tuple[str, ...]) -> None:
    assert parse("m", *spelling).max_num_seqs == 7


def test_values_keep_their_underscores() -> None:
    assert parse("m", "--served_model_name=a_b").served_model_name == ["a_b"]
    assert parse("m", "--compilation-config.my_key", "1").model == "m"


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("-1", -1), ("auto", -1)]
)
def test_lengths_may_be_written_for_people(text: str, value: int) -> None:
    assert parse("m", f"--max-model-len={text}").max_model_len == value


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ending:
        parse("m", *argv)
    assert ending.value.code == 2
    return capsys.readouterr().err


def test_unknown_flag_ends_with_code_2_and_the_outer_parsers_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "--no-such-flag", "3")
    assert text.startswith("usage: vllm [-h] [-v]")
    assert text.endswith("vllm: error: unrecognized arguments: --no-such-flag 3\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--max-num-seqs", "banana"), "argument --max-num-seqs: invalid int value: 'banana'"),
        (("--port", "x"), "argument --port: invalid int value: 'x'"),
        (("--max-model-len", "1.5K"), "argument --max-model-len: invalid human_readable_int_or_auto value: '1.5K'"),
        (("--gpu-memory-utilization", "most"), "argument --gpu-memory-utilization: invalid float value: 'most'"),
        (("--max-num-seqs",), "argument --max-num-seqs: expected one argument"),
    ],
)
def test_bad_value_ends_with_code_2_and_vllms_words(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    text = refused(capsys, *argv)
    assert text == f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {words}\n"


def test_prefix_of_two_flags_is_ambiguous(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ambiguous option: --max-num" in refused(capsys, "--max-num", "7")


def test_repeated_flag_is_only_noted_and_the_last_wins(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m", "--max-num-seqs", "1", "--max_num_seqs", "2").max_num_seqs == 2
    assert "Found duplicate keys --max-num-seqs" in capsys.readouterr().err


def test_middleware_may_be_given_several_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m", "--middleware", "a.B", "--middleware", "c.D").middleware == ["a.B", "c.D"]
    assert capsys.readouterr().err == ""


def test_prefix_caching_is_switched_off_by_its_no_form_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m").enable_prefix_caching is True
    assert parse("m", "--no-enable-prefix-caching").enable_prefix_caching is False
    assert "unrecognized arguments: --disable-prefix-caching" in refused(capsys, "--disable-prefix-caching")


def test_flags_without_a_meaning_here_are_taken_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m", "--seed", "1", "--disable-log-stats", "--lora-modules", "a=b", "c=d").model == "m"
    assert "argument --seed: invalid int value: 'x'" in refused(capsys, "--seed", "x")
    assert "argument --runner: invalid choice: 'x'" in refused(capsys, "--runner", "x")


def test_flags_are_those_of_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("m", "--max-long-partial-prefills", "1", version="0.24.0").model == "m"
    flags = {name for row in arguments._passed_over("0.24.0") for name in row["names"]}
    assert flags - {name for row in arguments._passed_over("0.30.0") for name in row["names"]}
    assert arguments._passed_over("0.1.0") == arguments._passed_over("0.19.1")


@pytest.mark.parametrize("content", ["{", None])
def test_missing_table_leaves_the_flags_that_mean_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "flags.json"
    if content:
        path.write_text(content)
    monkeypatch.setattr(arguments, "FLAG_TABLE", path)
    assert parse("m", "--enforce-eager").enforce_eager


# -- arguments and environment together --------------------------------------------------------------------------


def read(*argv: str, **env: str) -> config.Config:
    return config.read(["Qwen/Qwen3-0.6B", *argv], env)


def test_defaults_are_vllms() -> None:
    found = read()
    assert found.served_names == ("Qwen/Qwen3-0.6B",)
    assert (found.port, found.gpu_memory_utilization, found.shutdown_timeout_s) == (8000, 0.92, 0)
    assert found.max_model_len == 40960
    assert found.batch_limits(80 * 1024**3) == (1024, 8192)
    assert found.batch_limits(24 * 1024**3) == (256, 2048)


def test_kvcached_is_asked_for_by_its_own_variable() -> None:
    assert not read().kvcached
    assert read(ENABLE_KVCACHED="true", KVCACHED_IPC_NAME="a/b").ipc_name == "a-b"
    assert read(KVCACHED_MIN_RESERVED_PAGES="1").kv_number("KVCACHED_MIN_RESERVED_PAGES", 5) == 1
    assert read(KVCACHED_MIN_RESERVED_PAGES="x").kv_number("KVCACHED_MIN_RESERVED_PAGES", 5) == 0


def test_run_directory_is_the_token_files_folder() -> None:
    assert read(SARDEENZ_ENGINE_TOKEN_FILE="/run/sz/7/token").run_dir == Path("/run/sz/7")
    assert read(SARDEENZ_ATTEMPT_DIR="/elsewhere").run_dir == Path("/elsewhere")
    assert read().run_dir is None


def test_cards_are_named_by_uuid_or_by_index(tmp_path: Path) -> None:
    from gpus_app.probes.sim_ledger import ensure_gpus

    cards = ensure_gpus(tmp_path, 3, 10**10, "h")
    folder = str(tmp_path)
    assert read(SARDEENZ_SIM_DIR=folder).gpu_uuids == (cards[0].uuid,)
    assert read(SARDEENZ_SIM_DIR=folder, CUDA_VISIBLE_DEVICES="2,1").gpu_uuids == (cards[2].uuid,)
    both = read("-tp", "2", SARDEENZ_SIM_DIR=folder, CUDA_VISIBLE_DEVICES=f"{cards[1].uuid},0")
    assert both.gpu_uuids == (cards[1].uuid, cards[0].uuid)


def test_secrets_are_not_shown_in_the_log() -> None:
    assert "hush" not in str(read("--api-key", "hush", VLLM_API_KEY="hush").shown_args)
