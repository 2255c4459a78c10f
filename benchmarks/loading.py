"""How long a load takes: forge's, verified, torch.load's and safetensors', interleaved.

    python benchmarks/loading.py [--mib N] [--rounds N] [--threads N] [--dir FOLDER] [--json]

The state is a model and its AdamW. "rollback" puts a checkpoint back into objects that have
trained; "resume" into a model whose AdamW is new, so that its averages need memory first. "cold"
begins without the file in the page cache. Ratios are to torch.load and load_state_dict. Limits:

    read once          the bytes, into memory that is there, or two thirds of them into new memory
                       where the averages need it
    checked, then read the same, but no byte reaches what is live before all have been checked: all
                       are read and summed, then those that belong there are read again
    load_state_dict    torch's own part, for a state whose tensors are in their places already
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import files
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import TENSORS
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.state import restoring
from forge.state.registry import StateRegistry

try:
    import safetensors.torch
except ImportError:
    safetensors = None  # type: ignore[assignment]

NUM_TENSORS = 134
"""Parameters; AdamW adds two averages of each, and a counter."""

Objects = tuple[torch.nn.Module, torch.optim.Optimizer]
Load = Callable[[Objects], None]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long a load takes.")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch and of forge; by default their own")
    parser.add_argument("--json", action="store_true", help="milliseconds on one line")
    parser.add_argument("--dir", help="where the files are; a temporary folder by default")
    options = parser.parse_args()
    if options.threads:
        vars(files)["num_threads"] = lambda: int(options.threads)
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measure(Path(folder), options.mib, options.rounds)
    if options.json:
        print(json.dumps({f"load, {c}: {n}": 1000 * found[c, n][0] for c, n in found}))
        return
    print(f"medians of {options.rounds} interleaved rounds, {options.mib} MiB\n")
    print(f"{'':53}{'ms':>9}{'ratio':>8}")
    for (case, name), (median_s, ratio) in found.items():
        print(f"{case + ': ' + name:53}{1000 * median_s:9.1f}{ratio:8.2f}")


def measure(folder: Path, mib: int, rounds: int) -> dict[tuple[str, str], tuple[float, float]]:
    """(case, name) -> median seconds, and the median of the ratios to torch.load's."""
    trained = make(mib)
    variants = prepare(folder, trained)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(0 if rounds > 1 else 1, rounds + 1):
        for case in ("warm resume", "warm rollback", "cold resume", "cold rollback"):
            names = list(variants)
            random.Random(number).shuffle(names)
            for name in names:
                path, load = variants[name]
                new = trained[0], torch.optim.AdamW(trained[0].parameters())
                drop(path) if "cold" in case else warm(path)
                begin = time.perf_counter()
                load(trained if "rollback" in case else new)
                if number:  # round 0 imports and compiles; one round has none before it
                    times.setdefault((case, name), []).append(time.perf_counter() - begin)
    found = {}
    for (case, name), column in sorted(times.items()):
        base = times[case, "torch.load"]
        ratios = [one / other for one, other in zip(column, base, strict=True)]
        found[case, name] = statistics.median(column), statistics.median(ratios)
    return found


def make(mib: int) -> Objects:
    """A model and its AdamW which have trained, `mib` MiB in all."""
    width = int((mib * 2**20 / 4 / 3 / NUM_TENSORS) ** 0.5)
    model = torch.nn.ParameterList(torch.randn(width, width) for _ in range(NUM_TENSORS))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def prepare(folder: Path, objects: Objects) -> dict[str, tuple[Path, Load]]:
    """Name -> the file with the state, and a function that loads it."""
    model, optimizer = objects
    variants: dict[str, tuple[Path, Load]] = {}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / "state.pt"
    torch.save(state, path)

    def with_torch(objects: Objects) -> None:
        _put(torch.load(folder / "state.pt", weights_only=True), objects)

    variants["torch.load"] = path, with_torch
    if safetensors is not None:
        variants["safetensors, unverified"] = _with_safetensors(folder / "flat", state)
    live = StateRegistry({"model": model, "optimizer": optimizer})
    store = Store(folder / "checkpoints", CheckpointConfig())
    taken = {"live": live.capture()}
    where = store.commit(store.snapshot(1, taken, copy=False))
    assert where is not None
    file = where / TENSORS
    variants["forge, verified"] = file, lambda objects: _with_forge(store, objects)
    entry = manifest.read(where).files[TENSORS]
    variants["limit: the bytes, read once"] = file, _limit(file, entry, times=1)
    variants["limit: the bytes, checked, then read"] = file, _limit(file, entry, times=2)
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    variants["limit: load_state_dict alone"] = path, lambda objects: _put(held, objects)
    return variants


def _limit(path: Path, entry: dict[str, Any], times: int) -> Load:
    """All bytes to where they belong, in as many threads; those that are live at the last time."""
    size = entry["size"]
    memory = torch.zeros(size, dtype=torch.uint8)

    def load(objects: Objects) -> None:
        end = size if objects[1].state else size // 3
        file = files.CheckedFile(path, entry)
        live = [files.Target(0, memory[:end])]
        new = [files.Target(end, torch.empty(size - end, dtype=torch.uint8))]
        file.read(new if times > 1 else live + new)
        if times > 1:
            file.read(live)
        file.close()

    return load


def _put(state: dict[str, Any], objects: Objects) -> None:
    objects[0].load_state_dict(state["model"])
    objects[1].load_state_dict(state["optimizer"])


def _with_safetensors(path: Path, state: dict[str, Any]) -> tuple[Path, Load]:
    tensors = {f"model.{key}": tensor for key, tensor in state["model"].items()}
    for number, one in state["optimizer"]["state"].items():
        tensors |= {f"state.{number}.{key}": tensor for key, tensor in one.items()}
    safetensors.torch.save_file(tensors, path)

    def load(objects: Objects) -> None:
        found = safetensors.torch.load_file(path)
        _put(
            {
                "model": {key: found[f"model.{key}"] for key in state["model"]},
                "optimizer": {
                    "state": {
                        number: {key: found[f"state.{number}.{key}"] for key in one}
                        for number, one in state["optimizer"]["state"].items()
                    },
                    "param_groups": state["optimizer"]["param_groups"],
                },
            },
            objects,
        )

    return path, load


def _with_forge(store: Store, objects: Objects) -> None:
    live = StateRegistry({"model": objects[0], "optimizer": objects[1]})
    found = store.newest(offer=lambda state: restoring.in_place_targets(live, state["live"]))
    assert found is not None
    restoring.load(live, found.state["live"], found.fill())


def warm(path: Path) -> None:
    """Bring the file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def drop(path: Path) -> None:
    """Take the file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


if __name__ == "__main__":
    main()
