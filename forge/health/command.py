"""A site's own health checks: the commands in `health.commands`.

Any exit code other than 0 is a failure, and the last line of output is the reason. The command runs
in its own process group; at the timeout the whole group is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import threading
import time

from forge.config.schema import CommandCheckConfig
from forge.health.check import Check, Context, Finding, Scope

_KEPT = 16_384
"""The last bytes of the output that are kept."""
_LOOK_S = 0.1
"""Seconds between two checks of whether the command has ended, or has to stop."""
_MARGIN = 0.9
"""Share of the timeout that the command can use; the rest is for killing it."""
_SHOWN = 500
"""Characters shown of the last line."""
_STOPS = {getattr(signal, f"SIG{name}", None) for name in ("TERM", "INT", "HUP", "USR1", "USR2")}
"""Signals with which Slurm or people stop all processes of a job."""


def check(name: str, config: CommandCheckConfig) -> Check:
    """A check that runs this command."""
    return Check(
        name,
        lambda context: _run(config, context),
        Scope.node,
        timeout_s=config.timeout_s,
        is_command=True,
    )


def _run(config: CommandCheckConfig, context: Context) -> Finding:
    command, limit_s = config.run, config.timeout_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        remedy = "Correct the command, or install it on every node."
        return Finding(f"the command cannot be started: {error}", is_failed=True, remedy=remedy)
    with process:
        try:
            output = _followed(process, limit_s, context.stopped)
        finally:
            # Also the processes that it left behind: the group exists until its leader is reaped.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if output is None:
        remedy = "Find out what the command waits for, or raise its `timeout_s`."
        return Finding(f"no answer within {limit_s:g} s", is_failed=True, remedy=remedy)
    return _judged(command, code, output)


def _judged(command: list[str], code: int, output: bytes) -> Finding:
    """The finding, from the exit code and the output.

    Raises:
        InterruptedError: If the command was stopped by a signal, which proves nothing of the node.
    """
    number = -code if code < 0 else code - 128  # how a shell reports a signal
    if number in _STOPS:
        raise InterruptedError(f"`{shlex.join(command)}` was stopped by a signal ({number})")
    lines = output.decode(errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()[:_SHOWN]}" if lines else ", and printed nothing"
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    remedy = f"Run `{shlex.join(command)}` on that node."
    return Finding(ended + last, is_failed=code != 0, remedy=remedy)


def _followed(
    process: subprocess.Popen[bytes], limit_s: float, stopped: threading.Event
) -> bytes | None:
    """Wait for the command; return the end of its output, or None after a timeout.

    Children of the command can keep the pipe open: only the exit of the command itself counts.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + _MARGIN * limit_s
    pipe, output = process.stdout.fileno(), b""
    sources = select.poll()  # `select` takes no descriptor from 1024 on
    sources.register(pipe, select.POLLIN)
    while not _has_ended(process):
        if time.monotonic() >= deadline or stopped.is_set():
            return None
        if sources.poll(1000 * _LOOK_S):
            chunk = os.read(pipe, 1 << 20)
            output = (output + chunk)[-_KEPT:]
            if not chunk:
                sources.unregister(pipe)  # closed: it would be ready all the time
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):  # nothing more
        output += os.read(pipe, 1 << 20)
    return output


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the command ended; on Linux it stays a zombie, so that its group id is not reused."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
