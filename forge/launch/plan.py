"""A job's plan is made; what of an earlier start must not change is kept."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from forge import messages
from forge.compat import of_stdlib
from forge.config.schema import (
    ExecConfig,
    HangAction,
    HangConfig,
    Policy,
    Resume,
    SignalAction,
    SignalTo,
    ZeroAfterSignal,
)
from forge.filesystem.files import open_file
from forge.jobdir import ledger
from forge.jobdir.job_files import OUTPUT, STATE, forge_dir, job_ledger, read_json, suffix
from forge.jobdir.plan import ExecPlan, JobPlan, RequeueLimits, read_earlier
from forge.launch.exec import Command
from forge.launch.sweep import Place
from forge.messages import escape

_TAIL_BYTES = 2**16
_TAIL_COLUMNS = 500

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""What has to be on sys.path to import forge."""


@dataclass
class ComposedJob:
    """One job of a batch, composed: what its plan is made of."""

    place: Place
    directory: Path
    """Absolute."""
    config: DictConfig
    policy: Policy | None
    """None where it has none: then it is started once."""
    label: str
    """Its overrides, for people."""
    program: str
    """What the overrides are overrides of."""
    composed: str
    """sha256 of its config as it was composed."""
    written: dict[str, Any]
    """`identity.as_written` of it."""
    command: Command | None = None
    """What it runs in place of a main."""

    @property
    def is_active(self) -> bool:
        """Whether it has a policy that is not switched off."""
        return self.policy is not None and self.policy.enabled


def make(
    job: ComposedJob,
    main: dict[str, str] | None,
    time_limit_s: float | None,
    threads: int,
    tasks: int = 1,
) -> JobPlan:
    """The plan of a job in its directory; what must not change is taken from an earlier one.

    Args:
        job: As it was composed.
        main: How the task imports the sweep's `__main__`.
        time_limit_s: Seconds that one start may take.
        threads: Value of OMP_NUM_THREADS, where the environment has none.
        tasks: Ranks of a job on one machine.
    """
    directory, command = job.directory, job.command
    before = read_earlier(directory)
    place = _place(directory)
    is_same = bool(place) and before.place == place  # a copy of a job is another job
    # The number of threads changes the order of sums, so it stays what it was at first, even
    # where it came from the environment of a shell that is gone.
    name = "OMP_NUM_THREADS"
    at_first = before.environment.get(name)
    has_started = has_begun(directory) if command is None else job_ledger(directory).exists()
    if at_first is None or not has_started:
        at_first = os.environ.get(name) or at_first or str(threads)
    added = {name: at_first}
    is_active, policy = job.is_active, job.policy or Policy()
    hang = policy.hang if is_active and command is None else HangConfig(action=HangAction.ignore)
    is_final = hang.action is HangAction.halt
    more = {"max_hangs": hang.max_restarts, "is_hang_final": is_final}
    requeue = RequeueLimits.of(policy.requeue, **more)
    if not is_active:
        why = "its config has no active `resilience` policy"
        requeue = replace(requeue, enabled=False, why_not=why)
    actions = {name: action.name for name, action in policy.signal.actions.items()}
    name = policy.signal.name
    words, cwd = _main_by_name(directory), str(Path.cwd())
    if command is not None:
        name = policy.exec.signal
        if actions.get(name) != SignalAction.requeue.name:
            actions[name] = SignalAction.stop.name  # whatever it is for a main
        words, cwd = command.words, str(directory) if command.is_in_job_dir else cwd
        added |= command.environment
        if is_active and has_started and is_same and policy.resume is not Resume.changed:
            words = _as_at_first(words, before.command, directory)
    return JobPlan(
        overrides=list(job.place.overrides),
        command=words,
        exec=_exec_plan(policy.exec) if command is not None else None,
        cwd=cwd,
        environment=added,
        place=place,
        program=job.program,
        composed=job.composed,
        token=str((is_same and before.token) or secrets.token_hex(8)),
        main=main,
        argv=list(sys.argv),
        orig_argv=list(sys.orig_argv),
        path=[str(Path(entry).absolute()) if entry else str(Path.cwd()) for entry in sys.path],
        checkpoint_dir=policy.checkpoint.dir,
        time_limit_s=time_limit_s,
        signal=name,
        warning_s=policy.signal.warning_s if is_active else 0.0,  # no policy there to hear it
        timeout_s=policy.stop_s,
        actions=actions if is_active else {},
        requeue=requeue,
        hang=hang.action.name,
        written=job.written if is_active else None,
        tasks=tasks,
    )


def _main_by_name(directory: Path) -> list[str]:
    start = (
        f"import sys; sys.path[:] = [{ROOT!r}, *filter(None, sys.path)]; from pathlib import Path;"
    )
    start += " from forge.launch.task import main; sys.exit(main(Path(sys.argv[1])))"
    return [sys.executable, "-u", *of_stdlib.interpreter_flags(), "-c", start, str(directory)]


def _exec_plan(config: ExecConfig) -> ExecPlan:
    return ExecPlan(
        is_group_signalled=config.signal_to is SignalTo.group,
        supports_termination=config.supports_termination,
        is_zero_finished=config.zero_after_signal is ZeroAfterSignal.finished,
    )


def _as_at_first(command: list[str], first: list[str], directory: Path) -> list[str]:
    """The command that the job was first started with: what it has saved is that command's."""
    if first and command != first:
        messages.warn(
            f"The job in {directory} resumes with the command that it was first started with:"
            f" {shlex.join(first)}. Its config now gives {shlex.join(command)}; to take that, add"
            " resilience.resume=changed"
        )
    return first or command


def _place(directory: Path) -> list[int]:
    try:
        status = directory.stat()
    except FileNotFoundError:
        return []
    return [status.st_dev, status.st_ino]


def is_finished(directory: Path) -> bool:
    """Whether the job has reached its end."""
    state = read_json(forge_dir(directory) / STATE)
    return state is not None and state.get("state") == "finished"


def has_begun(directory: Path) -> bool:
    """Whether the job has trained: a checkpoint or a step under way belongs to its config."""
    return ledger.saved_steps(directory, read_earlier(directory).checkpoint_dir) >= 0


def last_output(directory: Path, rank: int, lines: int = 20) -> str:
    """The last lines that a rank of the job printed, for an error's text."""
    path = directory / f"{OUTPUT}{suffix(rank)}"
    try:
        with os.fdopen(open_file(path), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = "\n".join(f"  {escape(line[:_TAIL_COLUMNS])}" for line in text.splitlines()[-lines:])
    return f"\nThe end of {path}:\n{shown}"
