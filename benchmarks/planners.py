"""The cost of planning with torch.distributed.checkpoint (DCP) for forge's files.

    python benchmarks/planners.py [--mib N] [--rounds N] [--threads N] [--dir FOLDER]
    python benchmarks/planners.py --sharded

The first command saves a model with its AdamW in a group of one process (gloo): with forge's
`Store`, with the planners (`planned_storage.py`), and with DCP's own writer, interleaved; it prints
medians. The second command saves an FSDP2 model in two processes, loads it in one process and, with
another sharding, in two, and prints how many tensors are equal.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planned_storage import FLAT, LoadPlanner, Reader, SavePlanner, Times, Writer, timed
from saving import Training, disk_ms, memcpy_ms
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.spawn import spawn

from forge.checkpoint import Store
from forge.checkpoint.format import manifest
from forge.checkpoint.format.checksums import entry_of
from forge.checkpoint.format.codec import Encoder
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.io.copying import flat
from forge.checkpoint.io.host_buffer import HostBuffer
from forge.checkpoint.io.output import write_file
from forge.checkpoint.load import reading
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.tensor_reading import TensorFile, TensorPart
from forge.checkpoint.save.staged_file import StagedFile, room_for
from forge.config.schema import CheckpointConfig

State = dict[str, Any]

# -- cost ------------------------------------------------------------------------------------------

PLANNED = ("nested", "nested, cached", "shards", "shards, cached", "shards, kept")
"""DCP flattens a state of plain tensors; or forge's codec walks the state, and DCP plans its
tensors as DTensors. Plans are made each time, taken from DCP's cache, or kept by the saver."""

PARTS = (
    *("encode", "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"),
    *("collectives", "resolve_data", "layout", "fill"),
)
"""The parts of a save for which training waits, in order."""


class Saver:
    """Saves with the planners, one save after the other."""

    def __init__(self, name: str, arena: HostBuffer) -> None:
        self._name = name
        self._writer = Writer(arena)
        self._kept: tuple[Any, SavePlanner] | None = None

    def save(self, state: State, shards: State, folder: Path) -> Times:
        """Save; return the parts in milliseconds."""
        times: Times = {}
        self._writer.times = times
        begin = time.perf_counter()
        if self._name.startswith("shards"):
            with timed(times, "encode"):
                Encoder().encode(state)
            state = shards
        if self._kept is None or not self._save_as_before(state, folder):
            is_cached, is_flat = "cached" in self._name, state is shards
            planner = SavePlanner(times, self._name, is_flat=is_flat, is_cached=is_cached)
            given = {FLAT: state} if is_flat else state
            save(given, checkpoint_id=folder, storage_writer=self._writer, planner=planner)
            if "kept" in self._name:
                self._kept = described(state), planner
        times["durable"] = 1000 * (time.perf_counter() - begin)
        times["blocks"] = 1000 * (self._writer.filled_at - begin)
        times["collectives"] = times["blocks"] - sum(times.get(part, 0.0) for part in PARTS)
        return times

    def _save_as_before(self, state: State, folder: Path) -> bool:
        assert self._kept is not None
        key, planner = self._kept
        if key != described(state):
            return False
        planner.state_dict = state
        self._writer.reset(folder)
        self._writer.set_up_storage_writer(True)
        results = self._writer.write_data(planner.plan, planner).wait()
        self._writer.finish(Metadata({}), [results])
        return True


def described(state: State) -> list[Any]:
    """The properties of a state that determine its plan."""
    return [(name, t.dtype, t.shape, t.placements) for name, t in state.items()]


def measure_load(folder: Path, shards: State) -> Times:
    """Milliseconds of a verified load with the planners, into live tensors."""
    times: Times = {}
    reader = Reader(folder)
    begin = time.perf_counter()
    load({FLAT: shards}, storage_reader=reader, planner=LoadPlanner(times, is_flat=True))
    return {**times, **reader.times, "load": 1000 * (time.perf_counter() - begin)}


