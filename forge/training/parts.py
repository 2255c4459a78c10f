"""The objects of an attempt that its loops and step boundaries use."""

from __future__ import annotations

from dataclasses import dataclass

from forge.config.schema import Policy
from forge.group.group import Coordinator, Exchange
from forge.shutdown.signal_handler import ShutdownHandler
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater
from forge.training.saver import Saver
from forge.training.shutdown import Shutdown
from forge.training.start.attempt_io import AttemptIO
from forge.training.train_state import TrainState
from forge.training.watchers import StopWatcher, Watchers


@dataclass(frozen=True)
class Parts:
    """Made once, by `Attempt._make_ready`: the directory is claimed, the checkpoint is loaded."""

    policy: Policy
    group: Coordinator
    """All ranks; they do the same at the same boundary."""
    exchange: Exchange
    loops: LoopProgress
    train_state: TrainState
    directory: AttemptIO
    """Checkpoints, metrics and the ledger."""
    saver: Saver
    nan: NanPolicy
    updater: Updater
    evaluations: Evaluations
    """The functions of `run.every`."""
    handler: ShutdownHandler
    stops: StopWatcher
    shutdown: Shutdown
    watchers: Watchers
