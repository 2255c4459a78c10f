"""What the demo says at its end: a sample, a table, and whether a single bit differs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from demo_job import Attempt, Job
from demo_screen import clock, paint

from forge import ledger

HEADER = ("attempt", "ended by", "exit code", "steps", "to repeat", "time lost")
WIDTHS = (7, 18, 9, 12, 9, 9)


def print_sample(job: Job, num_lines: int = 12) -> None:
    """The beginning of what the trained model wrote."""
    lines = job.attempt.log.read_text(errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("class ")), len(lines))
    print(f"\n{paint('What the model writes now', 'bold')}")
    for line in lines[first : first + num_lines]:
        print(paint(f"    {line}", "dim"))


def time_lost(before: Attempt, after: Attempt) -> float:
    """Seconds from a blow until the next attempt had caught up."""
    return (after.regained or after.ended) - before.struck


def print_table(disturbed: Job, undisturbed: Job) -> None:
    """One line per attempt of the disturbed run with what its end cost; then both runs' totals."""
    print(f"\n{paint(_row(*HEADER), 'bold')}")
    repeated, lost_s = 0, 0.0
    for attempt, after in zip(disturbed.attempts, [*disturbed.attempts[1:], None], strict=True):
        ended_by, costs = "finished", ("", "")
        if attempt.blow is not None and after is not None:
            ended_by = attempt.blow.name + (" and damage" if attempt.damaged else "")
            repeated, lost_s = repeated + after.repeated, lost_s + time_lost(attempt, after)
            costs = (str(after.repeated), f"{time_lost(attempt, after):.1f} s")
        steps = f"{attempt.first_step} → {attempt.last_step}"
        print(_row(str(attempt.number), ended_by, str(attempt.code), steps, *costs))
    print(paint(_row("total", "", "", "", str(repeated), f"{lost_s:.1f} s"), "bold"))
    for job in (undisturbed, disturbed):
        took = clock(job.attempt.ended - job.attempts[0].started)
        losses = f"{_final(job, 'loss'):.6f}, held out {_final(job, 'held_out'):.6f}"
        print(f"{job.name:<13}{took} min   final loss {losses}")


def _row(*cells: str) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells[:2], WIDTHS[:2], strict=True))
    numbers = (f"{cell:>{width}}" for cell, width in zip(cells[2:], WIDTHS[2:], strict=True))
    return "  ".join([*padded, *numbers])


def _final(job: Job, name: str) -> float:
    """The value logged last under `name`."""
    metrics = ledger.read(job.directory).metrics.values()
    return [values[name] for values in metrics if name in values][-1]


def compare(undisturbed: Job, disturbed: Job) -> list[str]:
    """Compare weights and logged losses bit by bit; tell, and return, what differs."""
    weights = [_raw_tensors(job.directory / "weights.pt") for job in (undisturbed, disturbed)]
    metrics = [ledger.read(job.directory).metrics for job in (undisturbed, disturbed)]
    problems = []
    for name in sorted(weights[0].keys() | weights[1].keys()):
        if weights[0].get(name) != weights[1].get(name):
            problems.append(f"the weights of {name} differ")
    for step in sorted(metrics[0].keys() | metrics[1].keys()):
        if metrics[0].get(step) != metrics[1].get(step):
            problems.append(f"what was logged in step {step} differs")
            break
    num_values = sum(map(len, metrics[0].values()))
    if len(metrics[0]) != undisturbed.steps:
        problems.append(f"{len(metrics[0])} of {undisturbed.steps} steps were logged")
    print()
    for job, tensors in zip((undisturbed, disturbed), weights, strict=True):
        digest = hashlib.sha256(b"".join(tensors.values())).hexdigest()
        print(f"{job.name:<13}weights, sha256 {digest}")
    if not problems:
        size = sum(map(len, weights[0].values()))
        same = f"{len(weights[0])} tensors, {size * 8} bits of weights and {num_values} losses"
        print(paint(f"IDENTICAL    {same}: not one bit differs", "good"))
    return problems


def _raw_tensors(path: Path) -> dict[str, bytes]:
    import torch  # two seconds that the demo's begin need not wait for

    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return {
        name: bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())
        for name, tensor in sorted(state.items())
    }
