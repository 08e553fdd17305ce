"""The table of flags against vLLM's real parser."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from models_app.engines import arguments
from models_app.engines.vllm import FIELD_OF_FLAG
from tests.contract import dump_flags
from tests.contract.conftest import VENV

TABLE = Path(arguments.__file__).parent / "data" / "vllm_flags.json"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(
    not VENV and not os.environ.get("SARDEENZ_ENGINE_REQUIRED"), reason="needs a real vLLM: make test-engine"
)
def test_table_is_what_the_real_parser_has(tmp_path: Path) -> None:
    out = tmp_path / "flags.json"
    assert VENV
    subprocess.run([f"{VENV}/bin/python", dump_flags.__file__, out], check=True, capture_output=True)
    real = json.loads(out.read_text())
    version = real["versions"][0]
    ours = [dict(flag) for flag in json.loads(TABLE.read_text())["flags"] if version in flag["versions"]]
    for flag in ours:
        flag["versions"] = [version]
    assert sorted(ours, key=json.dumps) == sorted(real["flags"], key=json.dumps)


def test_flags_that_we_pass_exist_in_every_version_of_the_table() -> None:
    passed = {
        "--host", "--port", "--served-model-name", "--tensor-parallel-size", "--max-model-len", "--dtype",
        "--quantization", "--load-format", "--revision", "--tokenizer-revision", "--enforce-eager",
        "--enable-sleep-mode",
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--shutdown-timeout", "--middleware",
        "--disable-access-log-for-endpoints", *FIELD_OF_FLAG,
    }  # fmt: skip
    for version in json.loads(TABLE.read_text())["versions"]:
        assert passed <= arguments.flags_of(version).keys()
