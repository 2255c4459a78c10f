"""The start of a launcher, and what ends it: an error, Ctrl+C, and signals while jobs run."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import configure_log, setup_globals
from omegaconf import DictConfig

from forge import messages
from forge.errors import ConfigError, Exit, ExitCode, ForgeError
from forge.hydra_app import hints
from forge.launch.hydra_launcher import Request
from forge.launch.sweep import SweepDir


@contextmanager
def exit_on_error(sweep_config: DictConfig) -> Iterator[Path]:
    """Set Hydra up. An error or Ctrl+C inside ends the process with a message and its exit code.

    Yields:
        The sweep's directory, which does not necessarily exist.
    """
    setup_globals()
    configure_log(sweep_config.hydra.hydra_logging, sweep_config.hydra.verbose)
    directory = Path(str(sweep_config.hydra.sweep.dir)).absolute()
    try:
        yield directory
    except ForgeError as error:
        raise _refused(error) from error
    except OSError as error:
        raise _refused(_unusable(directory, error)) from error
    except KeyboardInterrupt as error:  # while configs are composed: later, it has a handler
        messages.say("Ctrl+C: no job was started.")
        raise Exit(ExitCode.INTERRUPTED, "stopped before any job was started") from error


def sweep_dir(directory: Path, request: Request) -> SweepDir:
    """Create the directory and lock it; raises as SweepDir does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mode = request.config.hydra.sweep.get("mode")
        if mode is not None:
            directory.chmod(int(str(mode), 8))
    except ValueError as error:
        raise _unusable(directory, error) from error
    return SweepDir(directory, request.taken)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *more: int) -> Iterator[None]:
    """While jobs run: handle SIGINT, SIGTERM, SIGHUP and `more`, if this is the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # exit codes would be lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more):
            if signal.getsignal(stopping) is not signal.SIG_IGN:  # nohup
                before[stopping] = signal.signal(stopping, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _unusable(directory: Path, error: Exception) -> ConfigError:
    problem = f"`hydra.sweep.dir={directory}` cannot be used: {error}. Choose another directory."
    return ConfigError([problem], "The launcher's configuration")


def _refused(error: ForgeError) -> Exit:
    hints.composition_succeeded()  # no hint for an error of Hydra's: this error has its own advice
    messages.say(str(error), logging.ERROR)
    return Exit(error.exit_code, str(error))
