"""`WandB`: metrics in one run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from forge.compat import of_wandb
from forge.jobdir.metric_rows import MetricRow, MetricSource
from forge.loggers.logger import Logger, check_installed, job_id

_open: set[Any] = set()
"""Runs of all loggers of the process."""


class WandB(Logger):
    """Writes metrics to a run of Weights & Biases, the same run in all attempts of the job.

    Its service takes no step back, so a step that it has is not sent again. Offline, each attempt
    has its own directory with the same run id; together they have each step once.

    Args:
        options: Arguments of `wandb.init`, such as `project=` and `config=`. `id` is that of the
            job, and `dir` the job's directory, unless they are given.
    Raises:
        ConfigError: If the package `wandb` is not installed.
    """

    can_rewind: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        check_installed("wandb", "wandb")
        import wandb

        self._wandb = wandb
        self._options = {"resume": "allow", "reinit": "create_new", **options}
        self._run: Any = None
        self._next = 0

    def open(self, source: MetricSource) -> None:
        """See `Logger.open`."""
        self._options = {"id": job_id(source), "dir": str(source.job), **self._options}

    def on_resume(self, step: float) -> int:
        """See `Logger.on_resume`; opens the run."""
        if self._run is None:
            before = Path(self._options["dir"], "wandb")
            files = list(before.glob(f"offline-run-*/run-{self._options['id']}.wandb"))
            self._run = self._wandb.init(**self._options)
            _open.add(self._run)
            offline = [of_wandb.last_step(one) for one in files] if self._run.offline else []
            self._next = max([*offline, self._run.step - 1], default=-1) + 1
        return self._next

    def write(self, rows: Sequence[MetricRow]) -> None:
        """See `Logger.write`."""
        for row in rows:
            self._run.log(row.values, step=row.step)
        self._next = rows[-1].step + 1

    def close(self, *, is_finished: bool) -> None:
        """See `Logger.close`."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if is_finished else 1)
            _open.discard(run)
            if not _open and self._wandb.run is None:
                self._wandb.teardown()  # or a stop ends its service, which it misses at exit