def measure(folder: Path, training: Training, rounds: int) -> dict[str, dict[str, float]]:
    """Name of a variant -> name of a part -> median in milliseconds."""
    size = sum(3 * p.numel() * p.element_size() for p in training.model.parameters())
    store = Store(folder / "store", CheckpointConfig(keep_last=1))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    arena = HostBuffer(room_for(size + (1 << 20)))
    savers = {name: Saver(name, arena) for name in PLANNED}
    state, encoder = training.state(), Encoder()
    encoder.encode(state)
    shards = {
        name: DTensor.from_local(t.detach(), mesh, [Shard(0) if t.ndim else Replicate()])
        for name, t in encoder.tensors.items()
    }

    def by_forge(number: int) -> Times:
        times: Times = {}
        begin = time.perf_counter()
        with timed(times, "blocks"):
            snapshot = store.snapshot(number, state, is_complete=False, copy=True)
        path = store.commit(snapshot)
        assert path is not None
        times["durable"] = 1000 * (time.perf_counter() - begin)
        with timed(times, "load"):
            reading.read(path)
        store.retain()
        return times

    def by_planners(name: str) -> Callable[[int], Times]:
        def save_one(number: int) -> Times:
            path = folder / f"planned_{number}"
            times = savers[name].save(state, shards, path)
            if name == "shards":
                times.update(measure_load(path, shards))
            shutil.rmtree(path)
            return times

        return save_one

    def by_dcp(number: int) -> Times:
        times: Times = {}
        path = folder / f"dcp_{number}"
        with timed(times, "durable"):
            save(state, storage_writer=FileSystemWriter(path, sync_files=True))
        shutil.rmtree(path)
        return times

    memcpy, disk = memcpy_ms(size), disk_ms(size, folder / "disk.bin")
    variants: dict[str, Callable[[int], Times]] = {
        "limits": lambda number: {"blocks": memcpy(), "durable": disk()},
        "forge's Store": by_forge,
        **{name: by_planners(name) for name in PLANNED},
        "dcp.save": by_dcp,
    }
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 2):
        for name in random.Random(number).sample(list(variants), len(variants)):
            for part, value in variants[name](number).items():
                if number > 1:  # the first rounds fill caches of plans and of pages
                    found.setdefault(name, {}).setdefault(part, []).append(value)
    store.close()
    dist.destroy_process_group()
    return {
        name: {part: statistics.median(values) for part, values in found[name].items()}
        for name in variants
    }


def show(found: dict[str, dict[str, float]], mib: int) -> None:
    """Print the medians, and their ratios to the limits."""
    memcpy, disk = found["limits"]["blocks"], found["limits"]["durable"]
    print(f"memcpy {memcpy:.1f} ms, disk {disk:.1f} ms\n")
    heads = ("blocks, ms", "/ memcpy", "durable, ms", "/ disk", "load, ms")
    print(f"{'':20}" + "".join(f"{head:>20}" for head in heads))
    for name, parts in found.items():
        if name != "limits":
            blocks, durable = parts.get("blocks"), parts["durable"]
            ratio = blocks / memcpy if blocks is not None else None
            print_row(name, [blocks, ratio, durable, durable / disk, parts.get("load")])
    print("\nms that training waits for, in a save; then a load's\n")
    print(f"{'':20}" + "".join(f"{name:>20}" for name in PLANNED))
    for part in (*PARTS, "headers", "planning", "read_data"):
        print_row(part, [found[name].get(part) for name in PLANNED])
    # Only the copy grows with the bytes: scale it to a state of 1 GiB with as many tensors.
    rest = [found[name]["blocks"] - found[name]["fill"] for name in PLANNED]
    print_row("rest / 1 GiB memcpy", [one / (memcpy * 1024 / mib) for one in rest])


def print_row(name: str, values: list[float | None] | list[float]) -> None:
    """A line of a table."""
    texts = ["-" if value is None else f"{value:.2f}" for value in values]
    print(f"{name:20}" + "".join(f"{text:>20}" for text in texts))


# -- sharded states --------------------------------------------------------------------------------


