"""What can go wrong, why a job ends, and the codes a forge process ends with.

ForgeError                   what was asked for cannot be done
├── ConfigError                  a policy that cannot work; lists every problem at once
├── FrozenConfigError            the stored config of a job cannot be used
│   ├── Contradiction                what is asked for now contradicts it
│   └── DamagedConfig                its file has another content than was written
├── Untrusted                    somebody else could have written what would be executed
├── CheckpointError              a checkpoint cannot be written or read
│   ├── DiskFull                     the disk, or the quota, has no room for it
│   ├── DamagedCheckpoint            its bytes are not the ones that were committed
│   ├── NewerFormat                  a newer version of forge has written it
│   └── StateMismatch                its state does not fit the live objects
├── DirectoryInUse               another live job, or a newer attempt, owns the directory
├── RankLost                     another rank of the job is gone, or does not answer
├── RankFailed                   another rank of the job cannot go on
├── GpuGone                      a GPU does not answer its driver any more
├── SlurmError                   Slurm does not do what was asked of it
│   ├── SlurmRefused                 a command failed; the text is what it said
│   │   └── NotRequeueable               the controller will not requeue this job
│   ├── NoAnswer                     the controller did not answer in time
│   ├── NoSuchJob                    the controller does not know the job, or no longer
│   └── AlreadyRequeued              Slurm brings the job back by itself
├── JobError                     a job of a sweep did not finish
└── RehearsalFailed              a rehearsed script did not end as it should

JobTraceback (an Exception)  what an exception was raised from, in the job's own process
Exit (a SystemExit)          ends the process with one of the codes below
MainCalled (a BaseException) a script that was only to be imported calls main

Every exception class of forge stands here.
"""

from __future__ import annotations

import errno
from enum import Enum, IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of a forge job; those of sysexits.h where one fits."""

    FINISHED = 0
    """Finished."""
    HALTED = 65
    """The NaN policy stopped the run; the last good checkpoint is in place."""
    UNHEALTHY = 69
    """This node failed a health check."""
    FORCED = 70
    """Stopping took longer than `shutdown.timeout_s`, or the job hung; all stacks are in a file."""
    DISK_FULL = 71
    """No room for a checkpoint, on the disk or in the quota; the last good one is in place."""
    IN_USE = 73
    """The directory belongs to a running job."""
    IO_ERROR = 74
    """Checkpoints cannot be written or read."""
    REQUEUE = 75
    """Checkpointed; run me again."""
    BAD_CONFIG = 78
    """The configuration, or the code that is to resume with it, is refused."""
    HANGUP = 129
    """SIGHUP: the terminal, or the connection to it, is gone."""
    INTERRUPTED = 130
    """Ctrl+C."""
    TERMINATED = 143
    """SIGTERM."""


class Reason(Enum):
    """Why an attempt ended. Files hold the name; the value is for people alone."""

    finished = "finished"
    preempted = "preempted"
    node_failed = "node failed"
    time_limit = "time limit"
    requested = "asked to requeue"
    signalled = "SIGTERM by hand"
    interrupted = "SIGINT (Ctrl+C)"
    cancelled = "stopped"
    orphaned = "its launcher was gone"
    halted = "halted by the policy"
    unhealthy = "this node is unhealthy"
    in_use = "another run uses its directory"
    disk_full = "the disk is full"
    io_error = "checkpoints cannot be written or read"
    bad_config = "bad configuration"
    forced = "forced exit"
    crashed = "crashed"
    out_of_memory = "killed for memory"
    rank_lost = "another rank was lost"
    hung = "it made no progress"
    failed = "failed"
    unanswered = "could not be requeued"

    @classmethod
    def of_code(cls, code: int) -> Reason:
        """What an exit code alone says."""
        return _OF_CODE.get(code, cls.failed)


_OF_CODE: dict[int, Reason] = {
    ExitCode.FINISHED: Reason.finished,
    ExitCode.HALTED: Reason.halted,
    ExitCode.UNHEALTHY: Reason.unhealthy,
    ExitCode.FORCED: Reason.forced,
    ExitCode.IN_USE: Reason.in_use,
    ExitCode.DISK_FULL: Reason.disk_full,
    ExitCode.IO_ERROR: Reason.io_error,
    ExitCode.REQUEUE: Reason.requested,
    ExitCode.BAD_CONFIG: Reason.bad_config,
    ExitCode.HANGUP: Reason.cancelled,
    ExitCode.INTERRUPTED: Reason.interrupted,
    ExitCode.TERMINATED: Reason.cancelled,
}


class ForgeError(Exception):
    """Base of every error that forge raises for its users: what was asked for cannot be done."""

    exit_code = ExitCode.BAD_CONFIG

    @property
    def reason(self) -> Reason:
        """Why the job ends, where this ends it."""
        return Reason.of_code(self.exit_code)


class ConfigError(ForgeError):
    """A policy that cannot work. `problems` holds one sentence per problem."""

    def __init__(self, problems: list[str], what: str = "The resilience policy") -> None:
        self.problems = problems
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        self._what = what
        super().__init__(f"{what} has {count}:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems, self._what)


class FrozenConfigError(ForgeError):
    """The config that a job keeps from its first start cannot be used."""


class Contradiction(FrozenConfigError):
    """What is asked for now contradicts the config that the job began with."""


class DamagedConfig(FrozenConfigError):
    """The file of the config has another content than was written."""


class Untrusted(ForgeError):
    """Somebody else could have written a file that is executed, or that says what is."""


class CheckpointError(ForgeError):
    """A checkpoint cannot be written or read."""

    exit_code = ExitCode.IO_ERROR


class DiskFull(CheckpointError):
    """The disk, or the quota, has no room: worth another try, once there is some."""

    exit_code = ExitCode.DISK_FULL


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not the ones that were committed."""


