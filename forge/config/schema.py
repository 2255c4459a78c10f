"""The resilience policy: typed keys, their defaults, and every rule between them.

`load` turns whatever Hydra composed (or a plain dict) into a `Policy`, once. It reports all
problems together: unknown keys with the nearest known one, wrong types, values out of range, and
rules that span several keys. `conf/resilience/default.yaml` repeats the defaults for Hydra; a test
holds the two equal. This module imports OmegaConf, never torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


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


class HealthCheck(Enum):
    """A check of this node before training starts."""

    disk = "disk"
    """The checkpoint directory takes a synced file and has `min_free_gib` left."""
    gpu = "gpu"
    """Every visible CUDA device computes and allocates; passes where there is none."""


class HealthAction(Enum):
    """What a failed health check leads to."""

    warn = "warn"
    refuse = "refuse"


class WhenBusy(Enum):
    """What a periodic save does while the one before it is still being written."""

    wait = "wait"
    skip = "skip"


class Verify(Enum):
    """How much of a checkpoint is checked before it is trusted."""

    full = "full"
    size = "size"
    none = "none"


class OnForeign(Enum):
    """What to do with a checkpoint that somebody else owns, or may write to."""

    ignore = "ignore"
    warn = "warn"
    refuse = "refuse"


STOP_SHARE = 0.75
"""The forced exit comes this part of the lead after the signal, where nothing else is set."""


class Resume(Enum):
    """Whose checkpoints a job resumes from."""

    same = "same"
    """Its own: of the same program, Run's name and config."""
    changed = "changed"
    """Those that are there; what differs is taken on, and said."""


@dataclass
class SignalConfig:
    """Which signals stop a job, and how early."""

    name: str = "USR2"
    """Signal that the launcher sends before the time limit."""
    lead_s: float = 120.0
    """Seconds before the time limit at which it is sent."""
    actions: dict[str, SignalAction] = field(
        default_factory=lambda: {
            "TERM": SignalAction.stop,
            "INT": SignalAction.stop,
            "HUP": SignalAction.stop,
            "USR1": SignalAction.requeue,
            "USR2": SignalAction.requeue,
        }
    )
    """What each signal leads to: stop | requeue | save | ignore.

    A process that ignores SIGHUP or SIGINT as it begins (nohup, the background of a script) keeps
    ignoring it where the action is stop.
    """


@dataclass
class ShutdownConfig:
    """How long stopping may take."""

    timeout_s: float | None = None
    """Seconds from the signal to the forced exit with code 70; 0 never forces; null: three quarters
    of `signal.lead_s`. What holds is `Policy.stop_s`."""


@dataclass
class RequeueRule:
    """Exit codes of the user's own that are worth another start."""

    exit_codes: list[int] = field(default_factory=list)
    """Which codes, 1 to 255; an uncaught exception is 1."""
    max_restarts: int = 1
    """How often, over the whole job."""


@dataclass
class RequeueConfig:
    """When a stopped job is started again, in its directory."""

    enabled: bool = True
    """false: a job runs once, whatever ends it."""
    max_preemptions: int | None = None
    """Restarts after a preemption or a request to requeue; null: no limit."""
    max_timeouts: int | None = None
    """Restarts after the time limit; null: no limit."""
    max_failures: int | None = 10
    """Restarts after a crash, a kill or a forced exit; null: no limit."""
    no_progress_limit: int = 3
    """Give up after this many attempts in a row that saved nothing new."""
    max_unfair: int = 10
    """Restarts in a row of attempts that the cluster ended before they could save anything."""
    rules: list[RequeueRule] = field(default_factory=list)
    """Exit codes of the user's code that are worth another start, and how often."""
    on_code_change: CodeChange = CodeChange.warn
    """When the code changed since the job was first started: warn | refuse."""


@dataclass
class RollbackConfig:
    """Where `nan.action=rollback` goes back to."""

    steps_back: int = 0
    """Go back at least this many steps before the first bad step."""
    skip_data: bool = True
    """Do not see again the batches from there through the last bad one."""
    lr_scale: float = 1.0
    """Multiply the learning rate by this at each rollback."""
    max_rollbacks: int = 3
    """Halt instead of rolling back once more than this often."""


@dataclass
class NanConfig:
    """What a NaN or Inf in the loss or the gradients leads to."""

    action: NanAction = NanAction.skip
    """warn (say so, update all the same) | skip | rollback | halt (synonym: raise)."""
    max_consecutive: int = 5
    """This many bad steps in a row: skip halts the run, rollback goes back."""
    check_gradients: bool = True
    """Look at the gradients' norm as well as at the loss."""
    rollback: RollbackConfig = field(default_factory=RollbackConfig)


