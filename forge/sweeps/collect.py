"""Results of a sweep as a table: overrides, what main returned, the last and the best metrics.

It reads what is there, also while jobs run, and starts nothing.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge.filesystem.files import read_plain
from forge.jobdir.job_files import RESULT_JSON, forge_dir
from forge.sweeps.chosen_metric import Chosen
from forge.sweeps.job import SweepJob

_FIXED = ("job", "state", "step", "steps", "attempts")
_RESERVED = {*_FIXED, "result", "directory"}
"""Fixed columns: no override or metric has such a name."""


def result_of(directory: Path) -> Any:
    """The return value of main; None if main has not returned, or JSON cannot represent it."""
    try:
        return json.loads(read_plain(forge_dir(directory) / RESULT_JSON))["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rows(jobs: Iterable[SweepJob], names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """A row for each job.

    Args:
        jobs: The jobs.
        names: Metrics, as `Chosen.parse` reads them; empty: all.
    Returns:
        Rows with the keys `job`, `state`, `step`, `steps`, `attempts`, the overrides by their keys,
        `result` (or `result.<key>` of a mapping), and for each metric `<name>` (the last value),
        `<name>.best` and `<name>.best_step`. An override that has the name of a fixed column
        is `override.<key>`; a metric that has such a name, or an override's, is `metric.<name>`.
    """
    found, jobs = [], list(jobs)
    taken = _RESERVED.union(*map(_overrides, jobs))
    for job in jobs:
        row: dict[str, Any] = {
            "job": job.number,
            "state": job.state.value,
            "step": job.step,
            "steps": job.steps,
            "attempts": job.attempts,
        }
        row |= _overrides(job)
        row |= _flat("result", result_of(job.directory))
        for chosen in map(Chosen.parse, names or job.metrics):
            metric, best = chosen.of(job), chosen.best(job)
            if metric is not None and best is not None:
                name = f"metric.{chosen.name}" if chosen.name in taken else chosen.name
                row |= {name: metric.last, f"{name}.best": best[0], f"{name}.best_step": best[1]}
        row["directory"] = str(job.directory)
        found.append(row)
    return found


def _overrides(job: SweepJob) -> dict[str, Any]:
    """Column -> value of each override of a job."""
    pairs = (one.lstrip("+~").partition("=") for one in job.overrides)
    return {
        f"override.{key}" if key in _RESERVED else key: _value(value) for key, _, value in pairs
    }


def _value(text: str) -> Any:
    """A number or a boolean of an override, else its text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return float(text)  # 1e-3
    except ValueError:
        return text


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in _flat(f"{name}.{key}", one).items()}
    return {} if value is None else {name: value}


def columns(found: Iterable[dict[str, Any]]) -> list[str]:
    """All columns: the fixed ones, overrides, results and metrics as they appear, the directory."""
    names = dict.fromkeys(_FIXED)
    for row in found:
        names |= dict.fromkeys(row)
    names.pop("directory", None)
    return [*names, "directory"]


def as_csv(found: list[dict[str, Any]]) -> str:
    """The rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(found), restval="", lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()})
    return text.getvalue()
