"""A site's own checks: commands, as `health.commands` has them.

A command fails by any exit code but 0, and its last line says why. It runs in a process group of
its own, which is killed at the timeout as a whole, whatever it has started there.
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
"""Bytes of its output that are kept: the last ones."""
_LOOK_S = 0.1
"""Seconds until it is seen that the command has ended, or that nobody waits any longer."""
_MARGIN = 0.9
"""Of the timeout: the rest is for killing it."""
_SHOWN = 500
"""Characters of its last line that are shown."""
_STOPS = {getattr(signal, f"SIG{name}", None) for name in ("TERM", "INT", "HUP", "USR1", "USR2")}
"""What Slurm, or people, send to all processes of a job that is to leave."""


def check(name: str, config: CommandCheckConfig) -> Check:
    """The check that this command is."""
    return Check(
        name,
        lambda context: _run(config, context),
        Scope.node,
        is_passive=True,
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
        return Finding(f"it cannot be started: {error}", is_failed=True, remedy=remedy)
    with process:
        try:
            output = _followed(process, limit_s, context.stopped)
        finally:
            # Also what it has left behind: the group is there until its leader is collected.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if output is None:
        remedy = "Find out what the command waits for, or raise its `timeout_s`."
        return Finding(f"no answer within {limit_s:g} s", is_failed=True, remedy=remedy)
    return _judged(command, code, output)


def _judged(command: list[str], code: int, output: bytes) -> Finding:
    """What its end says.

    Raises:
        InterruptedError: Where somebody has stopped it: that says nothing of the node.
    """
    number = -code if code < 0 else code - 128  # a shell's own way to say so
    if number in _STOPS:
        raise InterruptedError(f"`{shlex.join(command)}` was stopped by a signal ({number})")
    lines = output.decode(errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()[:_SHOWN]}" if lines else ", and printed nothing"
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    remedy = f"Run `{shlex.join(command)}` there."
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
    """Whether it has; on Linux it stays a zombie until then, so that its group is still its own."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