@dataclass
class HealthConfig:
    """Checks of the node, before the first step."""

    checks: list[HealthCheck] = field(default_factory=lambda: [HealthCheck.disk, HealthCheck.gpu])
    """Which checks run: disk, gpu."""
    action: HealthAction = HealthAction.refuse
    """A failed check: warn | refuse (exit code 69)."""
    timeout_s: float = 60.0
    """A check that takes longer has failed."""
    min_free_gib: float = 0.0
    """GiB that must be free where checkpoints go."""
    max_excluded_nodes: int = 3
    """On a cluster: restarts elsewhere, because this node failed a check; then the job fails."""


class BestMode(Enum):
    """Which values of a metric are good ones."""

    min = "min"
    max = "max"


@dataclass
class BestConfig:
    """Checkpoints that are kept because a logged metric was good."""

    metric: str | None = None
    """Its name in `run.log(name=…)`; null: none are kept for that."""
    mode: BestMode = BestMode.min
    """min: small values are good | max."""
    keep: int = 1
    """Keep this many of the best."""


@dataclass
class CheckpointConfig:
    """Where and when the state is saved."""

    dir: str = "checkpoints"
    """Directory; a relative one lies in the job's own output directory."""
    every_steps: int | None = 1000
    """Save after this many steps; null: not by steps."""
    every_s: float | None = 600.0
    """Save when this many seconds passed since the last save; null: not by time."""
    keep_last: int = 3
    """Keep this many of the newest checkpoints."""
    keep_every_steps: int | None = None
    """Keep those at multiples of this many steps permanently."""
    best: BestConfig = field(default_factory=BestConfig)
    async_save: bool = False
    """Copy the state to host memory and write it beside training."""
    when_busy: WhenBusy = WhenBusy.wait
    """A periodic save, while one is still being written beside training: wait | skip."""
    verify: Verify = Verify.full
    """Before a checkpoint is trusted, check: full (checksums) | size | none."""
    on_foreign: OnForeign = OnForeign.warn
    """Others than this user and root own or may write what is read: ignore | warn | refuse."""
    init_from: str | None = None
    """A job without a checkpoint of its own begins with the state in this file or checkpoint: of
    torch.save, of Lightning, or forge's. A relative path begins where the command was started."""
    init_trust_pickle: bool = False
    """true: read that file even if it holds code, which is then executed."""


@dataclass
class SlurmConfig:
    """A job's own options for sbatch; null: as `hydra.launcher` has it for all jobs."""

    timeout_min: float | None = None
    """Time limit of one start in minutes."""
    partition: str | None = None
    """Partition."""
    qos: str | None = None
    """Quality of service."""
    account: str | None = None
    """Account that pays."""
    nodes: int | None = None
    """Number of nodes."""
    tasks_per_node: int | None = None
    """Tasks on each node."""
    cpus_per_task: int | None = None
    """Cores of each task."""
    gpus_per_node: int | None = None
    """GPUs on each node."""
    gpus_per_task: int | None = None
    """GPUs of each task."""
    cpus_per_gpu: int | None = None
    """Cores for each GPU."""
    mem_gb: float | None = None
    """Memory on each node in GB."""
    mem_per_cpu: str | None = None
    """Memory for each core, as sbatch has it: 4G."""
    mem_per_gpu: str | None = None
    """Memory for each GPU."""
    gres: str | None = None
    """Generic resources: gpu:a100:2."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclude: str | None = None
    """Nodes that are not to be used."""
    nodelist: str | None = None
    """Nodes that have to be used."""
    dependency: str | None = None
    """Jobs to wait for: afterok:123."""
    comment: str | None = None
    """A comment, for whoever reads the queue."""


@dataclass
class Policy:
    """Everything declared under `resilience`."""

    enabled: bool = True
    """false: a plain loop; nothing is handled, saved or resumed."""
    resume: Resume = Resume.same
    """From checkpoints of a job with another config: same (refuse) | changed (take it on)."""
    signal: SignalConfig = field(default_factory=SignalConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    nan: NanConfig = field(default_factory=NanConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def stop_s(self) -> float:
        """Seconds from a signal to the forced exit; 0 never forces."""
        given = self.shutdown.timeout_s
        return STOP_SHARE * self.signal.lead_s if given is None else given
