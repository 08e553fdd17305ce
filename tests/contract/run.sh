#!/usr/bin/env bash
# make test-engine: the contract tests on a real vLLM (a build for CPUs, in an environment of its own) and on the simulated
# engine. Fails when the real half would be skipped.
#
#   SARDEENZ_ENGINE_VENV  the environment, made when it is not there (default .venv-engine; about 2.5 GB, 90 s)
#   ENGINE_PYTHON         CPython 3.11, which that build is for (default python3.11)
#   PIP_FIND_LINKS        may name a folder with a CPU wheel of torch 2.13.0; PyPI's own is the CUDA build, several GB
#
# Further arguments go to pytest: bash tests/contract/run.sh -k stop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

here=tests/contract
venv=${SARDEENZ_ENGINE_VENV:-$PWD/.venv-engine}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
want=$(cat "$here/engine.lock" "$here/name_vllm.py" | sha256sum | cut -d" " -f1)

if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$want" ]; then
    echo "making the engine's environment in $venv"
    python=${ENGINE_PYTHON:-python3.11}
    command -v "$python" >/dev/null || { echo "$python is not there: this vLLM build needs CPython 3.11" >&2; exit 1; }
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --retries 3)
    "${pip[@]}" install torch==2.13.0
    "${pip[@]}" install --no-deps --require-hashes --only-binary :all: -r "$here/engine.lock"
    "$venv/bin/python" "$here/name_vllm.py"
    # Without bytecode every start of vLLM takes a minute longer, and many machines forbid Python to write it by itself.
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null || true
    "$venv/bin/python" -c 'import torch; raise SystemExit("torch is a CUDA build" if torch.version.cuda else 0)'
    echo "$want" >"$venv/.complete"
fi

export SARDEENZ_ENGINE_VENV=$venv SARDEENZ_ENGINE_REQUIRED=1
report=$(mktemp)
trap 'rm -f "$report"' EXIT
.venv/bin/python -m pytest "$here" -q -n0 --durations=10 --junit-xml="$report" "$@"
if ! grep -q 'skipped="0"' "$report"; then
    echo "some contract tests were skipped: nothing was proven about the real engine" >&2
    exit 1
fi
