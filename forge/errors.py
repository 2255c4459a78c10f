"""All exceptions of forge, the reasons why a job ends, and its exit codes.

ForgeError                   base class of the errors below
├── ConfigError                  the policy is invalid; lists all problems
├── FrozenConfigError            the config stored in the job's directory cannot be used
│   ├── Contradiction                the new config contradicts the stored one
│   └── DamagedConfig                the stored file was changed since forge wrote it
├── Untrusted                    another user could have changed a file that would be executed
├── CheckpointError              a checkpoint cannot be written or read
│   ├── DiskFull                     the disk or the quota is full
│   ├── DamagedCheckpoint            the bytes differ from those that were committed
│   ├── NewerFormat                  a newer version of forge wrote the checkpoint
│   └── StateMismatch                the saved state does not fit the live objects
├── DirectoryInUse               another running job, or a newer attempt, owns the directory
├── RankLost                     another rank has died or does not answer
├── RankFailed                   another rank has raised an error
├── SlurmError                   a request to Slurm failed
│   ├── SlurmRefused                 a Slurm command failed; the text is its output
│   │   └── NotRequeueable               the controller refuses to requeue this job
│   ├── NoAnswer                     the controller did not answer in time
│   └── NoSuchJob                    the controller does not know the job (any longer)
├── NoSweep                      there is no sweep, run or job as named
├── JobError                     a job of a sweep did not finish
└── RehearsalFailed              a script failed its rehearsal

JobTraceback (an Exception)  the traceback of an exception in the job's own process
Exit (a SystemExit)          ends the process with one of the exit codes below
MainCalled (a BaseException) a script that forge only imports called its main function
"""

from __future__ import annotations

import errno
from enum import Enum, IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of a forge job, taken from sysexits.h if a code there fits.

    If the description of a code says "starts again", forge's launchers restart or requeue the job,
    within the limits of `resilience.requeue`. Exit codes that are not listed are those of your
    program.
    """

    def __new__(cls, code: int, meaning: str = "") -> ExitCode:
        """A member that has its meaning as its docstring."""
        member = int.__new__(cls, code)
        member._value_, member.__doc__ = code, meaning
        return member

    FINISHED = 0, "The training, or the command of `forge exec`, finished. The job ends."
    HALTED = (
        65,
        "The NaN policy ended the run (`resilience.nan`). The last good checkpoint is on disk; the"
        " job does not start again.",
    )
    UNHEALTHY = (
        69,
        "A health check failed whose action is refuse, exclude_node or halt. After halt the job"
        " ends. After refuse and exclude_node, the Slurm launcher requeues the job, which starts on"
        " another node; without that launcher the job ends.",
    )
    FORCED = (
        70,
        "After a signal the process had not exited within `shutdown.timeout_s`, or the job hung, or"
        " a rank was lost. Progress since the last checkpoint is lost; the job starts again.",
    )
    DISK_FULL = (
        71,
        "A checkpoint could not be written, because the disk or the quota is full. The last good"
        " checkpoint is on disk; after a pause the job starts again.",
    )
    IN_USE = (
        73,
        "Another running job, or a newer attempt of this job, uses the checkpoint directory. This"
        " attempt ends and does not start again.",
    )
    IO_ERROR = 74, "Checkpoints cannot be written or read. The job does not start again."
    REQUEUE = (
        75,
        "The job saved and stopped before it had finished: at the time limit, or for a signal whose"
        " action is requeue. The job starts again; without a launcher, run the command again.",
    )
    BAD_CONFIG = (
        78,
        "The config is invalid, or the config or the code differs from that of the job's first"
        " start. The job does not start again.",
    )
    HANGUP = (
        129,
        "The job saved and stopped for SIGHUP (the terminal or its connection was closed). The job"
        " does not start again by itself.",
    )
    INTERRUPTED = (
        130,
        "The job saved and stopped for Ctrl+C (SIGINT). The job does not start again by itself.",
    )
    TERMINATED = (
        143,
        "The job saved and stopped for SIGTERM. On Slurm the job starts again if Slurm sent the"
        " signal for a preemption or the time limit; otherwise (`scancel`, `kill`) it ends.",
    )


class Reason(Enum):
    """Why an attempt ended. Files store the name; messages show the value."""

    finished = "finished"
    preempted = "preempted"
    node_failed = "node failed"
    time_limit = "time limit"
    requested = "a requeue was requested"
    signalled = "SIGTERM sent by hand"
    interrupted = "SIGINT (Ctrl+C)"
    cancelled = "stopped"
    orphaned = "its launcher exited"
    halted = "halted by the policy"
    unhealthy = "this node is unhealthy"
    in_use = "another run uses its directory"
    disk_full = "the disk is full"
    io_error = "checkpoints cannot be written or read"
    bad_config = "bad configuration"
    forced = "forced exit"
    crashed = "crashed"
    out_of_memory = "killed, since memory ran out"
    rank_lost = "another rank was lost"
    hung = "it made no progress"
    failed = "failed"
    code_changed = "failed, and its code has changed since it was submitted"
    unanswered = "could not be requeued"

    @classmethod
    def of_code(cls, code: int) -> Reason:
        """The reason that an exit code stands for, if nothing more is known."""
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
    """Base class of forge's own errors. `Exit`, which stops the process, is not one of them."""

    exit_code = ExitCode.BAD_CONFIG

    @property
    def reason(self) -> Reason:
        """The reason that forge records if this error ends the job."""
        return Reason.of_code(self.exit_code)


