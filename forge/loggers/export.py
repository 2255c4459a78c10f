"""`forge.loggers.export`: the metrics of a job that is not running, for a logger."""

from __future__ import annotations

import math
import os
from pathlib import Path

from forge.errors import ForgeError
from forge.jobdir import ledger
from forge.jobdir.metric_rows import MetricSource, RowReader
from forge.loggers.logger import Logger


def export(job_dir: Path | str, *loggers: Logger, name: str | None = None) -> None:
    """Send loggers the metrics of a job that they lack; the job must not be running.

    Args:
        job_dir: The job's directory, as for `forge.ledger.read`.
        loggers: Where to send them; relative paths refer to the job's directory.
        name: The name given to `forge.Run`, if it has one.
    Raises:
        FileNotFoundError: If it is not a job's directory.
        ForgeError: If the job has several Runs, or none of that name.
        Exception: Whatever a logger raises.
    """
    runs = list(ledger.read(job_dir).runs)
    chosen = [one for one in runs if name in (None, Path(one).name)]
    if len(chosen) != 1:
        raise ForgeError(
            f"{os.path.abspath(job_dir)}: expected the metrics of one Run, found those of"
            f" {len(chosen)} in {', '.join(runs) or 'an empty ledger'}. Choose one by its name:"
            " export(…, name=…)."
        )
    source = MetricSource(job=Path(job_dir).absolute(), run=chosen[0], name=name or "")
    for logger in loggers:
        logger.open(source)
        reader = RowReader(source)
        reader.read_earlier(logger.on_resume(math.inf))
        if reader.rows:
            logger.write(list(reader.rows.values()))
        logger.close(is_finished=reader.has_finished)
