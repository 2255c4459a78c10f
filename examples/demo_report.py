"""The demo's report: a sample, a table, and whether a single bit differs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from demo_screen import clock, paint
from demo_sweep import Attempt, Fault, Job, Sweep

HEADER = ("job", "attempt", "ended by", "exit code", "steps", "repeated", "time lost")
WIDTHS = (3, 7, 19, 9, 9, 8, 9)


def print_sample(sweep: Sweep, num_lines: int = 12) -> None:
    """Print the beginning of the text that the better model wrote."""
    job = min(sweep.jobs, key=lambda job: final(job, "held_out"))
    lines = job.output().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("class ")), len(lines))
    print(f"\n{paint(f'A sample from the model with {job.label}', 'bold')}")
    for line in lines[first : first + num_lines]:
        print(paint(f"    {line}", "dim"))


def time_lost(fault: Fault, after: Attempt) -> float:
    """Seconds from a fault until the next attempt had caught up."""
    return (after.regained or after.ended) - fault.injected


def print_table(uninterrupted: Sweep, interrupted: Sweep, faults: list[Fault]) -> None:
    """One line per attempt of the interrupted sweep, with its cost; then the duration of both."""
    print(f"\n{paint(_row(*HEADER), 'bold')}")
    for job in interrupted.jobs:
        repeated, lost_s = 0, 0.0
        attempts = job.attempts(faults)
        for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
            costs = ("", "")
            if attempt.fault is not None and after is not None:
                lost = time_lost(attempt.fault, after)
                repeated, lost_s = repeated + after.repeated, lost_s + lost
                costs = (str(after.repeated), f"{lost:.1f} s")
            steps = f"{attempt.first_step} → {attempt.last_step}"
            number = str(attempt.number)
            print(_row(str(job.number), number, attempt.ended_by, str(attempt.code), steps, *costs))
        total = _row(str(job.number), "all", "", "", "", str(repeated), f"{lost_s:.1f} s")
        print(paint(total, "bold"))
    for sweep in (uninterrupted, interrupted):
        print(f"{sweep.name:<15}{clock(sweep.ended - sweep.started)} min")


def _row(*cells: str) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells[:3], WIDTHS[:3], strict=True))
    numbers = (f"{cell:>{width}}" for cell, width in zip(cells[3:], WIDTHS[3:], strict=True))
    return "  ".join([*padded, *numbers]).rstrip()


def final(job: Job, name: str) -> float:
    """The value logged last under `name`."""
    return [values[name] for values in job.metrics().values() if name in values][-1]


def compare(uninterrupted: Sweep, interrupted: Sweep) -> list[str]:
    """Compare weights and logged losses bit by bit; print and return the differences."""
    problems = []
    for jobs in zip(uninterrupted.jobs, interrupted.jobs, strict=True):
        print()
        problems += _compare(*jobs)
    return problems


def _compare(uninterrupted: Job, interrupted: Job) -> list[str]:
    jobs, label = (uninterrupted, interrupted), uninterrupted.label
    weights = [_raw_tensors(job.directory / "weights.pt") for job in jobs]
    metrics = [job.metrics() for job in jobs]
    problems = []
    for name in sorted(weights[0].keys() | weights[1].keys()):
        if weights[0].get(name) != weights[1].get(name):
            problems.append(f"{label}: the weights of {name} differ")
    for step in sorted(metrics[0].keys() | metrics[1].keys()):
        if metrics[0].get(step) != metrics[1].get(step):
            problems.append(f"{label}: the values logged in step {step} differ")
            break
    num_values = sum(map(len, metrics[0].values()))
    if len(metrics[0]) != uninterrupted.steps:
        problems.append(f"{label}: {len(metrics[0])} of {uninterrupted.steps} steps were logged")
    for name, job, tensors in zip(("uninterrupted", "interrupted"), jobs, weights, strict=True):
        digest = hashlib.sha256(b"".join(tensors.values())).hexdigest()
        losses = (
            f"training loss {final(job, 'loss'):.6f}, validation loss {final(job, 'held_out'):.6f}"
        )
        print(f"{label:<9} {name:<14} {losses}, sha256 {digest[:12]}")
    if not problems:
        size = sum(map(len, weights[0].values()))
        same = f"{size * 8} bits of weights, {num_values} losses: not one bit differs"
        print(paint(f"{label:<9} IDENTICAL      {same}", "good"))
    return problems


def _raw_tensors(path: Path) -> dict[str, bytes]:
    import torch  # takes two seconds, which the start of the demo does not need

    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return {
        name: bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())
        for name, tensor in sorted(state.items())
    }