class ConfigError(ForgeError):
    """The policy, or another setting, is invalid. `problems` has one sentence for each problem.

    Args:
        problems: The sentences.
        what: The subject of the message: `<what> has a problem: …`.
        page: The page of the documentation to read.
    """

    def __init__(
        self, problems: list[str], what: str = "The resilience policy", page: str = ""
    ) -> None:
        self.problems = problems
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        see = f"\nSee {page}" if page else ""
        self._others = what, page
        super().__init__(f"{what} has {count}:{lines}{see}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems, *self._others)


class FrozenConfigError(ForgeError):
    """The config stored at the job's first start cannot be used."""


class Contradiction(FrozenConfigError):
    """The new config contradicts the one that the job was started with."""


class DamagedConfig(FrozenConfigError):
    """The stored config was changed since forge wrote it."""


class Untrusted(ForgeError):
    """Another user could have changed a file that forge executes, or that names such a file."""


class CheckpointError(ForgeError):
    """A checkpoint cannot be written or read."""

    exit_code = ExitCode.IO_ERROR


class DiskFull(CheckpointError):
    """The disk or the quota is full; a later attempt can succeed."""

    exit_code = ExitCode.DISK_FULL


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is damaged: a file is missing, or differs from the file that was saved."""


class NewerFormat(CheckpointError):
    """A newer version of forge wrote the checkpoint; this one neither reads nor replaces it."""


class StateMismatch(CheckpointError):
    """The state in a checkpoint does not fit the objects it would be loaded into."""


_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk or the quota is full."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def unwritable(text: str, error: OSError) -> CheckpointError:
    """The error to raise if a checkpoint cannot be written."""
    return DiskFull(text) if is_disk_full(error) else CheckpointError(text)


class DirectoryInUse(ForgeError):
    """Another running job, or a newer attempt of this job, owns the checkpoint directory."""

    exit_code = ExitCode.IN_USE


class RankLost(ForgeError):
    """Another rank of the job has died or does not answer."""

    exit_code = ExitCode.FORCED
    reason = Reason.rank_lost


class RankFailed(ForgeError):
    """Another rank of the job has raised an error; this rank exits with the same code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (str(self), int(self.exit_code))


class SlurmError(ForgeError):
    """A request to Slurm failed."""

    exit_code = ExitCode.IO_ERROR


class SlurmRefused(SlurmError):
    """A Slurm command failed; the text is its output."""


class NotRequeueable(SlurmRefused):
    """The controller refuses to requeue this job."""


class NoAnswer(SlurmError):
    """The controller did not answer in time."""


class NoSuchJob(SlurmError):
    """The controller does not know the job (any longer)."""


class NoSweep(ForgeError):
    """There is no sweep and no run at a path, or no such job in it."""


class JobError(ForgeError):
    """A job of a sweep did not finish, and the script raised no exception that explains it."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        """The exit code of the job's last process, or minus the signal that killed it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JobError, (str(self), self.code)


class RehearsalFailed(ForgeError):
    """A script failed its rehearsal; the text says how."""


class JobTraceback(Exception):
    """The traceback of an exception, as the job's own process printed it."""


class Exit(SystemExit):
    """Raised to end the process with `code`: after a stop, or if the training cannot start.

    It is a `SystemExit`: `except Exception` does not catch it.

    Args:
        code: The exit code.
        text: The explanation for people, which is printed.
        reason: The category in the ledger; by default the one that belongs to `code`.
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
    """A script that forge only imports called its main function; `except Exception` misses it."""
