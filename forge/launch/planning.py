"""Makes a job's plan, and keeps the values of an earlier start that must not change."""

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
from forge.jobdir import ledger
from forge.jobdir.job_files import job_ledger
from forge.jobdir.plan import ExecPlan, JobPlan, RequeueLimits, read_earlier
from forge.launch.exec import ComposedCommand
from forge.sweeps.reader import JobPlace

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The entry of sys.path from which forge can be imported."""


@dataclass
class ComposedJob:
    """A composed job of a batch, the input for its plan."""

    place: JobPlace
    directory: Path
    """Absolute."""
    config: DictConfig
    policy: Policy | None
    """None: the config has no policy, and the job is started once."""
    label: str
    """Its overrides, for people."""
    program: str
    """The script, the function and the config to which the overrides apply."""
    composed: str
    """sha256 of the composed config."""
    written: dict[str, Any]
    """`identity.as_written` of the config."""
    command: ComposedCommand | None = None
    """The command that the job runs instead of a main function."""
    is_done: bool = False
    """Whether it was finished under a policy, and never runs again: its config is empty."""
    has_new_config: bool = False
    """Whether a config is stored that no training has used, so that this one replaces it."""

    @classmethod
    def done(cls, place: JobPlace, directory: Path, label: str, program: str) -> ComposedJob:
        """A job that is finished, and so is not composed."""
        return cls(place, directory, DictConfig({}), None, label, program, "", {}, is_done=True)

    @property
    def is_active(self) -> bool:
        """Whether the job has a policy that is enabled."""
        return self.policy is not None and self.policy.enabled


def make(
    job: ComposedJob,
    main: dict[str, str] | None,
    time_limit_s: float | None,
    threads: int,
    tasks: int = 1,
) -> JobPlan:
    """Make a job's plan; values that must not change are copied from an earlier plan.

    Args:
        job: The composed job.
        main: How the task imports the sweep's `__main__`.
        time_limit_s: Time limit of one start, in seconds.
        threads: Value of OMP_NUM_THREADS, if the environment does not set it.
        tasks: Ranks of a job on one machine.
    """
    directory, command = job.directory, job.command
    before = read_earlier(directory)
    inode = _inode_of(directory)
    is_same = bool(inode) and before.inode == inode  # a copy of a job is another job
    # The number of threads changes the order of sums, so the number of the first start is kept,
    # even if it came from the environment of another shell.
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
            actions[name] = SignalAction.stop.name  # whatever the action for a main function is
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
        inode=inode,
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
        warning_s=policy.signal.warning_s if is_active else 0.0,  # otherwise nothing handles it
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
        done_file=config.done_file,
    )


def _as_at_first(command: list[str], first: list[str], directory: Path) -> list[str]:
    """The command of the job's first start, since the saved state belongs to that command."""
    if first and command != first:
        messages.warn(
            f"The job in {directory} resumes with the command of its first start:"
            f" {shlex.join(first)}. Its config now has {shlex.join(command)}; to use this command,"
            " add resilience.resume=changed"
        )
    return first or command


def _inode_of(directory: Path) -> list[int]:
    try:
        status = directory.stat()
    except FileNotFoundError:
        return []
    return [status.st_dev, status.st_ino]


def has_begun(directory: Path) -> bool:
    """Whether the job has trained, so that its config must not change any more."""
    return ledger.saved_steps(directory, read_earlier(directory).checkpoint_dir) >= 0
