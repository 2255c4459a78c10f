"""`Logger`: what all loggers have in common, and the base class for your own."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from forge.errors import ConfigError
from forge.filesystem.files import read_if_there, write_atomically
from forge.jobdir.job_files import forge_dir
from forge.jobdir.metric_rows import MetricRow, MetricSource
from forge.loggers.follower import Follower


class Logger(ABC):
    """Gets the metrics of a Run, each step once, over all attempts of the job.

    `run.log_to` calls `open` in the main thread, and everything else in a thread of the logger's
    own: calls can take long, and can raise. After an error forge calls `close`, and some time
    later begins again with `on_resume`.
    """

    can_rewind: ClassVar[bool] = True
    """Whether `on_resume` removes values. If not, forge sends values that a rollback can take back
    only when it no longer can."""

    def open(self, source: MetricSource) -> None:  # noqa: B027 - most loggers need a directory
        """Learn which Run the metrics come from; called once, before anything else.

        Args:
            source: The Run; `source.job` is the job's directory.
        """

    @abstractmethod
    def on_resume(self, step: float) -> int:
        """Training begins with step `step`, or goes back to it.

        Removes the values of that step and of later ones, if the logger can.

        Args:
            step: The step; infinite: nothing is to be removed.
        Returns:
            The first step of which the logger lacks values; smaller than `step` if values were
            lost, larger if it has values that it cannot remove, and that are not sent again.
        """

    @abstractmethod
    def write(self, rows: Sequence[MetricRow]) -> None:
        """Record the next rows, in the order of their steps; each step comes once.

        Args:
            rows: The rows, each with `step`, `time` and `values`.
        """

    def close(self, *, is_finished: bool) -> None:  # noqa: B027 - some have nothing to close
        """Write out everything, and release everything: the Run has ended.

        Args:
            is_finished: Whether the training has finished; if not, the job can be resumed.
        """

    def follow(self, source: MetricSource) -> Follower:
        """Follow a Run in a thread of its own; called by `run.log_to`.

        Args:
            source: The Run.
        Returns:
            The thread; `finish` lets it send what is left, and end.
        """
        self.open(source)
        follower = Follower(self, source)
        follower.start()
        return follower

    def __str__(self) -> str:
        return type(self).__name__


def check_installed(module: str, extra: str) -> None:
    """Check that a package can be imported.

    Raises:
        ConfigError: If it is not installed; names the extra that installs it.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise ConfigError(
            [f"`{module}` is not installed: pip install 'hydra-forge[{extra}]'."], "The logger"
        )


def job_id(source: MetricSource) -> str:
    """An id for a Run in a service of others: the same at every start of the job, and unique."""
    path = forge_dir(source.job) / "log_id"
    found = read_if_there(path)
    if not found:
        found = secrets.token_hex(4)
        write_atomically(path, found, is_synced=True)
    return f"{found}-{source.name}" if source.name else found


def path_of(path: Path, source: MetricSource) -> Path:
    """A path relative to the job's directory; each of several Runs of a job has its own."""
    named = path.with_name(f"{path.stem}_{source.name}{path.suffix}") if source.name else path
    return source.job / named
