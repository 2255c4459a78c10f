"""What a save by several ranks costs, beside torch.distributed.checkpoint.

    python benchmarks/rank_saving.py [--mib N] [--ranks N ...] [--wrap ddp|fsdp2] [--rounds N]
                                     [--dir FOLDER]

The state is a model and its AdamW: the same on all ranks in DDP, sharded in FSDP2. Each variant has
a group of ranks of its own, in turns, which saves a few times; the first save fills caches and does
not count. Printed are medians over saves and rounds of the slowest rank: how long the save blocks
training, until it is durable, on ranks that wait for it, and what it takes of a processor's time,
which tells more where others use the machine.

    forge, beside     a boundary of forge.Run with checkpoint.async_save=true
    forge, waiting    the same, with false
    dcp.save          every file synced
    dcp.async_save    the same, by a stager and a thread that are used again
    memcpy            of as many bytes as the rank has, into memory used before, on all ranks at
                      the same time: what a save that copies the state must block at least

What is saved is forge's whole state (random states, places, counters), and of dcp model and
optimizer alone.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import several
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forge
from forge import messages
from forge.filesystem.durable import sync_directory

NUM_LAYERS, BATCH = 32, 4
SAVES = 4
"""Of one group of ranks; the first does not count."""

Row = tuple[float, float, float]
"""Seconds that a save blocks, until it is durable, and of processor time."""


class Training:
    """A model of `mib` MiB with its AdamW, and steps that train it."""

    def __init__(self, rank: int, mib: int, wrap: str) -> None:
        torch.manual_seed(0)
        width = int((mib * 2**20 / 4 / 3 / NUM_LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)]
        model: Any = torch.nn.Sequential(*layers)
        if wrap == "fsdp2":
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        elif dist.get_world_size() > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self._batch = torch.randn(BATCH, width)

    def step(self) -> None:
        """One step, which all ranks end at about the same time."""
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()


def forge_saves(training: Training, folder: Path, *, is_async: bool) -> list[Row]:
    """A save at each boundary of a loop."""
    found: list[Row] = []
    checkpoint = {
        "dir": str(folder), "every_steps": 1, "every_s": None, "keep_last": 1,
        "async_save": is_async,
    }  # fmt: skip
    objects = {"model": training.model, "optimizer": training.optimizer}
    with forge.Run({"checkpoint": checkpoint}, **objects) as run:
        began = cpu = 0.0
        for step in run.steps(SAVES + 1):
            blocked = time.perf_counter() - began
            saver = run._attempt._directory.saver  # type: ignore[union-attr]
            if saver._thread is not None:
                saver._thread.join()
            if step:
                found.append(_row(began, blocked, cpu))
            dist.barrier()
            training.step()
            began, cpu = time.perf_counter(), time.process_time()
    return found


def _row(began: float, blocked: float, cpu: float) -> Row:
    return blocked, time.perf_counter() - began, time.process_time() - cpu


def copies(training: Training, folder: Path, *, is_async: bool) -> list[Row]:
    """As many bytes as this rank has of model and optimizer."""
    training.step()
    own = [p.to_local() if hasattr(p, "to_local") else p for p in training.model.parameters()]
    source = torch.full((3 * sum(p.numel() for p in own),), 1.0)
    target = torch.full_like(source, 2.0)
    found: list[Row] = []
    for _ in range(SAVES):
        training.step()
        began, cpu = time.perf_counter(), time.process_time()
        target.copy_(source)
        found.append(_row(began, time.perf_counter() - began, cpu))
        dist.barrier()
    return found


def dcp_saves(training: Training, folder: Path, *, is_async: bool) -> list[Row]:
    """dcp.save, or dcp.async_save; what was there before is removed, as forge does."""
    found: list[Row] = []
    stager = DefaultStager(StagingOptions(False, False, False, False))  # none of it without CUDA
    folder.mkdir(exist_ok=True)
    dist.barrier()
    for step in range(SAVES):
        training.step()
        path = folder / f"step_{step}"
        began, cpu = time.perf_counter(), time.process_time()
        model, optimizer = get_state_dict(training.model, training.optimizer)
        state = {"model": model, "optimizer": optimizer}
        writer = FileSystemWriter(path, sync_files=True)
        if is_async:
            future = async_save(state, storage_writer=writer, async_stager=stager)
            blocked = time.perf_counter() - began
            future.result()  # type: ignore[union-attr]
        else:
            save(state, storage_writer=writer)
            blocked = time.perf_counter() - began
        if dist.get_rank() == 0:
            sync_directory(folder)
        found.append(_row(began, blocked, cpu))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"step_{step - 1}", ignore_errors=True)
    return found


WAYS: dict[str, tuple[Callable[..., list[Row]], bool]] = {
    "forge, beside": (forge_saves, True),
    "forge, waiting": (forge_saves, False),
    "dcp.save": (dcp_saves, False),
    "dcp.async_save": (dcp_saves, True),
    "memcpy": (copies, False),
}


def one(rank: int, way: str, mib: int, wrap: str, folder: Path) -> list[Row]:
    """The rows of one rank."""
    warnings.simplefilter("ignore")
    messages.say = messages.warn = lambda *_: None  # type: ignore[assignment]
    saves, is_async = WAYS[way]
    return saves(Training(rank, mib, wrap), folder, is_async=is_async)[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of model and AdamW")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    for size in options.ranks:
        found: dict[str, list[Row]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in random.Random(number).sample(list(WAYS), len(WAYS)):
                with tempfile.TemporaryDirectory(dir=options.dir) as name:
                    arguments = (way, options.mib, options.wrap, Path(name, "checkpoints"))
                    ranks = several.on_ranks(size, one, *arguments)
                rows = [
                    tuple(map(max, zip(*save, strict=True))) for save in zip(*ranks, strict=True)
                ]
                found[way] += rows
        show(size, options, found)


def show(size: int, options: argparse.Namespace, found: dict[str, list[Row]]) -> None:
    """Print medians, and ratios to dcp's."""
    medians = {
        way: [1000 * statistics.median(column) for column in zip(*rows, strict=True)]
        for way, rows in found.items()
    }
    count = len(found["dcp.save"])
    print(f"{options.mib} MiB, {options.wrap}, {size} rank(s), medians of {count}")
    print(f"  {'':18}{'blocks, ms':>12}{'durable, ms':>13}{'CPU, ms':>9}")
    for way, row in medians.items():
        print("  {:18}{:12.0f}{:13.0f}{:9.0f}".format(way, *row))
    for way, beside in (("forge, beside", "dcp.async_save"), ("forge, waiting", "dcp.save")):
        ratios = [a / b for a, b in zip(medians[way], medians[beside], strict=True)]
        print("  {} / {}: blocks {:.2f}, durable {:.2f}, CPU {:.2f}".format(way, beside, *ratios))
    for way in ("forge, beside", "dcp.async_save"):
        print(f"  {way} / memcpy: blocks {medians[way][0] / medians['memcpy'][0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
