"""Sweepers of others: what they lose if their launcher is killed is named at the start."""

from __future__ import annotations

from typing import Any

from forge import messages


def check(sweeper: Any) -> None:
    """Warn of options of Hydra's Optuna sweeper with which a sweep cannot be resumed.

    Args:
        sweeper: The config `hydra.sweeper`.
    """
    if "hydra_optuna_sweeper" not in str(sweeper.get("_target_")):
        return
    sampler, storage = sweeper.get("sampler") or {}, sweeper.get("storage")
    if "seed" in sampler and sampler["seed"] is None:
        messages.warn(
            "`hydra.sweeper.sampler.seed=null`: if this launcher is killed, the same command draws"
            " other parameters, and trains with those. Set a seed"
        )
    if isinstance(storage, str):
        messages.warn(
            f"`hydra.sweeper.storage={storage}`: if this launcher is killed, the same command adds"
            " the trials a second time, and some stay RUNNING. Set `hydra.sweeper.storage` to"
            f" {{_target_: forge.integrations.optuna.Storage, url: {storage}}}"
        )
