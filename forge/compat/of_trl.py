"""Private parts of TRL, whose trainers are subclasses of transformers' Trainer."""

from __future__ import annotations

from typing import Any


def logged_attributes(trainer: Any) -> list[str]:
    """The attributes in which a trainer of TRL collects what it logs.

    If it goes: see from what `SFTTrainer.log` computes the values that it adds.
    """
    return [name for name in ("_metrics", "_total_train_tokens") if hasattr(trainer, name)]


def keeps_batches(trainer: Any) -> bool:
    """Whether a trainer of TRL uses generated batches in several steps.

    If it goes: see where `GRPOTrainer._prepare_inputs` keeps generated batches.
    """
    return hasattr(trainer, "_buffered_inputs")
