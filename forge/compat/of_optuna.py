"""Private parts of Optuna: a trial that another process has begun."""

from __future__ import annotations

from typing import Any


def continued(study: Any, trial: Any) -> Any:
    """A trial of the study that is running, to go on with it; its parameters stay.

    If it goes: tell such trials as failed, and enqueue their parameters with
    `study.enqueue_trial`; the study then has a failed trial for each restart.
    """
    import optuna

    return optuna.trial.Trial(study, trial._trial_id)


def is_in_memory(study: Any) -> bool:
    """Whether the study ends with the process.

    If it goes: return False; a restart of such a script then begins again.
    """
    import optuna

    return isinstance(study._storage, optuna.storages.InMemoryStorage)
