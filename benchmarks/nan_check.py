"""What the check for NaN costs a training step, with 100 million parameters.

    python benchmarks/nan_check.py [--millions N] [--rounds N] [--threads N] [--ranks N]

The steps of one loop of forge.Run take turns, in another order in each round, at what they do with
their gradients; the forward and backward passes are the same. CPU time and wall time of that part;
printed are medians, and by how much of a whole step each lies above the update without a check:

    no check          optimizer.step, zero_grad
    clip              clip_grad_norm_ alone, then the same
    isfinite          asks each gradient by itself whether it is finite, as many loops do
    forge             run.update(loss, optimizer)
    forge, clip       run.update(loss, optimizer, clip_norm=1.0)

With `--ranks 2` the model is in DDP, and forge's check has its collective, a flag. What it costs is
the difference to other ways, which nobody can ask for:

    alone             "forge" where each rank decides by itself, without the flag
    alone, clip       the same for "forge, clip"
    blocking, clip    "forge, clip" where the flag is waited for as soon as it is on its way
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import several
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import forge
from forge import messages
from forge.group.collectives import finite_on_all_ranks
from forge.training.nan import nan_policy

NUM_LAYERS, BATCH = 24, 32
WAYS = ("no check", "clip", "isfinite", "forge", "forge, clip")
OF_RANKS = ("alone", "alone, clip", "blocking, clip")
Row = tuple[str, float, float, float, float]
"""Way; seconds of wall and of CPU that its part took; the same of the whole step."""


def alone(value: torch.Tensor) -> Callable[[], bool]:
    """In place of `finite_on_all_ranks`."""
    return lambda: math.isfinite(value.item())


def blocking(value: torch.Tensor) -> Callable[[], bool]:
    """In place of `finite_on_all_ranks`."""
    answer = finite_on_all_ranks(value)()
    return lambda: answer


def trained(rank: int, size: int, millions: float, rounds: int, threads: int) -> list[Row]:
    """A row for each step but those of the first round, in which the optimizer's state is made."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    width = int((millions * 1e6 / NUM_LAYERS) ** 0.5)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)]
    model: Any = torch.nn.Sequential(*layers)
    if size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = torch.randn(BATCH, width)
    ways = ways_of(size)
    order = [way for n in range(rounds + 1) for way in random.Random(n).sample(ways, len(ways))]
    found: list[Row] = []

    def step_by_hand() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step_by_hand()

    def isfinite() -> None:
        if all(torch.isfinite(p.grad).all().item() for p in model.parameters()):
            step_by_hand()

    with tempfile.TemporaryDirectory() as folder:
        policy = {"checkpoint": {"dir": folder, "every_steps": None, "every_s": None}}
        try:
            with forge.Run(policy, model=model, optimizer=optimizer) as run:

                def update(loss: torch.Tensor, clip_norm: float | None, ask: Any) -> None:
                    vars(nan_policy)["finite_on_all_ranks"] = ask
                    run.update(loss, optimizer, clip_norm=clip_norm)

                do: dict[str, Callable[[torch.Tensor], Any]] = {
                    "no check": lambda _: step_by_hand(),
                    "clip": lambda _: clip(),
                    "isfinite": lambda _: isfinite(),
                    "forge": lambda loss: update(loss, None, finite_on_all_ranks),
                    "forge, clip": lambda loss: update(loss, 1.0, finite_on_all_ranks),
                    "alone": lambda loss: update(loss, None, alone),
                    "alone, clip": lambda loss: update(loss, 1.0, alone),
                    "blocking, clip": lambda loss: update(loss, 1.0, blocking),
                }
                for step in run.steps(len(order)):
                    began, began_cpu = time.perf_counter(), time.process_time()
                    loss = model(batch).square().mean()
                    loss.backward()
                    half, cpu = time.perf_counter(), time.process_time()
                    do[order[step]](loss)
                    now, cpu_now = time.perf_counter(), time.process_time()
                    found.append(
                        (order[step], now - half, cpu_now - cpu, now - began, cpu_now - began_cpu)
                    )
                if size > 1:
                    dist.barrier()
                raise KeyError("enough")  # or it would save
        except KeyError:
            pass
    return found[len(ways) :]


def ways_of(size: int) -> tuple[str, ...]:
    """The names of the variants that are timed, in turn, with `size` ranks."""
    return WAYS + OF_RANKS if size > 1 else WAYS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--millions", type=float, default=100, help="of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    messages.say = messages.warn = several.silent
    arguments = (options.ranks, options.millions, options.rounds, options.threads)
    rows = [row for rank in several.on_ranks(options.ranks, trained, *arguments) for row in rank]

    def median(way: str, column: int) -> float:
        return float(statistics.median(row[column] for row in rows if row[0] == way))

    whole, whole_cpu = median("no check", 3), median("no check", 4)
    print(
        f"{options.millions:g} M parameters, {options.ranks} rank(s) of {options.threads} thread(s)"
        f", medians of {options.rounds}; a step without a check takes {1000 * whole:.2f} ms"
        f" ({1000 * whole_cpu:.2f} ms of CPU)"
    )
    print(f"  {'':14}{'wall, ms':>10}{'CPU, ms':>10}{'of a step':>12}{'by CPU':>10}")
    for way in ways_of(options.ranks):
        wall, cpu = median(way, 1), median(way, 2)
        above, above_cpu = wall - median("no check", 1), cpu - median("no check", 2)
        print(
            f"  {way:14}{1000 * wall:10.3f}{1000 * cpu:10.3f}"
            f"{above / whole:12.1%}{above_cpu / whole_cpu:10.1%}"
        )


if __name__ == "__main__":
    main()
