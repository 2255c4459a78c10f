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

from forge.config.keys import key
from forge.errors import Reason

SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals that a policy can name: they can be caught, and people send them to jobs."""
SLURM_KEYS = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"),
    *("name", "stderr_to_stdout", "partition", "qos", "comment", "constraint", "exclude", "gres"),
    *("cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account"),
    *("additional_parameters", "setup", "srun_args", "python", "teardown", "nodelist"),
    "dependency",
)
"""The keys of `resilience.slurm`: sbatch options that can differ between jobs.

They are keys of `hydra/launcher=slurm` (`forge/launch/slurm/slurm_options.py`; a test compares the
two, in this order), which checks their values: a policy is also read on machines without it.
"""


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
    """Also those of another config; the saved hyperparameters stay, and differences are listed."""


@dataclass
class SignalConfig:
    """Which signals stop a job, and how early."""

    name: str = key(
        "USR2",
        choices=SIGNALS,
        help="The signal that Slurm, or forge's wrapper, sends before the time limit.",
    )
    warning_s: float = key(
        120.0,
        gt=0,
        remedy="Set it to the seconds that a save takes, with a margin.",
        help="Seconds before the time limit at which the signal `signal.name` is sent.",
    )
    actions: dict[str, SignalAction] = key(
        {
            "TERM": SignalAction.stop,
            "INT": SignalAction.stop,
            "HUP": SignalAction.stop,
            "USR1": SignalAction.requeue,
            "USR2": SignalAction.requeue,
        },
        help="The action on each signal: stop | requeue | save | ignore. stop: save and exit with"
        " 128 + the signal's number; the job starts again only if Slurm sent the signal for a"
        " preemption or the time limit. requeue: save and exit with 75; the job starts again. save:"
        " save and keep training. If the process was started with SIGHUP or SIGINT"
        " ignored (by nohup, or in the background of a script), `stop` leaves that signal ignored.",
    )


@dataclass
class ShutdownConfig:
    """The time limit for stopping."""

    timeout_s: float | None = key(
        None,
        ge=0,
        remedy="0 never forces an exit.",
        help="Seconds that a stop can take, from the signal on; then the process is ended with exit"
        " code 70. null: three quarters of `signal.warning_s`; 0: no limit.",
    )


@dataclass
class RequeueRule:
    """Your own exit codes after which the job is started again."""

    exit_codes: list[int] = key(
        [], help="Exit codes of your program (1 to 255) after which the job is restarted."
    )
    reason: str | None = key(
        None,
        choices=(Reason.code_changed.name,),
        help="code_changed: only if source files have changed since the job was submitted. null: in"
        " any case.",
    )
    max_restarts: int = key(
        1, ge=1, help="Maximum number of restarts for these exit codes, over the job's whole life."
    )
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
        help="Whether forge starts the job again after it was stopped or failed. false: for example"
        " if your batch script requeues the job itself.",
    )
    max_preemptions: int | None = key(
        None,
        ge=0,
        remedy="0 means no restart, null no limit.",
        help="Maximum number of restarts after a preemption or a request to requeue. null: no"
        " limit.",
    )
    max_timeouts: int | None = key(
        None,
        ge=0,
        remedy="0 means no restart, null no limit.",
        help="Maximum number of restarts after the time limit. null: no limit.",
    )
    max_failures: int | None = key(
        10,
        ge=0,
        remedy="0 means no restart, null no limit.",
        help="Maximum number of restarts after a crash, a kill or a forced exit. null: no limit.",
    )
    max_no_progress: int = key(
        3,
        ge=1,
        remedy="1 stops after the first attempt that saved nothing new.",
        help="Do not restart the job after this many attempts in a row that saved no new"
        " checkpoint.",
    )
    rules: list[RequeueRule] = key(
        [],
        help="Exit codes of your program after which the job is restarted: `[{exit_codes: [1],"
        " max_restarts: 2}]`. With `recover: [command, …]` that command runs before the restart."
        " With `reason: code_changed` the rule is only for jobs whose code has changed since they"
        " were submitted, and without `exit_codes` for each of their failures.",
    )
    on_code_change: CodeChange = key(
        CodeChange.warn,
        help="The action if a job resumes and its code has changed since its first start. warn: log"
        " it; refuse: exit with code 78.",
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
        help="The signal that asks the command of `forge exec` to save and exit. forge sends it"
        " when the job is stopped, and (instead of `signal.name`) when `signal.warning_s` seconds"
        " are left before the time limit.",
    )
    signal_to: SignalTo = key(
        SignalTo.group,
        help="Which processes of the `forge exec` command get its signals. group: its whole process"
        " group; leader: only the process that forge started.",
    )
    supports_termination: bool = key(
        True,
        help="Whether the `forge exec` command can save and exit at a signal. true: forge kills it"
        " `shutdown.timeout_s` after the signal; false: forge kills it immediately (SIGKILL).",
    )
    zero_after_signal: ZeroAfterSignal = key(
        ZeroAfterSignal.requeue,
        help="The meaning of exit code 0 of a `forge exec` command that was stopped for a"
        " preemption or the time limit. requeue: it saved, and runs again; finished: it is done.",
    )
    done_file: str | None = key(
        None,
        help="A file that the `forge exec` command writes when it is done, absolute or relative to"
        " the job's directory. With the file, exit code 0 is the end, also after a signal; without"
        " it, the command runs again, as after exit code 75. null: only the exit code counts.",
    )


@dataclass
class RollbackConfig:
    """How far a rollback goes back, and what it changes."""

    steps_back: int = key(
        0,
        ge=0,
        remedy="0 is the newest good checkpoint.",
        help="A rollback goes to a checkpoint at least this many steps before the first bad step.",
    )
    skip_data: bool = key(
        True,
        help="After a rollback, continue with the batch after the bad step: batches since the"
        " checkpoint are not used again. Exception: if the checkpoint is in an earlier epoch of"
        " `run.epochs`, training uses them again.",
    )
    lr_scale: float = key(
        1.0,
        gt=0,
        remedy="1 keeps the rate.",
        help="Each rollback multiplies the learning rate by this.",
    )
    max_rollbacks: int = key(
        3,
        ge=0,
        remedy="0 never rolls back.",
        help="Maximum number of rollbacks in a run; if another is needed, the run halts.",
    )


@dataclass
class NanConfig:
    """The action on a NaN or Inf in the loss or the gradients."""

    action: NanAction = key(
        NanAction.skip,
        help="The action on a NaN or Inf in the loss or gradients. warn: log it, and do the update"
        " all the same; skip: skip the update; rollback: go back to a checkpoint; halt (or raise):"
        " end the job with exit code 65.",
    )
    max_consecutive: int = key(
        5,
        ge=1,
        remedy="1 acts on the first bad step.",
        help="After this many bad steps (NaN or Inf) in a row, `nan.action=skip` ends the job, and"
        " `rollback` goes back to a checkpoint.",
    )
    check_gradients: bool = key(
        True,
        help="Check the norm of the gradients for NaN and Inf too, not only the loss.",
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
    timeout_s: float = key(
        60.0, gt=0, help="Seconds after which the command is killed, which counts as a failure."
    )
    action: CheckAction = key(CheckAction.warn, help="The action if the command fails.")


@dataclass
class HealthConfig:
    """Checks of the node, its GPUs and its ranks."""

    enabled: bool = key(True, help="Whether any health check runs.")
    exclude_h: float = key(
        24.0,
        gt=0,
        help="On Slurm: if a node fails a health check, the job does not start on it for this many"
        " hours. With the action `exclude_node`, the sweep's other jobs do not either.",
    )
    max_excluded_nodes: int = key(
        3,
        ge=0,
        remedy="0 never changes nodes.",
        help="On Slurm: maximum number of restarts on another node after a failed health check.",
    )
    checks: dict[str, CheckAction] = key(
        {
            "disk": CheckAction.warn,
            "shm": CheckAction.warn,
            "gpu": CheckAction.refuse,
            "ranks": CheckAction.warn,
        },
        help="The action on a failed health check: ignore | warn | refuse | exclude_node | halt."
        " ignore: the check does not run; refuse: exit with 69 and, on Slurm, start on another"
        " node; exclude_node: the sweep's other jobs avoid the node too; halt: exit with 69, no"
        " restart. A check passes if: `disk`: a file can be written and synced in the checkpoint"
        " directory (one that does not answer is only logged); `shm`: 1 GiB is free in /dev/shm;"
        " `gpu`: a matrix product is correct; `ranks`: an all-reduce returns the right sum, and all"
        " ranks see the same checkpoint directory.",
    )
    commands: dict[str, CommandCheckConfig] = key(
        {},
        help="Your own health checks, by name: `nhc: {run: [nhc, -a], timeout_s: 30, action:"
        " exclude_node}`.",
    )


@dataclass
class HangConfig:
    """A task that makes no progress. Needs a launcher of forge, on Linux."""

    action: HangAction = key(
        HangAction.warn,
        help="The action on a hang. warn: save the stacks of all ranks and log the hang; restart:"
        " do that, then kill and restart the job; halt: do that, then kill the job with exit code"
        " 70, without a restart; ignore: do not detect hangs.",
    )
    timeout_s: float | None = key(
        None,
        gt=0,
        remedy="With null, forge derives the limit from the time that steps take.",
        help="Seconds without progress that count as a hang. null: steps, saves and evaluations"
        " each have a limit, 5 times the duration of the slowest recent one, but at least 300 s.",
    )
    start_s: float = key(
        1800.0,
        gt=0,
        help="Seconds without progress before the first step that count as a hang. The limit also"
        " applies to each of the first steps, saves and evaluations, and to compilations.",
    )
    max_restarts: int | None = key(
        3,
        ge=0,
        remedy="0 means no restart, null no limit.",
        help="Maximum number of restarts after a hang. null: no limit. A job that hangs twice at"
        " the same step, without a new checkpoint in between, is not restarted.",
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
        remedy="Set it to the name of a value that you pass to run.log, or to null.",
        help="Metric of `run.log(name=…)` by which the best checkpoints are kept. null: no"
        " checkpoint is kept for its metric.",
    )
    mode: BestMode = key(
        BestMode.min, help="Whether small or large values of `best.metric` are better."
    )
    keep: int = key(
        1,
        ge=1,
        remedy="To keep none set `best.metric` to null.",
        help="How many of the best checkpoints (by `best.metric`) are kept.",
    )


@dataclass
class CheckpointConfig:
    """Where and when the state is saved."""

    dir: str = key(
        "checkpoints",
        is_filled=True,
        is_path=True,
        remedy="Name a directory, or leave the default.",
        help="Directory of the checkpoints. A relative path is in the job's own output directory.",
    )
    every_steps: int | None = key(
        None,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Steps between two periodic checkpoints. null: none are saved by steps.",
    )
    every_s: float | None = key(
        600.0,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Seconds from the last save to the next periodic one. null: none are saved by time.",
    )
    keep_last: int = key(
        3,
        ge=1,
        remedy="The newest checkpoint is always kept.",
        help="How many of the newest checkpoints are kept; older ones are deleted.",
    )
    keep_every_steps: int | None = key(
        None,
        gt=0,
        remedy="To switch it off, set it to null.",
        help="Checkpoints whose step is a multiple of this number are never deleted. The key causes"
        " no save: choose a multiple of `every_steps`. null: none are kept for that reason.",
    )
    best: BestConfig = field(default_factory=BestConfig)
    async_save: bool = key(
        False,
        help="Write checkpoints in the background while training continues. The state is copied to"
        " host memory first.",
    )
    on_pending_save: OnPendingSave = key(
        OnPendingSave.wait,
        help="The action if a periodic save is due while another is still being written in the"
        " background. wait: training waits for the earlier save; skip: the due save is left out.",
    )
    verify: Verify = key(
        Verify.full,
        help="The check before a checkpoint is loaded. full: all checksums; size: only that"
        " the files exist with their sizes; none: nothing. With `size` and `none`, corrupted bytes"
        " are loaded without an error.",
    )


@dataclass
class Policy:
    """The settings under `resilience` in a config: one field for each key or group of keys.

    `Policy()` has the defaults. With `enabled=False`, forge handles no signals, saves nothing and
    resumes nothing. docs/reference/policy.md describes every key.
    """

    enabled: bool = key(
        True,
        help="Whether forge is active. false: `forge.Run` is a plain loop that handles no signals,"
        " saves nothing and resumes nothing.",
    )
    resume: Resume = key(
        Resume.same,
        help="Whether a job can resume with another config. same: no; a start with other overrides,"
        " or another `config=` of forge.Run, is refused (exit code 78), and changes of YAML files"
        " are not applied. changed: yes; the checkpoint's hyperparameters are kept, and what"
        " differs is logged. Overrides of keys of `resilience` are always applied.",
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
        help="sbatch options of this job; each replaces the option of that name in"
        " `hydra.launcher`. null: the option of `hydra.launcher`. Each can be swept:"
        " `resilience.slurm.timeout_min=60,240`.",
    )

    @property
    def stop_s(self) -> float:
        """Seconds from the stop signal to the exit of the process; 0: no limit.

        The rest of the step, the save and the callbacks have to fit. A process that takes longer is
        ended with exit code 70.
        """
        given = self.shutdown.timeout_s
        return STOP_SHARE * self.signal.warning_s if given is None else given
