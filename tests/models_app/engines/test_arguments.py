"""Extra arguments: every spelling that vLLM takes, and what is refused."""

from __future__ import annotations

import argparse
import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models_app.engines.argument_rules import OWNED, OWNED_WITH_KVCACHED, RISKY
from models_app.engines.arguments import check_extra_args, flags_of, parse_extra_args


def check(text: str, **more: object) -> tuple[list[str], list[str]]:
    return check_extra_args(text, vllm_version="0.30.0", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("--quantization awq", ["--quantization", "awq"]),
        ("--quantization\nawq", ["--quantization", "awq"]),
        ("--quantization \\\n awq", ["--quantization", "awq"]),
        ("--quantization=awq", ["--quantization", "awq"]),
        ("-q awq", ["--quantization", "awq"]),
        ("-qawq", ["--quantization", "awq"]),
        ("--max_num_seqs=8", ["--max-num-seqs", "8"]),
        ("--max-num-se 8", ["--max-num-seqs", "8"]),
        ("--limit-mm-per-prompt '{\"image\": 1}'", ["--limit-mm-per-prompt", '{"image": 1}']),
        ("--attention-config.backend FLASH_ATTN", ["--attention-config.backend", "FLASH_ATTN"]),
        ("-ac.backend=FLASH_ATTN", ["--attention-config.backend", "FLASH_ATTN"]),
        ("-O3 --seed -1", ["--optimization-level", "3", "--seed", "-1"]),
        ("-O 2", ["--optimization-level", "2"]),
        ("--no_async_scheduling", ["--no-async-scheduling"]),
        ("--cudagraph-capture-sizes 1 2 4", ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ("--max-num-batched-tokens 4k", ["--max-num-batched-tokens", "4k"]),
        ("--no-trust-remote-code", ["--no-trust-remote-code"]),
        ("--limit-mm-per-prompt='{\"image\": 1}'", ["--limit-mm-per-prompt", '{"image": 1}']),
        ("--tool-call-parser='a b'", ["--tool-call-parser", "a b"]),
        ("'-q awq'", ["--quantization", " awq"]),
        ("--tool-call-parser=--api-key=x", ["--tool-call-parser=--api-key=x"]),
        ("", []),
    ],
)
def test_arguments_are_split_as_a_shell_would_and_written_in_full(text: str, argv: list[str]) -> None:
    assert check(text) == (argv, [])


@pytest.mark.parametrize(
    "text",
    [
        "--gpu-memory-utilization 0.5", "--gpu_memory_utilization=0.5", "--gpu-memory-util=0.5", "--port 9999",
        "--por=9999",
        "--host 0.0.0.0", "--uds /x", "--api_key=x", "--model other", "--served-model-name x", "-tp 2", "-tp=2", "-t 2",
        "--data-parallel-size 2", "-dp 2", "-pp 2", "--middleware a.B", "--config evil.yaml", "--config=evil.yaml",
        "--no-enable-prefix-caching", "--enable_sleep_mode", "--max-model-len 4096", "--kv-cache-memory-bytes 1G",
        "--hf-token hf_x", "--help", "-h", "--root-path /x", "--ssl-keyfile k", "--api-server-count 2", "-asc 2",
        "--watermark 0.1", "--device-ids 0", "--headless", "--shutdown-timeout 1", "--enforce-eager",
    ],
)  # fmt: skip
def test_a_managed_flag_is_refused_with_its_reason_in_every_spelling(text: str) -> None:
    argv, errors = check(text, allow_risky=True)
    assert argv == []
    assert "cannot be given here:" in errors[0]


@pytest.mark.parametrize("name", sorted({**OWNED, **OWNED_WITH_KVCACHED} & flags_of(None).keys()))
def test_each_managed_flag_is_refused_by_its_full_name(name: str) -> None:
    flag = flags_of(None)[name]
    value = "" if flag.takes == "none" else (flag.choices[0] if flag.choices else "1")
    _, errors = check_extra_args(f"{name} {value}", allow_risky=True)
    assert any("cannot be given here" in error for error in errors)


def test_rules_name_only_flags_that_vllm_has() -> None:
    assert ({**OWNED, **OWNED_WITH_KVCACHED, **RISKY}).keys() <= flags_of(None).keys()


def test_memory_flags_are_free_when_kvcached_is_off() -> None:
    assert check("--gpu-memory-utilization 0.5", kvcached=False) == (["--gpu-memory-utilization", "0.5"], [])


