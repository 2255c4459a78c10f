"""The values that a job's loggers have on disk: every one, also those that are there twice."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

Point = tuple[int, str]
"""Step and name of a value."""


def of_csv(job: Path) -> list[tuple[Point, float]]:
    path = job / "metrics.csv"
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else []
    found = [(int(row.pop("step")), row) for row in rows]
    named = {"step (logged)": "step"}
    return [
        ((step, named.get(name, name)), float(value))
        for step, row in found
        for name, value in row.items()
        if value
    ]


def of_tensorboard(job: Path) -> list[tuple[Point, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = []
    for path in sorted((job / "tensorboard").glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            found += [((event.step, one.tag), one.simple_value) for one in event.summary.value]
    return found


def of_mlflow(job: Path) -> list[tuple[Point, float]]:
    found = []
    for path in sorted(job.glob("mlruns/*/*/metrics/*")):
        lines = (line.split() for line in path.read_text().splitlines())
        found += [((int(step), path.name), float(value)) for _, value, step in lines]
    return found


def of_wandb(job: Path) -> list[tuple[Point, float]]:
    """All offline directories of the job; a public reader of these files there is none."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    from forge.compat import of_wandb

    found = []
    for path in sorted(job.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, of_wandb.records(path.read_bytes())):
            for one in record.history.item:
                name = "/".join(one.nested_key) or one.key
                if not name.startswith("_"):
                    point = (record.history.step.num, name)
                    found.append((point, json.loads(one.value_json)))
    return found


READERS = {"CSV": of_csv, "TensorBoard": of_tensorboard, "MLflow": of_mlflow, "WandB": of_wandb}


def compared(found: list[tuple[Point, float]], expected: dict[Point, float]) -> dict[str, list]:
    """What is wrong: points that are missing, that are there twice, or have another value."""
    counts, values = Counter(point for point, _ in found), dict(found)
    return {
        "missing": sorted(expected.keys() - counts.keys()),
        "repeated": sorted(point for point, count in counts.items() if count > 1),
        "unknown": sorted(counts.keys() - expected.keys()),
        "different": sorted(
            p
            for p in expected.keys() & values.keys()
            if abs(values[p] - expected[p]) > 1e-6 * abs(expected[p])  # TensorBoard has float32
        ),
    }
