"""The resilience policy: every key with its type, default, bounds and help text.

`load` converts whatever Hydra composed (or a plain dict) into a `Policy`, once. It reports all
problems together: unknown keys with the nearest existing key, wrong types, values out of range, and
broken rules between keys. `make policy` generates `conf/resilience/default.yaml` and the tables of
`docs/reference/policy.md` from this file. One module, since it is read as one page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forge.config import removed
from forge.config.keys import key

SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals that a policy can name: they can be caught, and people send them to jobs."""


class SignalAction(Enum):
    """The action on a signal, at the next step boundary."""

    stop = "stop"
    """Save, run the callbacks, end with 128 + the signal's number."""
    requeue = "requeue"
    """Save, run the callbacks, end with 75: run me again."""
    save = "save"
    """Save and keep training."""
    ignore = "ignore"
    """Nothing."""


# The functional form, because `raise` is a keyword and has to be an alias of `halt`.
NanAction = Enum(
    "NanAction",
    {"warn": "warn", "skip": "skip", "rollback": "rollback", "halt": "halt", "raise": "halt"},
)


class CodeChange(Enum):
    """What to do when the code is not the code the job was first started with."""

    warn = "warn"
    refuse = "refuse"


class CheckAction(Enum):
    """The action on a failed health check."""

    ignore = "ignore"
    """The check is not run."""
    warn = "warn"
    """The failure is logged."""
    refuse = "refuse"
    """The job leaves this node (exit code 69)."""
    exclude_node = "exclude_node"
    """The same, and on Slurm the sweep's other jobs avoid the node too."""
    halt = "halt"
    """The job ends (69) and is not started again."""


class HangAction(Enum):
    """The action on a hang."""

    ignore = "ignore"
    """No hang detection."""
    warn = "warn"
    """The stacks of all ranks are saved, and the hang is logged."""
    restart = "restart"
    """The same; then the job is restarted, within `hang.max_restarts`."""
    halt = "halt"
    """The same; then the job ends (70) and is not started again."""


class OnPendingSave(Enum):
    """The action of a periodic save while the save before it is still being written."""

    wait = "wait"
    skip = "skip"


class Verify(Enum):
    """How much of a checkpoint is checked before it is loaded."""

    full = "full"
    """The checksums of all bytes, before any live object is changed."""
    size = "size"
    """That the files exist with their sizes: a large checkpoint is read once instead of twice."""
    none = "none"
    """Only what loading itself checks."""


STOP_SHARE = 0.75
"""Default of `shutdown.timeout_s`, as a fraction of `signal.warning_s`."""


class Resume(Enum):
    """Whose checkpoints a job resumes from."""

    same = "same"
    """Its own: saved by the same program, Run name and config."""
    changed = "changed"
    """Also those of another config; differences are applied and logged."""


@dataclass
class SignalConfig:
    """Which signals stop a job, and how early."""

    name: str = key(
        "USR2",
        choices=SIGNALS,
        help="The signal that announces the time limit.",
    )
    warning_s: float = key(
        120.0,
        gt=0,
        remedy="Without a warning there is no time to save. Set it to the seconds that a save"
        " takes, with a margin.",
        help="Seconds before the time limit at which the signal is sent.",
    )
    actions: dict[str, SignalAction] = key(
        {
            "TERM": SignalAction.stop,
            "INT": SignalAction.stop,
            "HUP": SignalAction.stop,
            "USR1": SignalAction.requeue,
            "USR2": SignalAction.requeue,
        },
        help="The action on each signal: stop | requeue | save | ignore. `save` saves and keeps"
        " training. SIGHUP and SIGINT stay ignored if they are ignored when the process starts"
        " (nohup, the background of a script) and their action is stop.",
    )


@dataclass
class ShutdownConfig:
    """The time limit for stopping."""

    timeout_s: float | None = key(
        None,
        ge=0,
        remedy="0 never forces an exit.",
        help="Seconds from the signal to the forced exit (70). null: three quarters of"
        " `signal.warning_s`; 0: never.",
    )


@dataclass
class RequeueRule:
    """Your own exit codes after which the job is started again."""

    exit_codes: list[int] = key([], help="Exit codes of your program, 1 to 255.")
    max_restarts: int = key(1, ge=1, help="Restarts for them, over the whole job.")
    recover: list[str] = key(
        [],
        help="A command that runs before the restart. Its environment has FORGE_ATTEMPT,"
        " FORGE_RETURN_CODE and FORGE_JOB_DIR.",
    )


