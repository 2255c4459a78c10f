"""The cost of the agreement of many ranks at each boundary, and the messages in quiet steps.

    python benchmarks/agreement.py [--calls N] [--rounds N] [--steps N] [--ranks N ...]

First it measures the CPU time of the thread that calls `agreed()`, as each boundary does, while the
group's threads sleep in its store. It compares a blocking all_reduce of one int32, as other
libraries use: CPU time of the process (gloo has its own threads), and wall time. The two take
turns; medians over rounds and ranks are printed.

Then it counts, in quiet steps of whole loops, the messages to the group's store (calls of its
clients) and the collectives (from torch's flight recorder, whether Python or C++ made them). One of
the collectives is run.update's flag, which runs while gradients are clipped: `nan_check.py`
measures its cost. The last loop is a control: it saves once.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100000")

import several
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import forge
from forge import messages
from forge.group.ranks import StoreCoordinator

AIM_US = 2.0
MESSAGES = (
    *("set", "get", "add", "check", "wait", "compare_set", "delete_key", "num_keys"),
    *("multi_get", "multi_set", "append", "queue_push", "queue_pop", "queue_len"),
)
QUIET_FROM = 10
"""Steps before the count begins, since DDP rebuilds its buckets in the first steps."""


def turns(rank: int, num_calls: int, rounds: int) -> list[dict[str, float]]:
    """Microseconds of one call, by the name of the measurement, for each round."""
    group, value, found = StoreCoordinator(), torch.zeros(1, dtype=torch.int32), []
    for number in range(rounds + 1):
        row = {}
        dist.barrier()
        began = time.thread_time()
        for boundary in range(number * num_calls, (number + 1) * num_calls):
            group.agreed(boundary)
        row["agreed(), CPU of its thread"] = (time.thread_time() - began) / num_calls
        num_reduces = max(num_calls // 500, 1)
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(num_reduces):
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        row["all_reduce, wall"] = (time.perf_counter() - began) / num_reduces
        row["all_reduce, CPU of its process"] = (time.process_time() - began_cpu) / num_reduces
        found.append({name: 1e6 * seconds for name, seconds in row.items()})
    group.close(60)
    return found[1:]  # the first round fills caches


class Counted:
    """Counts this process's messages to stores of torch, and its collectives."""

    def __init__(self) -> None:
        self._messages = self._num_async = 0
        real_all_reduce = dist.all_reduce

        def all_reduce(*args: Any, **options: Any) -> Any:
            self._num_async += options.get("async_op", False)
            return real_all_reduce(*args, **options)

        dist.all_reduce = all_reduce
        for owner in (vars(dist)["Store"], vars(dist)["TCPStore"]):
            for name in set(MESSAGES) & set(vars(owner)):
                setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, real: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            self._messages += 1
            return real(*args, **options)

        return counting

    def so_far(self) -> collections.Counter[str]:
        """Name -> count."""
        recorded = json.loads(vars(torch._C._distributed_c10d)["_dump_fr_trace_json"]())
        names = collections.Counter(e["profiling_name"] for e in recorded.get("entries", []))
        found = {"messages": self._messages, "of them by Python, async": self._num_async}
        return names + collections.Counter(found)


def loop(rank: int, kind: str, num_steps: int, folder: str) -> dict[str, int]:
    """The number of messages and collectives in `num_steps` steps of a loop, by name."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    model = DistributedDataParallel(model) if "DDP" in kind else model
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(8, 16)
    counted, before = Counted(), collections.Counter[str]()
    after = collections.Counter[str]()

    def update(loss: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def all_of(steps: Iterator[int]) -> None:
        nonlocal before, after
        for step in steps:
            before = counted.so_far() if step == QUIET_FROM else before
            after = counted.so_far() if step == QUIET_FROM + num_steps else after
            loss = model(data).square().mean()
            loss.backward()
            update(loss)

    count = QUIET_FROM + num_steps + 10
    if not kind.endswith(("optimizer.step", "run.update", "run.save")):
        all_of(iter(range(count)))
        dist.barrier()
        return dict(after - before)
    policy = {"checkpoint": {"dir": folder, "every_steps": None, "every_s": None}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        if "run.update" in kind:

            def update(loss: torch.Tensor) -> None:
                run.update(loss, optimizer, clip_norm=1.0)

        def steps() -> Iterator[int]:
            for step in run.steps(count):
                if "run.save" in kind and step == 2 * QUIET_FROM:
                    run.save()
                yield step

        all_of(steps())
    return dict(after - before)


LOOPS = (
    "plain",
    "forge, optimizer.step",
    "forge, run.update",
    "DDP",
    "DDP, forge, optimizer.step",
    "DDP, forge, run.update",
    "not quiet: one run.save",
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10**6, help="of agreed(), over all rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    messages.say = messages.warn = several.silent
    for size in options.ranks:
        found = several.on_ranks(size, turns, options.calls // options.rounds, options.rounds)
        rows = [row for rank in found for row in rank]
        print(f"{size} ranks, one call, medians of {len(rows)}")
        for name in rows[0]:
            aim = f"   aim: {AIM_US:g}" if name.startswith("agreed") else ""
            print(f"  {name:34}{statistics.median(row[name] for row in rows):9.2f} µs{aim}")
    for size in options.ranks:
        print(f"{size} ranks, sent by rank 0 in {options.steps} quiet steps")
        for kind in LOOPS:
            with tempfile.TemporaryDirectory() as folder:
                count = several.on_ranks(size, loop, kind, options.steps, folder)[0]
            told = ", ".join(f"{number} {name}" for name, number in sorted(count.items()))
            print(f"  {kind:28}{told or 'nothing'}")


if __name__ == "__main__":
    main()
