"""`CSV`: metrics in one file, a row for each step."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from forge.filesystem.files import (
    make_directory,
    open_file,
    read_if_there,
    write_all,
    write_atomically,
)
from forge.jobdir.metric_rows import MetricRow, MetricSource
from forge.loggers.logger import Logger, path_of


class CSV(Logger):
    """Writes metrics to a CSV file with a header, one row for each step.

    A new metric adds a column; that of a metric named `step` is `step (logged)`. A kill loses
    nothing, since a resumed job writes what is missing.

    Args:
        path: The file, relative to the job's directory. A file that exists needs the column `step`.
    """

    def __init__(self, path: str | os.PathLike[str] = "metrics.csv") -> None:
        self.path = Path(path)
        """The file; absolute once the Run is known."""
        self._columns: list[str] = []

    def open(self, source: MetricSource) -> None:
        """See `Logger.open`."""
        self.path = path_of(self.path, source)
        make_directory(self.path.parent)

    def on_resume(self, step: float) -> int:
        """See `Logger.on_resume`.

        Removes the lines of that step and later ones, and a line that a crash tore.
        """
        text = read_if_there(self.path)
        header, *lines = text.splitlines(keepends=True) or [""]
        self._columns = next(csv.reader([header]), [])
        at, last, kept = self._columns.index("step") if header else 0, -1, [header]
        for line in lines:
            number = next(csv.reader([line]))[at] if line.endswith("\n") else ""
            if number.isdigit() and int(number) < step:
                kept.append(line)
                last = max(last, int(number))
        if len("".join(kept)) < len(text):
            write_atomically(self.path, "".join(kept))
        return last + 1

    def write(self, rows: Sequence[MetricRow]) -> None:
        """See `Logger.write`."""
        rows = [row._replace(values=_renamed(row.values)) for row in rows]
        names = dict.fromkeys(name for row in rows for name in row.values)
        if new := [name for name in names if name not in self._columns]:
            self._add_columns(new)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writerows({"step": row.step, **row.values} for row in rows)
        fd = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            write_all(fd, text.getvalue().encode())
        finally:
            os.close(fd)

    def _add_columns(self, names: list[str]) -> None:
        body = read_if_there(self.path).partition("\n")[2].replace("\n", "," * len(names) + "\n")
        self._columns = [*(self._columns or ["step"]), *names]
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(self._columns)
        write_atomically(self.path, header.getvalue() + body)


def _renamed(values: dict[str, float]) -> dict[str, float]:
    """Leave the column `step` to the number of the step."""
    return {"step (logged)" if name == "step" else name: one for name, one in values.items()}
