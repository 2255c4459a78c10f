"""The metrics of a Run as rows, one a step, read from its ledger while the Run writes it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forge.filesystem.files import open_file
from forge.jobdir import jsonl, ledger_writer


class MetricRow(NamedTuple):
    """The values that were logged in one step."""

    step: int
    time: float
    """Unix time at which the first of them was written to the ledger."""
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MetricSource:
    """A Run whose metrics can be read."""

    job: Path
    """The job's directory."""
    run: str
    """The Run's name in the ledger: its checkpoint directory."""
    name: str = ""
    """The `name` given to `forge.Run`."""
    attempt: int | None = None
    """The number of the attempt that is running; None: the Run is not running."""
    num_complete: Callable[[], int] = lambda: 0
    """Returns a number of steps whose metrics are in the ledger, without any left to come."""
    rollback_steps: int | None = None
    """A rollback goes to a checkpoint at least this many steps back; None: there are none."""
    every_steps: int = 1
    """A rollback prefers checkpoints whose number of steps is a multiple of this."""


class RowReader:
    """Merges the events of a Run into rows, as `ledger.read` does, but from a given step on."""

    def __init__(self, source: MetricSource) -> None:
        self._source = source
        self._path = dict(ledger_writer.attempt_files(source.job)).get(source.attempt or 0)
        self._offset = 0
        self.rows: dict[int, MetricRow] = {}
        """The rows that were read, in the order of their steps, until the reader's user takes them
        out."""
        self.saved: list[int] = []
        """Numbers of steps in checkpoints that the attempt has saved, or has started from."""
        self.has_finished = False
        """Whether the training has finished, so that no row is left to come."""

    def read_earlier(self, first: int) -> None:
        """Read the rows from step `first` on that were written before the running attempt."""
        earlier = RowReader(self._source)
        for path in reversed(list(self._earlier(first))):
            for event in jsonl.events(path):
                earlier._apply(event)
        end = min(self.saved, default=math.inf)
        found = {step: row for step, row in earlier.rows.items() if first <= step < end}
        self.rows = dict(sorted(found.items())) | self.rows
        self.has_finished |= self._path is None and earlier.has_finished

    def _earlier(self, first: int) -> Iterator[Path]:
        """The ledgers of earlier attempts that can have such rows, the newest first."""
        for _, path in reversed(ledger_writer.attempt_files(self._source.job)):
            if self._path is not None and path >= self._path:
                continue
            events = list(jsonl.head(path))
            if not events or events[0].get("checkpoints", ".") != self._source.run:
                continue
            yield path
            starts = [int(one["step"]) for one in events if one["kind"] == "start"]
            if starts and starts[0] <= first:
                return

    def poll(self) -> Iterator[int]:
        """Read what the running attempt has written since the last call.

        Yields the step whenever training begins, or goes back to a step; by then the rows of that
        step and later ones are removed.
        """
        assert self._path is not None
        with os.fdopen(open_file(self._path), "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._offset += len(line)
                event = jsonl.parse(line)
                if event is not None and self._apply(event):
                    yield int(event["step"])

    def _apply(self, event: jsonl.Event) -> bool:
        """Take in one event; returns whether training begins or goes back."""
        match event["kind"]:
            case "start" | "rollback":
                step = int(event["step"])
                self.rows = {n: row for n, row in self.rows.items() if n < step}
                self.saved = [one for one in self.saved if one < step] + [step]
                self.has_finished = False
                return True
            case "metrics":
                row = MetricRow(int(event["step"]), event["t"], {})
                self.rows.setdefault(row.step, row).values.update(event["values"])
            case "save":
                self.saved.append(int(event["step"]))
            case "finish":
                self.has_finished = True
        return False
