"""The resilience policy: typed keys, their defaults, and every rule between them.

`load` turns whatever Hydra composed (or a plain dict) into a `Policy`, once. It reports all
problems together: unknown keys with the nearest known one, wrong types, values out of range, and
rules that span several keys. `conf/resilience/default.yaml` repeats the defaults for Hydra; a test
holds the two equal. One module, since it is read as one page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forge.config import removed


class SignalAction(Enum):
    """What a signal makes the run do at its next step boundary."""

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
    """What a failed health check leads to."""

    ignore = "ignore"
    """It is not made."""
    warn = "warn"
    """It is logged."""
    refuse = "refuse"
    """The job leaves this node (69)."""
    exclude_node = "exclude_node"
    """The same, and on Slurm the sweep's other jobs avoid the node as well."""
    halt = "halt"
    """The job ends (69), and is not started again."""


class HangAction(Enum):
    """What a hang leads to."""

    ignore = "ignore"
    """Nobody looks for one."""
    warn = "warn"
    """The stacks of all ranks are kept, and it is logged."""
    restart = "restart"
    """The same; then the job is ended and started again, within `hang.max_restarts`."""
    halt = "halt"
    """The same; then the job is ended (70), and is not started again."""


class WhenBusy(Enum):
    """What a periodic save does while the one before it is still being written."""

    wait = "wait"
    skip = "skip"


class Verify(Enum):
    """What of a checkpoint is checked before it is loaded."""

    full = "full"
    """The checksums of all its bytes, before anything live is overwritten."""
    size = "size"
    """That its files are there, with their sizes: a large checkpoint is read once, not twice."""
    none = "none"
    """Only what loading needs."""


STOP_SHARE = 0.75
"""The forced exit comes this part of the lead after the signal, where nothing else is set."""


class Resume(Enum):
    """Whose checkpoints a job resumes from."""

    same = "same"
    """Its own: of the same program, Run's name and config."""
    changed = "changed"
    """Those of another config, too: what differs is applied, and logged."""


@dataclass
class SignalConfig:
    """Which signals stop a job, and how early."""

    name: str = "USR2"
    """The signal that announces the time limit."""
    lead_s: float = 120.0
    """How many seconds before the time limit it is sent."""
    actions: dict[str, SignalAction] = field(
        default_factory=lambda: {
            "TERM": SignalAction.stop,
            "INT": SignalAction.stop,
            "HUP": SignalAction.stop,
            "USR1": SignalAction.requeue,
            "USR2": SignalAction.requeue,
        }
    )
    """What each signal leads to: stop, requeue, save (and keep training) or ignore.

    SIGHUP and SIGINT stay ignored if they are ignored when the process starts (nohup, the
    background of a script) and their action is stop.
    """


@dataclass
class ShutdownConfig:
    """How long stopping may take."""

    timeout_s: float | None = None
    """Seconds from the signal to the forced exit (70); null: three quarters of `signal.lead_s`; 0:
    never."""


@dataclass
class RequeueRule:
    """Your own exit codes that are worth another start."""

    exit_codes: list[int] = field(default_factory=list)
    """Which codes, 1 to 255; an uncaught exception is 1."""
    max_restarts: int = 1
    """How often, over the whole job."""
    recover: list[str] = field(default_factory=list)
    """A command that is run before the restart; none: nothing is. Its environment has
    FORGE_ATTEMPT, FORGE_RETURN_CODE and FORGE_JOB_DIR."""


@dataclass
class RequeueConfig:
    """When a stopped job is started again, in its directory."""

    enabled: bool = True
    """false: the job is started once, however it ends; a batch script may requeue it by itself."""
    max_preemptions: int | None = None
    """Restarts after a preemption or a request to requeue; null: no limit."""
    max_timeouts: int | None = None
    """Restarts after the time limit; null: no limit."""
    max_failures: int | None = 10
    """Restarts after a crash, a kill or a forced exit; null: no limit."""
    no_progress_limit: int = 3
    """Give up after this many attempts in a row that saved nothing new."""
    rules: list[RequeueRule] = field(default_factory=list)
    """Your own exit codes that are worth another start: `[{exit_codes: [1], max_restarts: 2}]`;
    with `recover: [command, …]` that command runs first."""
    on_code_change: CodeChange = CodeChange.warn
    """What happens when a job resumes with edited code."""


