"""`TensorBoard`: metrics as scalars in event files, and event files cut back to a step."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge.compat import of_tensorboard
from forge.filesystem.files import make_directory, open_file, write_atomically
from forge.jobdir.metric_rows import MetricRow, MetricSource
from forge.loggers.logger import Logger, check_installed, path_of

_HEAD, _TAIL = struct.Struct("<QI"), 4
"""Before a record its length and a checksum of it, after it a checksum of the record."""


class TensorBoard(Logger):
    """Writes metrics to TensorBoard's event files, one file for each attempt of the job.

    Args:
        directory: The directory of the event files, relative to the job's directory. It belongs to
            this Run alone: `on_resume` cuts every event file in it.
    Raises:
        ConfigError: If the package `tensorboard` is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] = "tensorboard") -> None:
        check_installed("tensorboard", "tensorboard")
        self.directory = Path(directory)
        """The directory of the event files; absolute once the Run is known."""
        self._writer: Any = None
        self._is_cut = False
        """Whether the last call of `on_resume` has removed events."""

    def open(self, source: MetricSource) -> None:
        """See `Logger.open`."""
        self.directory = path_of(self.directory, source)

    def on_resume(self, step: float) -> int:
        """See `Logger.on_resume`.

        Removes images, histograms and texts, too. Call it before a writer is opened.
        """
        self.close(is_finished=False)
        steps = [_cut(path, step) for path in sorted(self.directory.glob("*tfevents*"))]
        self._is_cut = any(is_cut for _, is_cut in steps)
        return max((last for last, _ in steps), default=-1) + 1

    def write(self, rows: Sequence[MetricRow]) -> None:
        """See `Logger.write`."""
        if self._writer is None:
            make_directory(self.directory)
            self._writer = of_tensorboard.event_writer(self.directory)
            if self._is_cut:  # a TensorBoard that is running has shown them
                self._writer.add_event(of_tensorboard.restart_event(rows[0].step, rows[0].time))
        for row in rows:
            self._writer.add_event(of_tensorboard.scalars_event(row.step, row.time, row.values))
        self._writer.flush()

    def close(self, *, is_finished: bool) -> None:
        """See `Logger.close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _cut(path: Path, step: float) -> tuple[int, bool]:
    """Remove the events of that step and later ones, and a record that a crash tore.

    Returns:
        The last step that is left (-1 if there is none), and whether events were removed.
    """
    with os.fdopen(open_file(path), "rb") as file:
        content = file.read()
    last, kept, is_cut = -1, [], False
    for record in _records(content):
        event = of_tensorboard.event(record[_HEAD.size : -_TAIL])
        has_values = event.HasField("summary")
        if has_values and event.step >= step:
            is_cut = True
            continue
        kept.append(record)
        last = max(last, event.step) if has_values else last
    if sum(map(len, kept)) < len(content):
        write_atomically(path, b"".join(kept))
    return last, is_cut


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of an event file."""
    at = 0
    while at + _HEAD.size <= len(content):
        end = at + _HEAD.size + _HEAD.unpack_from(content, at)[0] + _TAIL
        if end > len(content):
            return
        yield content[at:end]
        at = end