def sharded_model(mesh: Any, dim: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """An FSDP2 model and its AdamW, after a step; `dim` 1 splits even matrices by columns."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(18, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))

    def place(parameter: torch.nn.Parameter) -> Shard:
        is_even = parameter.ndim > 1 and parameter.shape[1] % 2 == 0  # FSDP2 requires it
        return Shard(dim if is_even else 0)

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 18)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state by full names, as DCP expects it."""
    both = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), both, strict=True))


def whole(state: State) -> dict[str, torch.Tensor]:
    """Every tensor of the state, unsharded."""
    flat, _ = flatten_state_dict(state)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
    }


def count_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """The number of tensors with equal bits, as text."""
    same = sum(
        found[name].numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in expected.items()
    )
    return f"{same} of {len(expected)} tensors bit-identical"


def run_rank(rank: int, folder: Path) -> None:
    """One of two ranks: save, then load with another sharding."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    state = state_of(*sharded_model(mesh, 0))
    expected = whole(state)
    own = {"own": {"generator": torch.full((4,), float(rank))}}
    planner = SavePlanner({}, "sharded", is_flat=False, is_cached=False)
    path = folder / "step_0"
    save({**state, **own}, checkpoint_id=path, storage_writer=Writer(), planner=planner)
    if rank == 0:
        Path(folder, "expected").mkdir()
        layout = Layout(expected)
        image = StagedFile(layout, expected, HostBuffer(room_for(layout.size)))
        image.fill(expected)
        with image.readers() as readers:
            write_file(folder / "expected" / "whole.safetensors", layout.size, readers)
    model, optimizer = sharded_model(mesh, 1)
    other = state_of(model, optimizer)
    for value in whole_values(other):
        value.detach().zero_()
    loaded = {**other, "own": {"generator": torch.zeros(4)}}
    load(loaded, storage_reader=Reader(path), planner=LoadPlanner({}, is_flat=False))
    result = count_same(whole(other), expected)
    kept: list[Any] = [None, None]
    dist.all_gather_object(kept, loaded["own"]["generator"][0].item())
    if rank == 0:
        print(f"two ranks, the other dimension: {result}")
        print(f"a plain tensor that was [0.0, 1.0] on the two came back as {kept}")
    dist.barrier()
    dist.destroy_process_group()


def whole_values(state: State) -> Iterator[torch.Tensor]:
    """Every tensor of the state, without gathering shards."""
    flat, _ = flatten_state_dict(state)
    return (value for value in flat.values() if isinstance(value, torch.Tensor))


def check_sharded(folder: Path) -> None:
    """Save in two processes; load in two and in one."""
    spawn(run_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    path = folder / "step_0"
    described = manifest.read(path)
    print(f"world size {described.world_size}: {', '.join(sorted(described.files))}")
    whole = folder / "expected" / "whole.safetensors"
    opened = TensorFile(CheckedFile(whole, entry_of(whole.read_bytes())))
    expected = {name: torch.empty_like(t, device="cpu") for name, t in opened.outline.items()}
    opened.read_parts([TensorPart(n, 0, flat(t)) for n, t in expected.items()], is_whole=False)
    for name, reader in (
        ("forge's", Reader(path)),
        ("torch's", HuggingFaceStorageReader(str(path))),
    ):
        found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        planner = LoadPlanner({}, is_flat=True)
        load({FLAT: found}, storage_reader=reader, planner=planner, no_dist=True)
        print(f"one rank, {name} reader: {count_same(found, expected)}")
    damaged = bytearray((path / "tensors_rank00001.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "tensors_rank00001.safetensors").write_bytes(damaged)
    try:
        planner = LoadPlanner({}, is_flat=True)
        load({FLAT: found}, storage_reader=Reader(path), planner=planner, no_dist=True)
    except CheckpointException as error:
        print(f"one flipped bit: {error.failures[0][0]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="DCP's planners over forge's files.")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    parser.add_argument("--sharded", action="store_true", help="save and load an FSDP2 model")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        if options.sharded:
            check_sharded(Path(name))
        else:
            found = measure(Path(name), Training(options.mib), options.rounds)
            show(found, options.mib)


if __name__ == "__main__":
    main()
