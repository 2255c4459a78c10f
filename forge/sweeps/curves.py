"""The curves of a job's metrics over all of its attempts, thinned; repeated steps count once.

The ledgers are read line by line, so that a long training needs little memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from forge.jobdir import jsonl, ledger_writer


@dataclass
class Curve:
    """The values of a metric, by increasing steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a value; one of the same step replaces the one before."""
        if self.steps and self.steps[-1] >= step:
            self.forget(step)
        self.steps.append(step)
        self.values.append(value)

    def forget(self, step: int) -> None:
        """Drop the values of this step and later ones."""
        end = bisect_left(self.steps, step)
        del self.steps[end:]
        del self.values[end:]

    def thinned(self, most: int) -> Curve:
        """At most so many points: the lowest and the highest of each range of steps."""
        if len(self.steps) <= most or most < 2:
            return self
        found = Curve()
        num_ranges = most // 2
        for number in range(num_ranges):
            begin = number * len(self.steps) // num_ranges
            end = (number + 1) * len(self.steps) // num_ranges
            own = range(begin, end)
            low = min(own, key=self.values.__getitem__)
            high = max(own, key=self.values.__getitem__)
            for at in sorted({low, high}):
                found.add(self.steps[at], self.values[at])
        return found


def read(directory: Path, names: Collection[str]) -> dict[str, Curve]:
    """The curves of these metrics of the job in a directory, of the Run that was entered last.

    Raises:
        OSError: If a ledger cannot be read.
    """
    found = {name: Curve() for name in names}
    run = None
    for _, path in ledger_writer.attempt_files(directory):
        for event in jsonl.events(path):
            kind = event["kind"]
            if kind == "run" and event.get("checkpoints") != run:
                run = event.get("checkpoints")
                found = {name: Curve() for name in names}
            elif kind in ("start", "rollback"):
                for curve in found.values():
                    curve.forget(int(event["step"]))
            elif kind == "metrics":
                values = event.get("values", {})
                for name in found.keys() & values.keys():
                    found[name].add(int(event["step"]), float(values[name]))
    return found