class SignalTo(Enum):
    """Who gets the signals for a command of `forge exec`."""

    group = "group"
    """Its whole process group."""
    leader = "leader"
    """The process that was started, alone: it tells the others."""


class ZeroAfterSignal(Enum):
    """What exit code 0 means, from a command that was asked to stop."""

    requeue = "requeue"
    """It has saved, and is run again where the stop was a preemption or the time limit."""
    finished = "finished"
    """It has come to its end."""


@dataclass
class ExecConfig:
    """How a command of `forge exec` is stopped."""

    signal: str = "TERM"
    """The signal that tells the command to save and leave: `signal.lead_s` before the time limit,
    and where the job is stopped. It takes the place of `signal.name`."""
    signal_to: SignalTo = SignalTo.group
    """Who gets signals: the command's process group, or only the process that was started."""
    supports_termination: bool = True
    """true: the signal, then SIGKILL after `shutdown.timeout_s`; false: SIGKILL at once."""
    zero_after_signal: ZeroAfterSignal = ZeroAfterSignal.requeue
    """What exit code 0 means after a signal for a preemption or the time limit."""


@dataclass
class RollbackConfig:
    """Where `nan.action=rollback` goes back to."""

    steps_back: int = 0
    """Go back at least this many steps before the first bad one."""
    skip_data: bool = True
    """Skip the batches that led there, through the last bad one; a rollback into an earlier epoch
    of `run.epochs` reads them again."""
    lr_scale: float = 1.0
    """Multiplies the learning rate at each rollback."""
    max_rollbacks: int = 3
    """Halt at the next one after this many."""


@dataclass
class NanConfig:
    """What a NaN or Inf in the loss or the gradients leads to."""

    action: NanAction = NanAction.skip
    """Log it and update (warn), skip the update, roll back, or halt (synonym: raise)."""
    max_consecutive: int = 5
    """Bad steps in a row until skip halts the run and rollback goes back."""
    check_gradients: bool = True
    """Check the norm of the gradients, too, not only the loss."""
    rollback: RollbackConfig = field(default_factory=RollbackConfig)


@dataclass
class CommandCheckConfig:
    """A site's own health check: a command."""

    run: list[str] = field(default_factory=list)
    """The command and its arguments; it fails with any exit code but 0, and its last line says
    why."""
    timeout_s: float = 60.0
    """Seconds after which it is killed, and has failed."""
    action: CheckAction = CheckAction.warn
    """What its failure leads to."""


@dataclass
class HealthConfig:
    """Checks of the node, its GPUs and its ranks."""

    enabled: bool = True
    """false: nothing is checked."""
    every_s: float | None = 300.0
    """How often `disk` (without writing), `shm`, `gpu_memory`, `gpu_driver` and the commands are
    repeated in the background; null: never."""
    exclude_h: float = 24.0
    """On Slurm: hours for which a job avoids a node that it has left because of a check, and for
    which the sweep's other jobs do where the action was `exclude_node`."""
    max_excluded_nodes: int = 3
    """On Slurm: restarts elsewhere because a check of this very job failed; then the job fails."""
    checks: dict[str, CheckAction] = field(
        default_factory=lambda: {
            "disk": CheckAction.refuse,
            "shm": CheckAction.warn,
            "gpu": CheckAction.refuse,
            "gpu_memory": CheckAction.warn,
            "gpu_driver": CheckAction.warn,
            "ranks": CheckAction.warn,
        }
    )
    """What a failure of each check leads to: ignore, warn, refuse, exclude_node or halt."""
    commands: dict[str, CommandCheckConfig] = field(default_factory=dict)
    """Your own checks, by name: `nhc: {run: [nhc, -a], timeout_s: 30, action: exclude_node}`."""


