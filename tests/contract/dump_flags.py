"""Write the flags of ``vllm serve``, as vLLM's real parser has them, into ``models_app/engines/data/vllm_flags.json``.

Run with the Python of an environment that has vLLM; entries of other versions in the file are kept:

    .venv-engine/bin/python tests/contract/dump_flags.py models_app/engines/data/vllm_flags.json

An entry that is the same in several versions is stored once, with the versions it was seen in.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

_MANY_CHOICES = 16
_KINDS = {
    "int": "int",
    "float": "float",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
    "loads": "json",
    "parse_dataclass": "json",
    "_parse_type": "json",
}


def actions() -> list[argparse.Action]:
    """The options of the real parser."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vllm")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    return [action for action in serve._actions if action.option_strings]


def entry(action: argparse.Action) -> dict[str, Any]:
    takes = {0: "none", None: "one", "?": "optional", "+": "many", "*": "many"}[action.nargs]  # type: ignore[index]
    value: dict[str, Any] = {"names": list(action.option_strings), "takes": takes}
    kind = _KINDS.get(getattr(action.type, "__name__", ""))
    if kind and takes != "none":
        value["kind"] = kind
    choices = [str(choice) for choice in action.choices or ()]
    if 0 < len(choices) <= _MANY_CHOICES and takes != "none":
        value["choices"] = choices
    return value


def main() -> None:
    out = Path(sys.argv[1])
    version = importlib.metadata.version("vllm").split("+")[0]
    table = json.loads(out.read_text()) if out.exists() else {"versions": [], "flags": []}
    merged: dict[str, dict[str, Any]] = {}
    for old in table["flags"]:
        seen = [v for v in old.pop("versions") if v != version]
        if seen:
            merged[json.dumps(old, sort_keys=True)] = {**old, "versions": seen}
    for action in actions():
        new = entry(action)
        known = merged.setdefault(json.dumps(new, sort_keys=True), {**new, "versions": []})
        known["versions"] = sorted({*known["versions"], version})
    table["versions"] = sorted({*table["versions"], version})
    table["flags"] = sorted(merged.values(), key=lambda flag: (flag["names"][0], flag["versions"]))
    lines = ",\n".join("  " + json.dumps(flag, ensure_ascii=False) for flag in table["flags"])
    out.write_text(f'{{"versions": {json.dumps(table["versions"])}, "flags": [\n{lines}\n]}}\n')
    print(f"{out}: {len(table['flags'])} entries, versions {', '.join(table['versions'])}")


if __name__ == "__main__":
    main()