@dataclass
class RequeueConfig:
    """When a stopped job is started again, in its directory."""

    enabled: bool = key(
        True,
        help="Whether the job is ever started again. false: for example if your batch script"
        " requeues it itself.",
    )
    max_preemptions: int | None = key(
        None,
        ge=0,
        remedy="0 never starts it again, null has no limit.",
        help="Restarts after a preemption or a request to requeue. null: no limit.",
    )
    max_timeouts: int | None = key(
        None,
        ge=0,
        remedy="0 never starts it again, null has no limit.",
        help="Restarts after the time limit. null: no limit.",
    )
    max_failures: int | None = key(
        10,
        ge=0,
        remedy="0 never starts it again, null has no limit.",
        help="Restarts after a crash, a kill or a forced exit. null: no limit.",
    )
    max_no_progress: int = key(
        3,
        ge=1,
        remedy="1 stops after the first.",
        help="Stop restarting after this many attempts in a row that saved nothing new.",
    )
    rules: list[RequeueRule] = key(
        [],
        help="Your own exit codes that are worth a restart: `[{exit_codes: [1], max_restarts: 2}]`."
        " With `recover: [command, …]` that command runs first.",
    )
    on_code_change: CodeChange = key(
        CodeChange.warn,
        help="The action if the code has changed when a job resumes.",
    )


class SignalTo(Enum):
    """Which processes of a `forge exec` command get the signals."""

    group = "group"
    """Its whole process group."""
    leader = "leader"
    """Only the process that was started; it informs the others."""


class ZeroAfterSignal(Enum):
    """The meaning of exit code 0 after the command was asked to stop."""

    requeue = "requeue"
    """It has saved: run it again if the reason was a preemption or the time limit."""
    finished = "finished"
    """It has finished."""


@dataclass
class ExecConfig:
    """How a command of `forge exec` is stopped."""

    signal: str = key(
        "TERM",
        choices=SIGNALS,
        help="The signal that makes the command save and exit. It is sent `signal.warning_s` before"
        " the time limit, and when the job is stopped; it replaces `signal.name`.",
    )
    signal_to: SignalTo = key(
        SignalTo.group,
        help="Send signals to the command's process group, or only to the process started.",
    )
    supports_termination: bool = key(
        True,
        help="Whether the command can save when it gets the signal. true: SIGKILL follows after"
        " `shutdown.timeout_s`; false: SIGKILL immediately.",
    )
    zero_after_signal: ZeroAfterSignal = key(
        ZeroAfterSignal.requeue,
        help="The meaning of exit code 0 after a signal for a preemption or the time limit.",
    )


@dataclass
class RollbackConfig:
    """How far a rollback goes back, and what it changes."""

    steps_back: int = key(
        0,
        ge=0,
        remedy="0 is the newest good checkpoint.",
        help="Go back at least this many steps before the first bad one.",
    )
    skip_data: bool = key(
        True,
        help="Skip the batches that led to the bad step. A rollback into an earlier epoch of"
        " `run.epochs` reads them again.",
    )
    lr_scale: float = key(
        1.0,
        gt=0,
        remedy="1 keeps the rate.",
        help="Multiplies the learning rate at each rollback.",
    )
    max_rollbacks: int = key(
        3,
        ge=0,
        remedy="0 never rolls back.",
        help="Halt at the next rollback after this many.",
    )


@dataclass
class NanConfig:
    """The action on a NaN or Inf in the loss or the gradients."""

    action: NanAction = key(
        NanAction.skip,
        help="The action on a NaN or Inf. warn: log it and update; skip: skip the update; rollback:"
        " go back to a checkpoint; halt (or raise): end the job.",
    )
    max_consecutive: int = key(
        5,
        ge=1,
        remedy="1 acts on the first bad step.",
        help="Bad steps in a row until skip halts the job and rollback goes back.",
    )
    check_gradients: bool = key(
        True,
        help="Also check the norm of the gradients, not only the loss.",
    )
    rollback: RollbackConfig = field(default_factory=RollbackConfig)


@dataclass
class CommandCheckConfig:
    """Your own health check: a command."""

    run: list[str] = key(
        [],
        help="The command and its arguments. Any exit code but 0 is a failure; the last line of the"
        " output is shown as its reason.",
    )
    timeout_s: float = key(60.0, gt=0, help="Seconds until the command is killed and has failed.")
    action: CheckAction = key(CheckAction.warn, help="The action on a failure.")


@dataclass
class HealthConfig:
    """Checks of the node, its GPUs and its ranks."""

    enabled: bool = key(True, help="Whether any health check runs.")
    every_s: float | None = key(
        300.0,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Seconds between checks during training. null: only at the start. In the background"
        " `disk` (without writing), `shm`, `gpu_memory`, `gpu_driver` and the commands run.",
    )
    exclude_h: float = key(
        24.0,
        gt=0,
        help="On Slurm: hours for which the job avoids a node that failed a check. With the action"
        " `exclude_node` the sweep's other jobs avoid it too.",
    )
    max_excluded_nodes: int = key(
        3,
        ge=0,
        remedy="0 never changes nodes.",
        help="On Slurm: restarts on other nodes because a check of this job failed.",
    )
    checks: dict[str, CheckAction] = key(
        {
            "disk": CheckAction.refuse,
            "shm": CheckAction.warn,
            "gpu": CheckAction.refuse,
            "gpu_memory": CheckAction.warn,
            "gpu_driver": CheckAction.warn,
            "ranks": CheckAction.warn,
        },
        help="The action on a failed check: ignore | warn | refuse (69) | exclude_node (69) |"
        " halt (69). `disk`: the checkpoint directory takes a synced file; `shm`: 1 GiB is free in"
        " /dev/shm; `gpu`: it computes correctly; `gpu_memory`: other processes use at most 512"
        " MiB; `gpu_driver`: no uncorrected memory errors, failed row remaps or a pending reset;"
        " `ranks`: an all-reduce returns the right sum, and all read the same directory.",
    )
    commands: dict[str, CommandCheckConfig] = key(
        {},
        help="Your own checks, by name: `nhc: {run: [nhc, -a], timeout_s: 30, action:"
        " exclude_node}`.",
    )


