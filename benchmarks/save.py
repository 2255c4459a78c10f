"""How long a save blocks training: forge's, and torch.save with fsync, interleaved.

    python benchmarks/save.py [--mib N] [--rounds N] [--dir FOLDER]

The state is a model and its AdamW. «blocks» is the time that training waits; «durable» is the time
until the checkpoint is renamed into place and synced. They differ for saves beside training only.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import Store
from forge.checkpoint.durable import sync_directory
from forge.config import CheckpointConfig

Save = Callable[[int], tuple[float, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long a save blocks training.")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    state = make_state(options.mib)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measure(variants(Path(folder), state), options.rounds)
    where = options.dir or tempfile.gettempdir()
    print(f"medians of {options.rounds} interleaved rounds, {options.mib} MiB, below {where}\n")
    print(f"{'':34}{'blocks ms':>10}{'durable ms':>12}{'blocks, ratio':>15}")
    base = statistics.median(blocks for blocks, _ in found["torch.save, fsync, rename"])
    for name, times in found.items():
        blocks, durable = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:34}{blocks:10.1f}{durable:12.1f}{blocks / base:15.2f}")


def make_state(mib: int) -> dict[str, Any]:
    """A model of 130 tensors with AdamW's two averages each, `mib` MiB in all."""
    num_layers = 130
    width = int((mib * 2**20 / 4 / 3 / num_layers) ** 0.5)
    model = torch.nn.ParameterList(torch.randn(width, width) for _ in range(num_layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def variants(folder: Path, state: dict[str, Any]) -> dict[str, Save]:
    """Name -> a function that saves as the checkpoint of a step and returns its two times."""
    (folder / "torch").mkdir()
    store = Store(folder / "forge", CheckpointConfig(keep_last=2))

    def with_torch(step: int) -> tuple[float, float]:
        begin = time.perf_counter()
        path = folder / "torch" / f"step_{step % 2}.pt"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        sync_directory(path.parent)
        return (time.perf_counter() - begin,) * 2

    def with_forge(step: int, *, beside: bool) -> tuple[float, float]:
        begin = time.perf_counter()
        snapshot = store.snapshot(step, state, False, copy=beside)
        blocks = time.perf_counter() - begin
        store.commit(snapshot)
        durable = time.perf_counter() - begin
        store.retain()
        return (blocks if beside else durable), durable

    return {
        "torch.save, fsync, rename": with_torch,
        "forge, async_save=false": lambda step: with_forge(2 * step, beside=False),
        "forge, async_save=true": lambda step: with_forge(2 * step + 1, beside=True),
    }


def measure(variants: dict[str, Save], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Name -> (blocks, durable) in milliseconds, one pair for each round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        names = list(variants)
        random.Random(number).shuffle(names)
        for name in names:
            blocks, durable = variants[name](number + 1)
            if number:  # the first round fills caches
                found[name].append((1000 * blocks, 1000 * durable))
    return found


if __name__ == "__main__":
    main()