@dataclass
class HangConfig:
    """A task that makes no progress. Below one of forge's launchers, on Linux."""

    action: HangAction = HangAction.warn
    """What it leads to."""
    timeout_s: float | None = None
    """Seconds without progress; null: 5 times the slowest recent step, save or evaluation, and at
    least 300 s."""
    start_s: float = 1800.0
    """Seconds from entering `forge.Run` to the first step, and for each of the
    first steps, saves and evaluations, and compilations: nothing is learned from those."""
    max_restarts: int | None = 3
    """Restarts after a hang; null: no limit. The same hang at the same step twice ends the job."""


class BestMode(Enum):
    """Which values of a metric are good ones."""

    min = "min"
    max = "max"


@dataclass
class BestConfig:
    """Checkpoints that are kept because a logged metric was good."""

    metric: str | None = None
    """Keep the best checkpoints by this metric, `run.log(name=…)`, permanently; null: none."""
    mode: BestMode = BestMode.min
    """Whether small or large values are better."""
    keep: int = 1
    """How many of the best are kept."""


@dataclass
class CheckpointConfig:
    """Where and when the state is saved."""

    dir: str = "checkpoints"
    """Where checkpoints go; a relative path is in the job's own output directory."""
    every_steps: int | None = 1000
    """Save after this many steps; null: not by steps."""
    every_s: float | None = 600.0
    """Save this many seconds after the last save; null: not by time."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    keep_every_steps: int | None = None
    """Keep checkpoints at multiples of this permanently; null: none."""
    best: BestConfig = field(default_factory=BestConfig)
    async_save: bool = False
    """Write in the background, while training continues."""
    when_busy: WhenBusy = WhenBusy.wait
    """What a periodic save does while another is still being written in the background."""
    verify: Verify = Verify.full
    """What of a checkpoint is checked before it is loaded. With `size` and `none` changed bytes are
    loaded silently."""
    init_from: str | None = None
    """A `torch.save` or Lightning file, or a checkpoint, that a new job starts from. A relative
    path is relative to where the command was started."""
    init_trust_pickle: bool = False
    """true: read that file even if that executes code in it."""


@dataclass
class SlurmConfig:
    """A job's own sbatch options; null: the value of `hydra.launcher`."""

    timeout_min: float | None = None
    """Time limit of each start, in minutes."""
    partition: str | None = None
    """Partition."""
    qos: str | None = None
    """Quality of service."""
    account: str | None = None
    """The account that is charged."""
    nodes: int | None = None
    """Number of nodes."""
    tasks_per_node: int | None = None
    """Tasks on each node."""
    cpus_per_task: int | None = None
    """Cores for each task."""
    gpus_per_node: int | None = None
    """GPUs on each node."""
    gpus_per_task: int | None = None
    """GPUs for each task."""
    mem_gb: float | None = None
    """Memory on each node, in GB."""
    gres: str | None = None
    """Generic resources, as in sbatch: gpu:a100:2."""
    constraint: str | None = None
    """Features that the nodes must have."""
    exclude: str | None = None
    """Nodes to avoid."""
    nodelist: str | None = None
    """Nodes to use."""
    dependency: str | None = None
    """Jobs to wait for: afterok:123."""


@dataclass
class Policy:
    """Everything declared under `resilience`."""

    enabled: bool = True
    """false: a plain loop; nothing is handled, saved or resumed."""
    resume: Resume = Resume.same
    """Whose checkpoints are resumed from; changed: those of another config, too, and what differs
    is applied."""
    signal: SignalConfig = field(default_factory=SignalConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    exec: ExecConfig = field(default_factory=ExecConfig)
    nan: NanConfig = field(default_factory=NanConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def stop_s(self) -> float:
        """Seconds from a signal to the forced exit; 0 never forces."""
        given = self.shutdown.timeout_s
        return STOP_SHARE * self.signal.lead_s if given is None else given


def __getattr__(name: str) -> Any:
    """The classes that are gone: a pickled policy of an earlier version names them."""
    if name in removed.CLASSES:
        return removed.Pickled
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
