"""Checks before the first step of a run."""

from __future__ import annotations

import logging
import multiprocessing
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format.manifest import FINAL, LATEST
from forge.config.schema import CodeChange, Policy, Resume
from forge.errors import ConfigError, Exit, ForgeError, unwritable
from forge.jobdir import code, identity, job_dir
from forge.jobdir.job_files import step_of

_NAME = re.compile(r"[A-Za-z0-9][\w.=+,@-]{0,99}", re.ASCII)


@contextmanager
def exits() -> Iterator[None]:
    """Log errors that end a job, and turn them into `Exit` with their code."""
    try:
        yield
    except ForgeError as error:
        messages.say(str(error), logging.ERROR)
        raise Exit(error.exit_code, str(error), error.reason) from error
    except OSError as error:
        text = f"The job's directory cannot be used: {error}"
        messages.say(text, logging.ERROR)
        raise Exit(unwritable(text, error).exit_code, text) from error


def checked_name(name: Any) -> str | None:
    """The name of a Run, checked as a directory name."""
    is_text = isinstance(name, str)
    is_step = is_text and step_of(Path(name.removeprefix(FINAL))) is not None
    is_taken = is_step or name == LATEST
    if name is None or (is_text and _NAME.fullmatch(name) and not is_taken):
        return name  # type: ignore[no-any-return]
    found = repr(name) if is_text else f"a {type(name).__name__}"
    problem = (
        f"`name=` is {found}, and becomes the name of a directory: expected a string of at most 100"
        " letters, digits and `_ - . = + , @`, which begins with a letter or a digit, and is"
        " not `latest`, `step_<number>` or `final_step_<number>`. If you meant an object to"
        " be saved, pass it as another keyword."
    )
    raise ConfigError([problem], "This Run")


def checked_config(config: Any) -> dict[str, Any] | None:
    """`config=` by dotted keys; warns of values that are ignored."""
    if config is None:
        return None
    from forge.jobdir import flat_config  # under Hydra, the launcher has flattened the config

    values, left_out = flat_config.given(config)
    if left_out:
        messages.warn(
            f"`config=`: {messages.truncate_list(left_out, 5)} cannot be compared with an earlier"
            " start, so forge ignores them. Use numbers, strings, booleans, None, paths, and lists"
            " and dicts of them."
        )
    return values


def is_change_wanted(policy: Policy) -> bool:
    """Whether this start continues the job with a changed config."""
    return identity.is_change_wanted() or policy.resume is Resume.changed


def check_alone(*, is_inside: bool) -> None:
    """Refuse a Run that would receive no signals, or take them from another Run.

    A child process of multiprocessing receives none: launchers signal the script's own process.

    Args:
        is_inside: Whether another Run of this process is open.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ForgeError(
            f"forge.Run was entered in the thread {threading.current_thread().name!r}. Python"
            " delivers signals only to the main thread, so the Run could not stop and save: enter"
            " it in the main thread."
        )
    if multiprocessing.parent_process() is not None:
        problem = (
            "it was entered in a child process of multiprocessing (torch.multiprocessing.spawn,"
            " notebook_launcher), which no signal or launcher reaches. Enter it in the script's own"
            " process; start several ranks with torchrun, srun or `hydra.launcher.tasks_per_job`."
        )
        with exits():
            raise ConfigError([problem], "This Run")
    if is_inside:
        problem = (
            "it was entered inside another forge.Run, which handles the signals of this process."
            " Enter them one after the other, each with a name: forge.Run(policy,"
            ' name="stage2", …). Objects that train together belong in one Run.'
        )
        with exits():
            raise ConfigError([problem], "This Run")


def check_code(directory: Path, action: CodeChange) -> None:
    """Compare the code with that of the job's first start.

    Raises:
        ConfigError: If the code changed and the policy is to refuse that.
    """
    changed = code.changed(directory)
    if not changed:
        return
    text = (
        f"the code changed since this job was first started: {messages.truncate_list(changed, 5)}"
    )
    if action is CodeChange.refuse:
        raise ConfigError(
            [
                f"`resilience.requeue.on_code_change=refuse`: {text}. Restore the code, or"
                " start the job with `resilience.requeue.on_code_change=warn`."
            ]
        )
    messages.warn(text)


def keep_threads(directory: Path, *, is_resumed: bool) -> None:
    """Set torch's number of threads as at the first start: another number gives other bits."""
    now = torch.get_num_threads()
    first = job_dir.first_threads(directory) if is_resumed else None
    if first is None:
        job_dir.note_threads(directory, now)
    elif first != now:
        torch.set_num_threads(first)
        messages.warn(
            f"torch had {now} threads here, but {first} when this job was first started. forge sets"
            f" {first} again, since the number of threads changes the order of sums. Only the"
            f" code before `forge.Run` ran with {now}. If that changes results, resume the job with"
            " .forge/resume.sh, which sets the original environment."
        )
