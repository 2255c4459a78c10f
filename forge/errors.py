"""What can go wrong, and the codes a forge process ends with.

ForgeError
├── ConfigError          a policy that cannot work; lists every problem at once
├── CheckpointError      a checkpoint cannot be written or read
│   ├── DiskFull             the disk, or the quota, has no room for it
│   ├── DamagedCheckpoint    its bytes are not the ones that were committed
│   └── StateMismatch        its state does not fit the live objects
├── DirectoryInUse       another live job, or a newer attempt, owns the directory
├── Untrusted            somebody else could have written what would be executed
└── JobError             a job of a sweep did not finish

JobTraceback             what an exception of a job was raised from, in the job's own process

Exit (a SystemExit)      ends the process with one of the codes below
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of a forge job; those of sysexits.h where one fits."""

    FINISHED = 0
    HALTED = 65
    """The NaN policy stopped the run; the last good checkpoint is in place."""
    UNHEALTHY = 69
    """This node failed a health check."""
    FORCED = 70
    """Stopping took longer than `shutdown.timeout_s`; all stacks were dumped to a file."""
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


class ForgeError(Exception):
    """Base of every error that forge raises for its users."""

    exit_code = ExitCode.IO_ERROR


class ConfigError(ForgeError):
    """A policy that cannot work. `problems` holds one sentence per problem."""

    exit_code = ExitCode.BAD_CONFIG

    def __init__(self, problems: list[str], what: str = "The resilience policy") -> None:
        self.problems = problems
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        self._what = what
        super().__init__(f"{what} has {count}:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems, self._what)


class CheckpointError(ForgeError):
    """A checkpoint cannot be written or read."""


class DiskFull(CheckpointError):
    """The disk, or the quota, has no room: worth another try, once there is some."""

    exit_code = ExitCode.DISK_FULL


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not the ones that were committed."""


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


class Untrusted(ForgeError):
    """Somebody else could have written a file that is executed, or that says what is."""

    exit_code = ExitCode.BAD_CONFIG


class JobError(ForgeError):
    """A job of a sweep did not finish, and no exception of the user's says why."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        """The exit code of its last process; minus the signal that killed it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JobError, (str(self), self.code)


class JobTraceback(Exception):
    """What an exception was raised from, as it was in the job's own process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class Exit(SystemExit):
    """Ends the process with `code`; not an `Exception`, so that no `except` takes it for a bug."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(int(code))
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return Exit, (self.code, self.reason)

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"