@pytest.mark.parametrize(
    "text",
    ["--trust-remote-code", "--chat-template /etc/x", "--tool-parser-plugin x.py", "--allowed-local-media-path /",
     "--logits-processors a.B", "--lora-modules a=/x", "-sc.model=x", "--hf_overrides '{}'"],
)  # fmt: skip
def test_a_risky_flag_needs_the_permission(text: str) -> None:
    argv, errors = check(text)
    assert argv == []
    assert "needs the permission" in errors[0]
    assert check(text, allow_risky=True)[1] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--no-such-flag 3", "vLLM does not know --no-such-flag."),
        ("--max-num-seq-s 3", "Did you mean --max-num-seqs?"),
        ("--disable-prefix-caching", "--no-enable-prefix-caching"),
        ("--disable-log-requests", "--no-enable-log-requests"),
        ("--max-num-seqs banana", "needs a whole number, not 'banana'"),
        ("--max-num-seqs", "needs a value"),
        ("--max-num-seqs 8 9", "'9' is one value too many"),
        ("--async-scheduling=1", "takes no value"),
        ("--async-scheduling 1", "which takes no value"),
        ("--dtype float8", "choose from auto, bfloat16"),
        ("awq", "stands alone"),
        ("'open", "a quote is opened and never closed"),
        ("open\\", "ends in a backslash"),
        ("—dtype auto", "typographic dash"),
        ("--enable", "could mean"),
        ("--limit-mm-per-prompt {image:1}", "is not JSON"),
        ("-- x", "begin with a name"),
    ],
)
def test_a_mistake_gets_a_sentence(text: str, sentence: str) -> None:
    argv, errors = check(text)
    assert argv == []
    assert sentence in errors[0]


def test_nothing_is_accepted_while_one_argument_is_wrong() -> None:
    argv, errors = check("--max-num-seqs 8 --no-such-flag 3 --seed 1")
    assert argv == []
    assert len(errors) == 1


def test_shell_characters_stay_text() -> None:
    argv, errors = check("--ignore-patterns '$(reboot)' '; rm -rf /'")
    assert (argv, errors) == (["--ignore-patterns", "$(reboot)", "; rm -rf /"], [])


def test_a_flag_of_a_newer_vllm_is_named_as_such() -> None:
    _, errors = check_extra_args("--watermark 0.1", vllm_version="0.19.1", kvcached=False)
    assert errors == ["vLLM 0.19.1 does not know --watermark; 0.24.0, 0.30.0 does."]


def test_a_version_between_two_known_ones_gets_what_either_knows() -> None:
    between = flags_of("0.27.1")
    assert "--calculate-kv-scales" in between  # went after 0.24
    assert "--max-num-queued-reqs" in between  # came by 0.30
    assert "--calculate-kv-scales" not in flags_of("0.30.0+cpu")
    assert "--max-num-queued-reqs" not in flags_of("0.10.0")


# --- against the real thing ------------------------------------------------------------------------------------------


def _argparse() -> argparse.ArgumentParser:
    """A parser with all of vLLM's options, as its own is: built on argparse."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    nargs = {"one": None, "optional": "?", "many": "+"}
    for flag in {flag.names: flag for flag in flags_of("0.30.0").values()}.values():
        if flag.takes == "none":
            parser.add_argument(*flag.names, dest=flag.name, action="append_const", const="")
        else:
            parser.add_argument(*flag.names, dest=flag.name, action="append", nargs=nargs[flag.takes])
    return parser


PARSER = _argparse()
_NAMES = st.sampled_from(
    [
        *("--ignore-patterns", "--lora-modules", "--collect-detailed-traces", "--tool-call-parser", "--seed", "-q"),
        *("--api-key", "--api-k", "--hf-overrides", "--trust-remote-code", "--served-model-name", "--port"),
        "--no-async-scheduling",
    ]
)
_VALUES = st.sampled_from(["a", "a b", "-1", "", '{"a": 1}', "--api-key=x", "--api-key=a b", "-q a", "-", "x=y"])
_PAIRS = st.sampled_from(["{}={}", "{} {}"]).flatmap(lambda form: st.builds(form.format, _NAMES, _VALUES))
_WORDS = st.one_of(_NAMES, _VALUES, _PAIRS)


@given(st.lists(_WORDS, max_size=6))
@example(["--ignore-patterns", "a", "--api-key=a b"])
@example(["--tool-call-parser=--api-key=x"])
@example(["--ignore-patterns", "a", "-q awq"])
def test_vllm_sees_the_flags_that_were_judged_and_no_other(words: list[str]) -> None:
    argv, errors = check(shlex.join(words))
    if errors:
        return
    try:
        seen, strays = PARSER.parse_known_args(argv)
    except argparse.ArgumentError:
        return  # refused by vLLM: nothing starts
    assert not strays
    flags = {name for name, value in vars(seen).items() if value is not None}
    assert flags == {argument.flag.name for argument in parse_extra_args(shlex.join(words), vllm_version="0.30.0")[0]}
    assert not flags & (OWNED.keys() | RISKY.keys())
