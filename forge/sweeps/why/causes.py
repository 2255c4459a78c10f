"""The causes that `forge why` finds; docs/how-to/watch-a-sweep.md has a line about each of them."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """Why a job ended, waits, starts again or saved nothing. `--json` prints the value."""

    # The job goes on, or has finished.
    finished = "finished"
    running = "running"
    starting = "starting"
    nothing_saved_yet = "nothing_saved_yet"
    save_failed = "save_failed"
    not_started = "not_started"
    pending = "pending"

    # The user's code and config.
    exception = "exception"
    exit_code = "exit_code"
    code_changed = "code_changed"
    config = "config"
    halted = "halted"
    no_run = "no_run"

    # Signals, and the time that a stop takes.
    time_limit = "time_limit"
    signal_missed = "signal_missed"
    save_too_long = "save_too_long"
    stopped_late = "stopped_late"

    # The machine, its memory and disks, other processes.
    out_of_memory = "out_of_memory"
    disk_full = "disk_full"
    checkpoints = "checkpoints"
    directory_in_use = "directory_in_use"
    killed = "killed"
    lost = "lost"
    hung = "hung"
    rank_lost = "rank_lost"
    unhealthy = "unhealthy"

    # The cluster, and people.
    preempted = "preempted"
    node_failed = "node_failed"
    requested = "requested"
    signalled = "signalled"
    cancelled = "cancelled"
    interrupted = "interrupted"
    orphaned = "orphaned"
    not_requeued = "not_requeued"

    # Why the job is not started again.
    budget = "budget"
    no_progress = "no_progress"
    requeue_disabled = "requeue_disabled"
    unknown = "unknown"
