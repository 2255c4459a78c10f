"""How close `checkpoint.every_s: auto` comes to the best fixed interval, chosen in hindsight.

    python benchmarks/interval.py [--histories N] [--hours H] [--seed S]

Each history is a job that needs H hours of training, with losses (kills, lost nodes) at random
times of an exponential distribution, and a save of a fixed cost. After a loss the job starts again
from its last save. The best fixed interval of a history is found by trying 60 of them on the same
losses. Printed is the productive share: hours of training divided by hours until the job was done;
then that of `auto` divided by that of the best fixed interval, median and minimum over the
histories. forge's own function computes the interval; all else is replayed, without a clock.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator

from forge.training.interval import interval_s

RESTART_S = 60.0
"""Seconds from a loss to the next step."""
GIVE_UP = 20
"""A job that has used this many times its training time makes no progress."""
MTBF_S = {"1 h": 3600.0, "8 h": 8 * 3600.0, "47 d": 47 * 86400.0}
COSTS_S = (1.0, 10.0, 60.0)
FIXED_S = [10 * (86400 / 10) ** (n / 59) for n in range(60)]
"""From 10 s to a day."""


def losses(seed: int, mtbf_s: float) -> Iterator[float]:
    """Seconds from each start to its loss."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / mtbf_s)


def replay(
    work_s: float, cost_s: float, gaps: Iterator[float], interval: Callable[[float, int], float]
) -> float:
    """Share of the time that was productive.

    Args:
        work_s: Seconds of training that the job needs.
        cost_s: Seconds that a save takes.
        gaps: Seconds from each start to its loss.
        interval: The interval of a start, from the seconds trained and the losses so far.
    """
    saved_s = passed_s = trained_s = 0.0
    num_losses = 0
    while passed_s < GIVE_UP * work_s:
        every_s = interval(trained_s, num_losses)
        until_s = next(gaps)
        left_s = work_s - saved_s
        # Seconds of this start, if it comes to the end: a save after each interval but the last.
        needed_s = left_s + cost_s * max(math.ceil(left_s / every_s) - 1, 0)
        if needed_s <= until_s:
            return work_s / (passed_s + needed_s)
        rounds = int(until_s // (every_s + cost_s))
        saved_s += rounds * every_s
        trained_s += min(until_s - rounds * cost_s, (rounds + 1) * every_s)
        is_in_save = until_s - rounds * (every_s + cost_s) > every_s
        passed_s += until_s + RESTART_S
        num_losses += not is_in_save  # an end inside a save says nothing about the machine
    return 0.0


def auto(cost_s: float) -> Callable[[float, int], float]:
    """The interval as forge computes it, start by start."""
    before: list[float] = []

    def interval(trained_s: float, num_losses: int) -> float:
        last = before[-1] if before else None
        before.append(interval_s(cost_s, trained_s, num_losses, last))
        return before[-1]

    return interval


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--hours", type=float, default=72.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work_s = options.hours * 3600
    print(f"{options.histories} histories of {options.hours:g} h each")
    print(
        f"{'loss every':>10}  {'save':>5}  {'auto':>6}  {'best':>6}  {'600 s':>6}  auto/best, least"
    )
    for name, mtbf_s in MTBF_S.items():
        for cost_s in COSTS_S:
            found, best, plain = [], [], []
            for number in range(options.histories):
                seed = options.seed * 10**6 + number

                def share(interval: Callable[[float, int], float]) -> float:
                    gaps = losses(seed, mtbf_s)  # noqa: B023 - called at once
                    return replay(work_s, cost_s, gaps, interval)  # noqa: B023 - called at once

                found.append(share(auto(cost_s)))
                best.append(max(share(lambda *_, s=fixed: s) for fixed in FIXED_S))
                plain.append(share(lambda *_: 600.0))
            ratios = [one / other for one, other in zip(found, best, strict=True)]
            middle = [statistics.median(one) for one in (found, best, plain)]
            shown = "  ".join(f"{one:6.3f}" for one in middle)
            print(
                f"{name:>10}  {cost_s:4g}s  {shown}  {statistics.median(ratios):9.3f}"
                f"  {min(ratios):5.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
