"""`Run`: a `forge.Run` of everything that an Accelerator has prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import forge
from forge.integrations.refusal import missing, refuse

try:
    from forge.compat import of_accelerate
    from forge.integrations import prepared_loaders
    from forge.integrations.prepared_loaders import Passes, PreparedLoader
except ImportError as error:
    raise missing("accelerate", "accelerate", error) from error


class AcceleratedRun(forge.Run):
    """A `forge.Run` of everything that an Accelerator has prepared.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with forge.integrations.accelerate.AcceleratedRun(cfg.resilience, accelerator) as run:
            for epoch in run.epochs(3):
                for step, batch in run.batches(loader):
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_fn(model, batch))
                        optimizer.step()
                        optimizer.zero_grad()

    Make it after the last `accelerator.prepare` and `accelerator.register_for_checkpointing`: all
    models, optimizers, schedules and registered objects are saved.

    Args:
        policy: As for `forge.Run`.
        accelerator: An `accelerate.Accelerator`.
        name: As for `forge.Run`.
        config: As for `forge.Run`.
        stateful: Further objects to save, by name.
    """

    def __init__(
        self,
        policy: Any,
        accelerator: Any,
        /,
        *,
        name: str | None = None,
        config: Any = None,
        **stateful: Any,
    ) -> None:
        self._num_processes = accelerator.num_processes
        objects: dict[str, Any] = dict(of_accelerate.prepared(accelerator))
        objects["passes"] = [Passes(one) for one in of_accelerate.loaders(accelerator)]
        if accelerator.scaler is not None:
            objects["scaler"] = accelerator.scaler
        # Made here, and not in the loop: forge restores the state of loaders that exist before it.
        self._prepared = [PreparedLoader(one) for one in of_accelerate.loaders(accelerator)]
        super().__init__(
            policy, name=name, config=config, accelerator=accelerator, **objects, **stateful
        )

    def _read(self, loader: Any) -> Any:
        """The loader with a place, for a loader that Accelerate has prepared."""
        if not prepared_loaders.is_prepared(loader):
            return loader
        if found := prepared_loaders.problems(loader, self._num_processes):
            refuse("The data of this Run", found)
        known = (one for one in self._prepared if one.is_of(loader))
        return next(known, None) or PreparedLoader(loader)

    def steps(self, n: int | None, *loaders: Iterable[Any]) -> Iterator[Any]:
        """As `forge.Run.steps`."""
        return super().steps(n, *map(self._read, loaders))

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """As `forge.Run.batches`."""
        return super().batches(self._read(loader))
