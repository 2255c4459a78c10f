"""What a run checks before its first step."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format.names import FINAL, LATEST
from forge.config import loading
from forge.config.schema import CodeChange, Policy, Resume
from forge.errors import ConfigError, Exit, ForgeError, unwritable
from forge.filesystem.steps import step_of
from forge.jobdir import flat_config, identity, job_dir, spawned, verdict
from forge.jobdir.verdict import Verdict
from forge.training import misuse
from forge.training.loop import shortened

_NAME = re.compile(r"[A-Za-z0-9][\w.=+,@-]{0,99}", re.ASCII)


@contextmanager
def exits() -> Iterator[None]:
    """Turn errors that end a job into `Exit` with their code, and log them."""
    try:
        yield
    except ForgeError as error:
        messages.say(str(error), logging.ERROR)
        raise Exit(error.exit_code, str(error), error.reason) from error
    except OSError as error:
        text = f"The job's directory cannot be used: {error}"
        messages.say(text, logging.ERROR)
        raise Exit(unwritable(text, error).exit_code, text) from error


@contextmanager
def told_to_parent(job: Path, checkpoint_dir: Path) -> Iterator[None]:
    """Where a child of the job's main refuses to train, let the job end with its exit code."""
    try:
        yield
    except Exit as error:
        if spawned.parent() is not None:
            code = int(error.code or 0)
            said = Verdict(error.reason, error.text, code, 0, str(checkpoint_dir))
            verdict.write(job, said)
        raise


def check_call(policy: Any, unnamed: tuple[Any, ...], stateful: Mapping[str, Any]) -> None:
    """Check the arguments of forge.Run; a wrong argument ends the process with code 78."""
    with exits():
        misuse.check_run(policy, unnamed, stateful)


def checked_policy(policy: Any) -> Policy:
    """The policy, checked; a bad one ends the process with code 78."""
    if sys.platform == "win32":
        raise ForgeError(
            "forge.Run needs POSIX signals and file locks, which Windows lacks. Use Linux, macOS"
            " or WSL; on Windows only `import forge` and reading checkpoints and ledgers work."
        )
    with exits():
        checked = loading.load(policy)
        shortened.adapt(checked)
        return checked


def checked_name(name: Any) -> str | None:
    """The name of a Run, which is to be that of a directory; a bad one ends the process with 78."""
    is_text = isinstance(name, str)
    is_step = is_text and step_of(Path(name.removeprefix(FINAL))) is not None
    is_taken = is_step or name == LATEST
    if name is None or (is_text and _NAME.fullmatch(name) and not is_taken):
        return name  # type: ignore[no-any-return]
    found = repr(name) if is_text else f"a {type(name).__name__}"
    problem = (
        f"`name=` is {found}, and becomes the name of a directory: expected a string of at most 100"
        " letters, digits and `_ - . = + , @`, which begins with a letter or a digit, and is"
        " none of `latest`, `step_<number>`, `final_step_<number>`. An object to be saved needs"
        " another keyword."
    )
    with exits():
        raise ConfigError([problem], "This Run")


def checked_config(config: Any) -> dict[str, Any] | None:
    """`config=` by dotted keys; names what of it does not count. A bad one ends the process."""
    if config is None:
        return None
    with exits():
        values, left_out = flat_config.given(config)
    if left_out:
        messages.warn(
            f"`config=`: {messages.few(left_out, 5)} cannot be compared with an earlier start, and"
            " does not count. Numbers, strings, booleans, None, paths, and lists and dicts of them"
            " do."
        )
    return values


def is_change_wanted(policy: Policy) -> bool:
    """Whether this start takes the job on with what has changed."""
    return identity.is_change_wanted() or policy.resume is Resume.changed


def check_alone(*, is_inside: bool) -> None:
    """Refuse what would take the signals away from another Run, or never get any.

    Args:
        is_inside: Whether another Run of this process is open.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ForgeError(
            f"forge.Run was entered in the thread {threading.current_thread().name!r}. Python"
            " delivers signals to the main thread alone, so the Run could be neither stopped nor"
            " saved: enter it there."
        )
    if is_inside:
        problem = (
            "it was entered inside another forge.Run, which listens to the signals of this process."
            " Enter them one after the other, each with a name: forge.Run(policy,"
            ' name="stage2", …). What belongs to one training goes into one Run.'
        )
        with exits():
            raise ConfigError([problem], "This Run")


def check_code(directory: Path, action: CodeChange) -> None:
    """Compare the code with that of the job's first start.

    Raises:
        ConfigError: Where it changed and the policy says refuse.
    """
    changed = job_dir.changed_code(directory)
    if not changed:
        return
    text = f"the code changed since this job was first started: {messages.few(changed, 5)}"
    if action is CodeChange.refuse:
        raise ConfigError(
            [
                f"`resilience.requeue.on_code_change=refuse`: {text}. Put the code back, or"
                " start it with `resilience.requeue.on_code_change=warn`."
            ]
        )
    messages.warn(text)


def keep_threads(directory: Path, *, is_resumed: bool) -> None:
    """Let torch use as many threads as at the first start: another number gives other bits."""
    now = torch.get_num_threads()
    first = job_dir.first_threads(directory) if is_resumed else None
    if first is None:
        job_dir.note_threads(directory, now)
    elif first != now:
        torch.set_num_threads(first)
        messages.warn(
            f"torch had {now} threads here, and {first} when this job was first started. It has"
            f" {first} again, since the number of threads changes the order of sums. What ran"
            f" before `forge.Run` had {now}; .forge/resume.sh starts with the original environment."
        )
