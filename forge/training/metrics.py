"""Logged values: kept on their device until a suitable moment, then written to the ledger."""

from __future__ import annotations

import time
from typing import Any

import torch

from forge.group.requests import Watcher
from forge.jobdir.ledger_writer import Ledger

_MAX_PENDING = 50
_MAX_AGE_S = 1.0


class Metrics(Watcher):
    """Collects values without a host synchronisation; `flush` reads all with one per device."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._flushed = time.monotonic()
        self._step = -1
        self.num_complete = 0
        """Steps whose values are all in the ledger; a logger's thread reads it."""
        self._latest: dict[str, tuple[int, float]] = {}
        self._extremes: dict[str, list[float]] = {}
        """Name -> the lowest value and its step, the highest value and its step."""

    def on_step(self, step: int) -> None:
        """Values logged from now on belong to this step."""
        self._step = step

    def log(self, values: dict[str, Any]) -> None:
        """Record values of the current step, as `checked_values` returns them."""
        if values:
            self._pending.append((self._step, values))

    on_loop_end = on_step

    def on_evaluation(self, step: int) -> None:
        """Values that functions of `run.every` log belong to the last step done."""
        self._step = step - 1

    def on_boundary(self, step: int) -> None:
        """Write the pending values if there are many, or if they are old."""
        if self._pending and (
            len(self._pending) >= _MAX_PENDING or time.monotonic() - self._flushed >= _MAX_AGE_S
        ):
            self.flush()
        if not self._pending:
            self.num_complete = step - 1  # the evaluations of this boundary are still to come

    def flush(self) -> None:
        """Write the pending values."""
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        for _, values in pending:
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(value.device, []).append(value)
        numbers = {device: _to_host(some) for device, some in tensors.items()}
        for step, values in pending:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[name] = next(numbers[value.device])
                self._latest.pop(name, None)  # the metric that was logged last comes last
                self._latest[name] = (step, values[name])
                self._widen(name, step, values[name])
        self._ledger.write_all("metrics", ({"step": s, "values": v} for s, v in pending))

    def latest(self) -> dict[str, tuple[int, float]]:
        """Name -> the last step that logged it, and the value; only values already on the host."""
        found = dict(self._latest)
        for step, values in self._pending:
            found |= {k: (step, v) for k, v in values.items() if isinstance(v, float)}
        return found

    def _widen(self, name: str, step: int, value: float) -> None:
        """Take a value into account; NaN is neither the lowest nor the highest."""
        own = self._extremes.setdefault(name, [value, step, value, step])
        if not own[0] <= value:
            own[:2] = [value, step] if value == value else own[:2]
        if not own[2] >= value:
            own[2:] = [value, step] if value == value else own[2:]

    def summary(self) -> dict[str, list[float]]:
        """Name -> last value and step, lowest and step, highest and step, over all attempts.

        The metric that was logged last comes last.
        """
        latest, extremes = dict(self._latest), dict(self._extremes)
        return {name: [value, step, *extremes[name]] for name, (step, value) in latest.items()}

    def capture(self) -> dict[str, Any]:
        """The values for a checkpoint."""
        return {"metrics": self.latest(), "extremes": {k: [*v] for k, v in self._extremes.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the values from a checkpoint; one of an earlier version has no extremes."""
        self.num_complete = 0
        self._latest = dict(state["metrics"])
        known = state.get("extremes", {})
        self._extremes = {
            name: [*known.get(name, (value, step, value, step))]
            for name, (step, value) in self._latest.items()
        }


def is_on_host(value: torch.Tensor) -> bool:
    """Whether the value can be read without waiting for a device."""
    return value.device.type == "cpu"


def _to_host(tensors: list[torch.Tensor]) -> Any:
    """The tensors' values, one by one; float64 represents every smaller type exactly."""
    values: list[float] = torch.stack([t.double().reshape(()) for t in tensors]).tolist()
    return iter(values)


def checked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values as they are logged: numbers, and copies of tensors that are not on the host.

    Raises:
        TypeError: If a value is neither a number nor a tensor of one element.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            # A copy: the logged value must not change when the tensor is reused.
            taken[name] = float(value.item()) if is_on_host(value) else value.detach().clone()
        elif hasattr(value, "__float__") and not isinstance(value, torch.Tensor):
            taken[name] = float(value)
        else:
            raise TypeError(
                f"run.log({name}=…): expected a number or a tensor of one element, found"
                f" {type(value).__name__}"
                + (f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "")
            )
    return taken
