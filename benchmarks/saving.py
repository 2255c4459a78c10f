"""One process of checkpoint.py: how long saves block, slow down training, and take to be durable.

    python benchmarks/saving.py --mib N --threads N --rounds N --dir FOLDER

The steps train a model of 100 matrices with AdamW, whose state is saved. In each round every
variant saves once while training continues, in another order each time. The time of the same number
of steps without a save, measured just before, is subtracted. Prints medians as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig, NanConfig
from forge.filesystem.durable import sync_directory

NUM_LAYERS = 100
CONTROL_STEPS = 5
BLOCK = 16 << 20

State = dict[str, Any]
Save = Callable[[int], Callable[[], bool]]
"""Begins the save of a step; returns a function that checks whether the save is finished."""


class Training:
    """A model of `mib` MiB with its AdamW, and steps that train it."""

    def __init__(self, mib: int) -> None:
        width = int((mib * 2**20 / 4 / 3 / NUM_LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._batch = torch.randn(8, width)
        self.step()

    def step(self) -> None:
        """One step."""
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """The state to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def finished() -> bool:
    """The check of a blocking save, which is always finished."""
    return True


def forge_saves(folder: Path, training: Training) -> dict[str, Save]:
    """Saves of forge, in the background and blocking."""
    from forge.jobdir.ledger_writer import Ledger
    from forge.training.metrics import Metrics
    from forge.training.nan.nan_policy import NanPolicy
    from forge.training.saver import SaveCause, Saver

    found: dict[str, Save] = {}
    for name, is_async in (("forge, beside", True), ("forge, waiting", False)):
        directory = folder / ("beside" if is_async else "waiting")
        config = CheckpointConfig(keep_last=1, async_save=is_async)
        store, ledger = Store(directory, config), Ledger(directory)
        saver = Saver(store, config, ledger, NanPolicy(NanConfig()), Metrics(ledger))

        def save(step: int, saver: Saver = saver) -> Callable[[], bool]:
            saver.save(step, training.state, SaveCause.requested)
            thread = saver._thread
            return finished if thread is None else lambda: not thread.is_alive()

        found[name] = save
    return found


def torch_save(folder: Path, training: Training) -> Save:
    """torch.save, fsync, rename, fsync of the directory."""
    folder.mkdir()

    def save(step: int) -> Callable[[], bool]:
        path = folder / "state.pt"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        sync_directory(folder)
        return finished

    return save


def dcp_async(folder: Path, training: Training) -> Save:
    """torch.distributed.checkpoint.async_save with a stager that is used again."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # none without CUDA

    def save(step: int) -> Callable[[], bool]:
        previous = folder / f"step_{step - 1}"
        writer = FileSystemWriter(folder / f"step_{step}", sync_files=True)
        future = async_save(training.state(), storage_writer=writer, async_stager=stager)
        assert isinstance(future, Future)

        def is_done() -> bool:
            if future.done():
                future.result()
                shutil.rmtree(previous, ignore_errors=True)
                return True
            return False

        return is_done

    return save


def lightning_async(folder: Path, training: Training) -> Save | None:
    """Lightning's AsyncCheckpointIO; None if Lightning is not installed."""
    try:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    except ImportError:
        return None
    folder.mkdir()
    plugin = AsyncCheckpointIO(TorchCheckpointIO())

    def save(step: int) -> Callable[[], bool]:
        plugin.save_checkpoint(training.state(), str(folder / "state.ckpt"))
        last: Future[int] = plugin._executor.submit(
            int
        )  # queued after the save, in the same single thread
        return last.done

    return save


def memcpy_ms(size: int) -> Callable[[], float]:
    """Copies as many bytes within memory that was written before, so that its pages exist."""
    source, target = (torch.full((size,), byte, dtype=torch.uint8) for byte in (1, 2))

    def measure() -> float:
        begin = time.perf_counter()
        target.copy_(source)
        return 1000 * (time.perf_counter() - begin)

    return measure


def disk_ms(size: int, path: Path) -> Callable[[], float]:
    """The lower limit: as many bytes with O_DIRECT and fsync, in as many threads as forge uses."""
    from forge.checkpoint.staging import NUM_WRITERS, HostBuffer

    blocks = [HostBuffer(BLOCK).memory for _ in range(NUM_WRITERS)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0)

    def measure() -> float:
        begin = time.perf_counter()
        fd = os.open(path, flags)

        def write(number: int) -> None:
            for at in range(number * BLOCK, size - BLOCK + 1, NUM_WRITERS * BLOCK):
                os.pwrite(fd, blocks[number], at)

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            list(pool.map(write, range(NUM_WRITERS)))
        os.fsync(fd)
        os.close(fd)
        return 1000 * (time.perf_counter() - begin)

    return measure


def measure_save(training: Training, save: Save, step: int) -> tuple[float, float, float]:
    """Milliseconds that a save blocks, that it costs training in all, and until it is durable."""
    begin = time.perf_counter()
    for _ in range(CONTROL_STEPS):
        training.step()
    alone = (time.perf_counter() - begin) / CONTROL_STEPS
    begin = time.perf_counter()
    is_done = save(step)
    blocks = time.perf_counter() - begin
    num_steps, durable = 0, blocks
    while not is_done():
        training.step()
        num_steps += 1
        durable = time.perf_counter() - begin
    lost = time.perf_counter() - begin - num_steps * alone
    return 1000 * blocks, 1000 * lost, 1000 * durable


def durable_ms(save: Save, step: int) -> float:
    """Milliseconds until a save is durable on an otherwise idle machine."""
    begin = time.perf_counter()
    is_done = save(step)
    while not is_done():
        time.sleep(0.0005)
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What saves cost.")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    training = Training(options.mib)
    size = sum(3 * p.numel() * p.element_size() for p in training.model.parameters())
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        print(json.dumps(measure(folder, training, size, options.rounds)))


def measure(folder: Path, training: Training, size: int, rounds: int) -> dict[str, Any]:
    """Name of a figure -> median in milliseconds."""
    saves = forge_saves(folder, training)
    saves["torch.save, fsync"] = torch_save(folder / "torch", training)
    saves["DCP async, stager reused"] = dcp_async(folder / "dcp", training)
    lightning = lightning_async(folder / "lightning", training)
    if lightning is not None:
        saves["Lightning async"] = lightning
    limits = {"memcpy": memcpy_ms(size), "disk": disk_ms(size, folder / "disk.bin")}
    found: dict[str, list[float]] = {}
    for number in range(0 if rounds > 1 else 1, rounds + 1):
        print(f"saves: round {number} of {rounds}", file=sys.stderr, flush=True)
        names = [*saves, *limits, "forge alone"]
        random.Random(number).shuffle(names)
        for name in names:
            if name in limits:
                row = {name: limits[name]()}
            elif name == "forge alone":
                row = {f"{name}: durable": durable_ms(saves["forge, beside"], 3 * number + 2)}
            else:
                times = measure_save(training, saves[name], 3 * number + 1)
                labels = ("blocks", "lost", "durable")
                row = {f"{name}: {label}": t for label, t in zip(labels, times, strict=True)}
            if number:  # round 0 is a warm-up
                for label, value in row.items():
                    found.setdefault(label, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
