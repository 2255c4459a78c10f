"""A rollback: back to a checkpoint before the first bad step, in this attempt or the next.

Afterwards the learning rate is that of the schedule, times `nan.rollback.lr_scale`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from forge import messages
from forge.checkpoint.reading import Checkpoint
from forge.data.position import Position
from forge.process import sections
from forge.process.progress import Phase
from forge.state import rng
from forge.training.decide import Halt
from forge.training.loop.loop_state import LoopState
from forge.training.nan.nan_policy import NanPolicy
from forge.training.parts import Parts
from forge.training.saver import SaveCause


class Rollback:
    """Rolls back, configured by `nan.rollback`."""

    def __init__(self, parts: Parts) -> None:
        self._config = parts.policy.nan.rollback
        self._loops = parts.loops
        self._train_state = parts.train_state
        self._directory = parts.directory
        self._saver = parts.saver
        self._nan = parts.nan
        self._shutdown = parts.shutdown

    def do(self, position: Position | None, first_bad: int) -> None:
        """Go back to the newest good checkpoint far enough before the first bad step."""
        with sections.current().inside(Phase.start_up, "rollback"):
            self._go_back(position, first_bad)

    def _go_back(self, position: Position | None, first_bad: int) -> None:
        self._directory.store.on_all("the save before a rollback", self._saver.wait)
        at_most = first_bad - self._config.steps_back
        found = self._train_state.rollback_target(at_most)
        state = LoopState.of(found.state) if found is not None else None
        if found is None or state is None or len(state.positions) != self._loops.number + 1:
            text = (
                f"Step {first_bad} is bad, but there is no good checkpoint of this loop up to step"
                f" {at_most}, to which a rollback could go"
            )
            self._shutdown.halt(Halt(text))
        nan, bad_step = self._nan.state_dict(), self._loops.step
        self._directory.metrics.flush()
        if not self._loops.is_in_pass_of(state):
            self._by_restart(found, first_bad)
        loaders = self._loops.loaders.capture()
        self._train_state.load(found)
        if self._config.skip_data:
            self._loops.loaders.load(loaders)
        self._nan.load_state_dict(nan)  # budgets are not rolled back
        self._nan.rolled_back()
        saved = state.positions[-1]
        if position is not None and saved is not None and not self._config.skip_data:
            position.load(saved)
        rng.restore(state.rng)
        self._directory.store.discard_after(self._loops.step)
        self._saver.count_from(self._loops.step)
        self._directory.ledger.progress(self._loops.step, self._loops.planned)
        summary = self._directory.metrics.summary()
        steps = {"step": self._loops.step, "first_bad": first_bad, "from_step": bad_step}
        self._directory.ledger.write("rollback", **steps, summary=summary)
        messages.warn(
            f"Rolled back from step {bad_step} to step {self._loops.step} (rollback"
            f" {self._nan.rollbacks} of at most {self._config.max_rollbacks}). The learning rate is"
            f" now {self._nan.lr_scale:g} times that of the schedule."
        )

    def _by_restart(self, found: Checkpoint, first_bad: int) -> NoReturn:
        """Roll back by a restart: to an earlier pass, or in a loop that forge does not own."""
        step, bad_step = found.manifest.step, self._loops.step
        found.fill()  # load its tensors into the live ones
        self._nan.rolled_back()
        self._directory.store.discard_after(step)
        self._saver.evaluated(step)
        state = found.state | {"nan": self._nan.state_dict()}
        self._saver.save(step, lambda: state, SaveCause.requested)
        self._saver.wait()
        self._directory.ledger.write("rollback", step=step, first_bad=first_bad, from_step=bad_step)
        again = "; the batches since then are trained on again" if self._config.skip_data else ""
        self._shutdown.restart(f"rollback to step {step}, in a new attempt{again}")


class RateScale:
    """Multiplies the learning rate during each optimizer step, whichever schedule sets it."""

    def __init__(self, policy: NanPolicy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._rates: list[Any] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._rates = []
        if self._policy.lr_scale != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._policy.lr_scale

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
