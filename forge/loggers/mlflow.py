"""`MLflow`: metrics in one run of MLflow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from forge.jobdir.metric_rows import MetricRow, MetricSource
from forge.loggers.logger import Logger, check_installed, job_id

_MOST = 1000
"""Values that MLflow takes in one call."""
_TAG = "forge.job"


class MLflow(Logger):
    """Writes metrics to a run of MLflow, the same run in all attempts of the job.

    MLflow removes no values, so a value that it has is not sent again.

    Args:
        experiment: The name of the experiment, which is created if there is none.
        tracking_uri: The server or the store; None: as `mlflow.set_tracking_uri` or the environment
            say.
        run_id: An existing run; None: a run of the job's own.
        run_name: The name of that run.
        tags: Its tags.
    Raises:
        ConfigError: If no package of MLflow is installed.
    """

    can_rewind: ClassVar[bool] = False

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        check_installed("mlflow", "mlflow")
        from mlflow import entities, tracking

        self._metric = entities.Metric
        self._connect: Callable[[], Any] = lambda: tracking.MlflowClient(tracking_uri)
        self._experiment = experiment
        self._run_id = run_id
        self._run_name = run_name
        self._tags = tags or {}
        self._client: Any = None
        self._next: dict[str, int] = {}
        """For each metric the first step that the run does not have."""

    def open(self, source: MetricSource) -> None:
        """See `Logger.open`."""
        self._tags = {_TAG: job_id(source), **self._tags}

    def on_resume(self, step: float) -> int:
        """See `Logger.on_resume`.

        Opens the run; returns the first step that one of its metrics can lack.

        A kill can cut a call short: then the last step has values of some metrics only.
        """
        if self._client is None:
            client = self._connect()
            self._run_id = self._run_id or self._find(client) or self._create(client)
            client.update_run(self._run_id, status="RUNNING")
            for name in client.get_run(self._run_id).data.metrics:
                history = client.get_metric_history(self._run_id, name)
                self._next[name] = max(one.step for one in history) + 1
            self._client = client
        return min([*self._next.values(), max(self._next.values(), default=1) - 1])

    def _find(self, client: Any) -> str | None:
        """The run of an earlier start, by its tag: a kill can come right after its creation."""
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        tag = f"tags.`{_TAG}` = '{self._tags[_TAG]}'"
        found = client.search_runs([experiment.experiment_id], tag, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else None
        number = number or client.create_experiment(self._experiment)
        run = client.create_run(number, tags=self._tags, run_name=self._run_name)
        return str(run.info.run_id)

    def write(self, rows: Sequence[MetricRow]) -> None:
        """See `Logger.write`."""
        values = iter(
            self._metric(name, value, round(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
            if row.step >= self._next.get(name, 0)
        )
        while part := list(itertools.islice(values, _MOST)):
            self._client.log_batch(self._run_id, metrics=part)
            self._next.update({one.key: one.step + 1 for one in part})

    def close(self, *, is_finished: bool) -> None:
        """See `Logger.close`."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id, "FINISHED" if is_finished else "KILLED")