class NewerFormat(CheckpointError):
    """A newer version of forge has written a checkpoint: it is neither read nor replaced."""


class StateMismatch(CheckpointError):
    """The state in a checkpoint does not fit the objects it should go into."""


_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def is_disk_full(error: BaseException) -> bool:
    """Whether there was no room, on the disk or in the quota."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def unwritable(text: str, error: OSError) -> CheckpointError:
    """What to raise where a checkpoint cannot be written."""
    return DiskFull(text) if is_disk_full(error) else CheckpointError(text)


class DirectoryInUse(ForgeError):
    """Another live job, or a newer attempt of this one, owns the checkpoint directory."""

    exit_code = ExitCode.IN_USE


class RankLost(ForgeError):
    """Another rank of the job is gone, or does not answer."""

    exit_code = ExitCode.FORCED
    reason = Reason.rank_lost


class RankFailed(ForgeError):
    """Another rank of the job cannot go on; its exit code is this one's, too."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (str(self), int(self.exit_code))


class GpuGone(ForgeError):
    """A GPU has fallen off the bus, or does nothing before it is reset."""


class SlurmError(ForgeError):
    """Slurm does not do what was asked of it."""

    exit_code = ExitCode.IO_ERROR


class SlurmRefused(SlurmError):
    """A command of Slurm's failed; the text is what it said."""


class NotRequeueable(SlurmRefused):
    """The controller will not requeue this job."""


class NoAnswer(SlurmError):
    """The controller did not answer in time."""


class NoSuchJob(SlurmError):
    """The controller does not know the job, or no longer."""


class AlreadyRequeued(SlurmError):
    """Slurm brings the job back by itself."""


class JobError(ForgeError):
    """A job of a sweep did not finish, and no exception of the user's says why."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        """The exit code of its last process; minus the signal that killed it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JobError, (str(self), self.code)


class RehearsalFailed(ForgeError):
    """A rehearsed script did not end as it should; says how."""


class JobTraceback(Exception):
    """What an exception was raised from, as it was in the job's own process."""


class Exit(SystemExit):
    """Ends the process with `code`; not an `Exception`, so that no `except` takes it for a bug.

    Args:
        code: The exit code.
        text: Why, for people.
        reason: Why, for whoever decides what follows; where it is left out, what the code says.
    """

    def __init__(self, code: int, text: str, reason: Reason | None = None) -> None:
        super().__init__(int(code))
        self.text = text
        self.reason = reason or Reason.of_code(int(code))

    def __reduce__(self) -> tuple[Any, ...]:
        return Exit, (self.code, self.text, self.reason)

    def __str__(self) -> str:
        return f"{self.text} (exit code {self.code})"


class MainCalled(BaseException):
    """A script that is only imported calls main: no `except` of the script's may keep it."""