@dataclass
class HangConfig:
    """A task that makes no progress. Needs a launcher of forge, on Linux."""

    action: HangAction = key(
        HangAction.warn,
        help="The action on a hang. warn: the stacks are kept; restart: the job is also started"
        " again; halt: it also ends (70).",
    )
    timeout_s: float | None = key(
        None,
        gt=0,
        remedy="null learns it from the steps.",
        help="Seconds without progress that count as a hang. null: 5 times the slowest recent step,"
        " save or evaluation, and at least 300.",
    )
    start_s: float = key(
        1800.0,
        gt=0,
        help="Seconds without progress before the first step. The limit also applies to each of the"
        " first steps, saves and evaluations, and to compilations.",
    )
    max_restarts: int | None = key(
        3,
        ge=0,
        remedy="0 never starts it again, null has no limit.",
        help="Restarts after a hang. null: no limit. The same hang at the same step twice ends the"
        " job.",
    )


class BestMode(Enum):
    """Whether small or large values of a metric are good."""

    min = "min"
    max = "max"


@dataclass
class BestConfig:
    """Checkpoints to keep because a logged metric was good."""

    metric: str | None = key(
        None,
        is_filled=True,
        remedy="Name a metric that run.log() gets, or null.",
        help="Keep the best checkpoints by this metric of `run.log(name=…)`. null: none.",
    )
    mode: BestMode = key(BestMode.min, help="Whether small or large values are better.")
    keep: int = key(
        1,
        ge=1,
        remedy="To keep none set `best.metric` to null.",
        help="How many of the best are kept.",
    )


@dataclass
class CheckpointConfig:
    """Where and when the state is saved."""

    dir: str = key(
        "checkpoints",
        is_filled=True,
        is_path=True,
        remedy="Name a directory, or leave the default.",
        help="Where checkpoints go. A relative path is in the job's own output directory.",
    )
    every_steps: int | None = key(
        1000,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Save after this many steps. null: not by steps.",
    )
    every_s: float | None = key(
        600.0,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Save this many seconds after the last save. null: not by time.",
    )
    keep_last: int = key(
        3,
        ge=1,
        remedy="The newest one is always kept.",
        help="How many of the newest checkpoints are kept.",
    )
    keep_every_steps: int | None = key(
        None,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Keep checkpoints at multiples of this permanently. null: none.",
    )
    best: BestConfig = field(default_factory=BestConfig)
    async_save: bool = key(
        False,
        help="Write in the background while training continues. The state is copied to host memory"
        " first.",
    )
    on_pending_save: OnPendingSave = key(
        OnPendingSave.wait,
        help="The action of a periodic save while another is being written in the background.",
    )
    verify: Verify = key(
        Verify.full,
        help="The check before a checkpoint is loaded. full: all checksums; size: only that"
        " the files exist with their sizes. With `size` and `none`, corrupted bytes are loaded"
        " without an error.",
    )
    init_from: str | None = key(
        None,
        is_filled=True,
        is_path=True,
        remedy="Name a file or a checkpoint, or set it to null.",
        help="A `torch.save` or Lightning file, or a checkpoint, that a new job starts from. A"
        " relative path is relative to where the command was started.",
    )
    init_trust_pickle: bool = key(
        False,
        help="Read the file of `init_from` even if that can execute code in it.",
    )


@dataclass
class Policy:
    """Everything declared under `resilience`."""

    enabled: bool = key(
        True,
        help="Whether forge does anything. false: a plain loop without signal handling, saves or"
        " resumes.",
    )
    resume: Resume = key(
        Resume.same,
        help="Whose checkpoints the job resumes from. changed: those of another config too; what"
        " differs is applied and logged.",
    )
    signal: SignalConfig = field(default_factory=SignalConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    exec: ExecConfig = field(default_factory=ExecConfig)
    nan: NanConfig = field(default_factory=NanConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    slurm: dict[str, Any] = key(
        {},
        help="The job's own sbatch options, as in `hydra.launcher`. null: the value there. Each can"
        " be swept: `resilience.slurm.timeout_min=60,240`.",
    )

    @property
    def stop_s(self) -> float:
        """Seconds from a signal to the forced exit; 0: no forced exit."""
        given = self.shutdown.timeout_s
        return STOP_SHARE * self.signal.warning_s if given is None else given


def __getattr__(name: str) -> Any:
    """Removed classes, which a pickled policy of an earlier version still names."""
    if name in removed.CLASSES:
        return removed.Pickled
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
