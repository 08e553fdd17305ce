"""The API server process up to the moment when the engine is ready: arguments, port, EngineCore, the wait for it.

Signals as measured on vLLM 0.30 and 0.32: SIGTERM in the first moments ends the process at once; while the engine
starts it is swallowed; afterwards it ends EngineCore (after ``--shutdown-timeout``) and then waits for open
connections, however long their clients take. When EngineCore is gone ``/health`` is 503 for some seconds, and the
exit code is 0 all the same.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from models_app.simulator import core_process, logs
from models_app.simulator.channel import READ_SIZE, Lines
from models_app.simulator.config import Config
from models_app.simulator.facts import ModelError
from models_app.simulator.faults import UnknownFault

#: Imports of the real thing take longer; this much is shown of them.
IMPORT_S = 0.3
LOGO = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)
_FRAMES = ['  File "vllm/entrypoints/cli/serve.py", line 128, in cmd', "    uvloop.run(run_server(args))"]


def main(argv: list[str], started: float) -> int:
    """The whole life of ``vllm serve``. Returns the exit code; argparse ends the process itself with 2."""
    from models_app.simulator import config as config_module

    log = logs.Log("APIServer")
    try:
        config = config_module.read(argv)
        faults = config.open_faults()
    except ModelError as error:
        return _model_error(log, error)
    except UnknownFault as error:
        sys.stderr.write(f"SARDEENZ_SIM_FAULTS: {error}\n")
        return 2
    _pass_time(IMPORT_S / config.speed - (time.monotonic() - started))
    for line in LOGO:
        log.say("api_utils.py:347", line.format(version=config.vllm_version, model=config.model))
    log.say("api_utils.py:286", f"non-default args: {config.shown_args}")
    log.say("model.py:692", f"Resolved architecture: {config.facts.architecture}")
    log.say("model.py:2030", f"Using max model len {config.max_model_len}")
    try:
        listener = _bind(config)
    except OSError as error:
        _print_traceback(log, f"OSError: {error}")
        return 1
    ours, theirs = socket.socketpair()
    # EngineCore is forked before anything large is imported: that is what keeps it small.
    pid = os.fork()
    if pid == 0:
        ours.close()
        listener.close()
        _be_core(config, theirs)
    theirs.close()
    _ignore_sigterm_while_starting(config, pid)
    with ours, listener:
        from models_app.simulator import serving

        ready = _wait_until_ready(ours)
        if ready is None:
            return _core_failed(log, pid)
        faults.replace(ready["faults"])
        return serving.serve(config, ours, pid, log, faults, listener)


def _be_core(config: Config, connection: socket.socket) -> NoReturn:
    """The child's whole life; whatever happens, it must not come back into the parent's code."""
    code = 1
    try:
        code = core_process.run(config, connection)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pass_time(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _bind(config: Config) -> socket.socket:
    """Bound early, listening late: until the engine is up a connection is refused."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named asyncio sets TCP_NODELAY; without it every answer waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.version < (0, 30):
        # A second engine on the same port then starts "fine" and takes half of the requests.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((config.host, config.port))
    return listener


def _ignore_sigterm_while_starting(config: Config, core_pid: int) -> None:
    def interrupt(number: int, _frame: FrameType | None) -> None:
        os.kill(core_pid, signal.SIGTERM)
        os.waitpid(core_pid, 0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def swallow(_number: int, _frame: FrameType | None) -> None:
        if "sigterm_hang" in config.open_faults():
            # As in the worst of the measured cases: only SIGINT and SIGKILL end this.
            while True:
                time.sleep(3600)

    signal.signal(signal.SIGTERM, swallow)
    signal.signal(signal.SIGINT, interrupt)


def _wait_until_ready(connection: socket.socket) -> dict[str, Any] | None:
    """The engine's first message; None when it ended before it came."""
    lines = Lines()
    while True:
        data = connection.recv(READ_SIZE)
        if not data:
            return None
        for message in lines.feed(data):
            if message["k"] == "ready":
                return message


def _core_failed(log: logs.Log, pid: int) -> int:
    failed = {"EngineCore": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
    _print_traceback(
        log, f"RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {failed}"
    )
    return 1


def _model_error(log: logs.Log, error: ModelError) -> int:
    if error.kind == "repo_id":
        _print_traceback(log, f"huggingface_hub.errors.HFValidationError: {error}")
    elif error.kind == "weights":
        log.bad("multiproc_executor.py:953", "WorkerProc failed to start.")
        log.traceback("multiproc_executor.py:953", _FRAMES, f"RuntimeError: {error}")
        _print_traceback(
            log,
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
            "{'EngineCore': 1}",
        )
    else:
        _print_traceback(
            log,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            f"  Value error, {error} [type=value_error, input_value=ArgsKwargs((), {{'model': ...}}), "
            "input_type=ArgsKwargs]\n    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
        )
    return 1


def _print_traceback(log: logs.Log, error: str) -> None:
    log.raw("\n".join(("Traceback (most recent call last):", *_FRAMES, error)))
