"""Checkpoints read in place, into live tensors: the same bits as with copies, and not too early.

One module, since every kind of object, layout and device has to keep the same promise, and the
tests share the models and helpers that check it.
"""

import os

import pytest
import torch
from forked import completed
from placed import adam, aliases, bits, content, newest, pair, resume, save, tensors_of
from stores import TENSORS
from torch import nn

from forge.checkpoint import files
from forge.checkpoint.format import tensor_encoding
from forge.checkpoint.format.manifest import entry_of
from forge.config.schema import Verify
from forge.errors import DamagedCheckpoint
from forge.state import restoring
from forge.state.registry import StateRegistry

# -- where the bytes go ----------------------------------------------------------------------------


@pytest.mark.parametrize("verify", Verify)
def test_live_tensors_are_filled_where_they_are_and_not_before(small_chunks, open_store, verify):
    """The load makes no second copy of the model, and changes no tensor before all is verified."""
    store = open_store(verify=verify)
    old, new = pair(1), pair(2)
    save(store, old)
    before, addresses = content(new), [t.data_ptr() for t in tensors_of(new.capture())]
    found = newest(store, new)
    assert content(new) == before != content(old)
    model = found.state["live"]["states"]["model"]
    assert model["0.weight"].data_ptr() == new.objects["model"][0].weight.data_ptr()
    restoring.load(new, found.state["live"], found.fill())
    assert content(new) == content(old)
    # Counters of the optimizer, and of a module with its own loading code, can be replaced.
    large = [t for t in tensors_of(new.capture()) if t.numel() > 40]
    assert {t.data_ptr() for t in large} <= set(addresses)


def test_a_large_checkpoint_is_read_once_where_sizes_are_enough(
    small_chunks, open_store, monkeypatch
):
    """`verify=size` exists for that: a file larger than the memory is not in the page cache."""
    store = open_store(verify=Verify.size)
    save(store, pair(1))
    read, preadv = [], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: read.append(preadv(fd, views, at)) or read[-1]
    )
    newest(store, pair(2)).fill()
    assert sum(read) < 1.5 * sum(path.stat().st_size for path in store.directory.glob("step_*/*"))


def test_a_new_optimizer_keeps_what_was_read_for_it(small_chunks, store):
    """A copy would double the memory of the optimizer's state, two thirds of the whole state."""
    old, new = pair(1), pair(2, num_steps=0)
    save(store, old)
    found = newest(store, new)
    restoring.load(new, found.state["live"], found.fill())
    assert content(new) == content(old)
    saved = found.state["live"]["states"]["optimizer"]["state"]
    for number, state in enumerate(new.objects["optimizer"].state.values()):
        for key, tensor in state.items():
            assert tensor.data_ptr() == saved[number][key].data_ptr()
            # torch.save writes whole storages, and kernels like aligned memory.
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            assert tensor.data_ptr() % 64 == 0
    new.objects["optimizer"].step()


def test_large_tensors_of_odd_sizes_are_read_right_and_can_grow(store):
    """Large tensors are read directly to their destination, at any alignment in file and memory."""
    torch.manual_seed(1)
    memory = torch.randint(256, (5 << 20,), dtype=torch.uint8)
    sizes = [3, (2 << 20) + 77, 70_001, 3, (1 << 20) + 1]
    live = {f"{n}": memory[7 * n :][:size].clone() for n, size in enumerate(sizes)}
    store.commit(store.snapshot(1, live, copy=True))
    targets = {
        name: torch.zeros_like(memory)[n : n + len(live[name])] for n, name in enumerate("013")
    }
    found = store.newest(offer=lambda state: [(state[name], targets[name]) for name in targets])
    found.fill()
    for name, value in live.items():
        assert torch.equal(found.state[name], value)
    assert all(torch.equal(targets[name], live[name]) for name in targets)
    found.state["4"].resize_(3 << 20)


class Average:
    """Has references to the weights of a module, and a tensor of its own."""

    def __init__(self, model):
        self.weights = [p.detach() for p in model.parameters()]
        self.own = torch.rand(300)

    def state_dict(self):
        return {"weights": self.weights, "own": self.own}

    def load_state_dict(self, state):
        assert not torch.equal(state["own"], self.own), "overwritten before it was asked"
        self.weights, self.own = state["weights"], state["own"]


class Odd(nn.Module):
    """Unusual tensors: strides, dtypes, views, empty, and buffers that are not persistent."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.rand(20, 30).t())
        self.narrow = nn.Parameter(torch.rand(20, 30)[:, 3:9])
        self.short = nn.Parameter(torch.rand(40, 5).bfloat16())
        self.broad = nn.Parameter(torch.rand(9, 9, dtype=torch.complex128))
        self.register_buffer("conj", torch.rand(5, dtype=torch.complex64).conj())
        self.register_buffer("empty", torch.rand(0, 3))
        self.register_buffer("mask", torch.rand(100) > 0.5)
        self.register_buffer("count", torch.randint(9, ()))
        self.register_buffer("expanded", torch.rand(1).expand(7).clone())
        self.register_buffer("gone", torch.rand(3), persistent=False)


class OneThird(nn.Module):
    """A module with its own loading code."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 3 + self.weight.detach()
        super()._load_from_state_dict(state_dict, prefix, *args)


def tied(is_tied=True):
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def flat(size):
    """Two parameters in one memory, overlapping if `size` is below 200."""
    memory = torch.rand(400)
    model = nn.Module()
    model.b = nn.Parameter(memory[:200])
    model.a = nn.Parameter(memory[size : size + 200])
    return model


def with_average():
    model = nn.Linear(30, 30)
    return {"average": Average(model), "model": model}


def with_gradients():
    model = nn.Linear(30, 30)
    model.weight.grad = torch.rand(30, 30)
    model.bias.requires_grad_(False)
    return {"model": model}


def wide_averages():
    model = nn.Linear(30, 30).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    shared = torch.rand(30, 30)
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "a": shared, "b": shared}
    return {"model": model, "optimizer": optimizer}


def hooked():
    model = nn.Linear(30, 30)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}weight": module.weight * 2})
    )
    model.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.update(
            {f"{prefix}weight": state[f"{prefix}weight"] / 2}
        )
    )
    return {"model": model}


def swapped():
    """The state dict has each value under the key of the other."""
    model = nn.ParameterDict({"a": torch.rand(30), "b": torch.rand(30)})

    def swap(state, prefix):
        state[f"{prefix}a"], state[f"{prefix}b"] = state[f"{prefix}b"], state[f"{prefix}a"]

    model.register_state_dict_post_hook(lambda _, state, prefix, *rest: swap(state, prefix))
    model.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: swap(state, prefix))
    return model


def swapped_below():
    """A tied tensor can also be reached by a name that the hook does not change."""
    model = nn.ModuleDict({"inner": swapped(), "outer": nn.Linear(3, 3)})
    model["again"] = nn.ParameterDict({"c": model["inner"]["a"]})
    return {"m": model}


CASES = {
    "usual": (lambda: pair(0).objects, lambda: pair(1).objects),
    "new optimizer": (lambda: pair(0).objects, lambda: pair(1, num_steps=0).objects),
    "odd": (lambda: {"m": Odd()}, lambda: {"m": Odd()}),
    "strides differ": (
        lambda: {"m": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)},
        lambda: {"m": nn.Conv2d(3, 8, 3)},
    ),
    "strides differ back": (
        lambda: {"m": nn.Conv2d(3, 8, 3)},
        lambda: {"m": nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)},
    ),
    "tied": (lambda: {"m": tied()}, lambda: {"m": tied()}),
    "one memory": (lambda: {"m": flat(200)}, lambda: {"m": flat(200)}),
    "own class": (with_average, with_average),
    "gradients": (with_gradients, with_gradients),
    "wide averages": (wide_averages, wide_averages),
    "own loading": (lambda: {"m": OneThird()}, lambda: {"m": OneThird()}),
    "hooks": (hooked, hooked),
    "hooks that exchange": (lambda: {"m": swapped()}, lambda: {"m": swapped()}),
    "hooks that exchange, below": (swapped_below, swapped_below),
    "the same twice": (
        lambda: dict.fromkeys("ab", nn.Linear(30, 30)),
        lambda: dict.fromkeys("ab", nn.Linear(30, 30)),
    ),
    "array in extra state": (lambda: {"m": Array()}, lambda: {"m": Array()}),
    "generator": (
        lambda: {"g": torch.Generator().manual_seed(1)},
        lambda: {"g": torch.Generator().manual_seed(2)},
    ),
}


class Array(nn.Module):
    """A module with extra state in an array, which has no description without its data."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2000))
        self.array = torch.rand(50).numpy()

    def get_extra_state(self):
        return self.array

    def set_extra_state(self, state):
        self.array = state


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_by_copies(small_chunks, store, case):
    """Unusual objects take the slow path, and the result must still be the same."""
    old, new = CASES[case]
    torch.manual_seed(1)
    save(store, StateRegistry(old()))
    found = []
    for load in (resume, lambda store, live: restoring.load(live, store.newest().state["live"])):
        torch.manual_seed(2)
        live = StateRegistry(new())
        begin = content(live)
        load(store, live)
        assert content(live) != begin
        found.append((content(live), aliases(live), str(live.capture())))
    assert found[0] == found[1]


def test_hooks_that_exchange_keys_lose_nothing(store):
    """If the load wrote in place, both keys would get the value of the second one."""
    old, new = swapped(), swapped()
    save(store, StateRegistry({"m": old}))
    resume(store, StateRegistry({"m": new}))
    assert [bits(p) for p in new.values()] == [bits(p) for p in old.values()]


@pytest.mark.parametrize("kind", ["method", "class"])
def test_who_loads_in_a_way_of_its_own_gets_memory_of_its_own(store, kind):
    """The object's own code can compare the old values with the new ones, or refuse the state."""
    model = nn.Linear(3, 3)
    if kind == "method":
        model.load_state_dict = lambda state: None
    else:
        model.__class__ = type("Own", (nn.Linear,), {"load_state_dict": lambda self, state: None})
    live = StateRegistry({"m": model})
    save(store, live)
    assert restoring.in_place_targets(live, live.capture()) == []
    live = StateRegistry({"m": nn.Linear(3, 3)})
    assert len(restoring.in_place_targets(live, live.capture())) == 2


# -- devices, threads, memory ----------------------------------------------------------------------


def test_a_device_gets_its_bytes_through_a_buffer(small_chunks, store, monkeypatch):
    """Tensors larger than the buffer arrive complete, too."""
    live = StateRegistry({"m": nn.ParameterList([torch.rand(5000), torch.rand(7, 3)])})
    path = save(store, live) / TENSORS
    entry = entry_of(path.read_bytes())
    file = files.TensorsFile(path, entry)
    targets = {name: torch.zeros(one.shape) for name, one in file.entries.items()}
    copied = []

    def copy_bytes(target, source):
        """Replaces the copy to a device, whose memory the CPU cannot write to directly."""
        copied.append(len(source))
        target.copy_(source)

    monkeypatch.setattr(files, "copy_bytes", copy_bytes)
    memory = {file.entries[name].begin: tensor_encoding.flat(one) for name, one in targets.items()}
    file.read([files.Target(*one) for one in memory.items()])
    assert max(copied) <= 1 << 9  # what `small_chunks` reads at once
    saved = live.capture()["states"]["m"]
    assert [bits(targets[f"live.states.m.{key}"]) for key in "01"] == [
        bits(saved[key]) for key in "01"
    ]
    file.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_steps", [0, 1])
def test_tensors_on_a_gpu_are_filled_where_they_are(store, num_steps):
    """The CPU cannot read a file directly into their memory."""
    torch.manual_seed(1)
    model = nn.Linear(3000, 2000).cuda()
    old = StateRegistry({"m": model, "o": adam(model)})
    save(store, old)
    other = nn.Linear(3000, 2000).cuda()
    new = StateRegistry({"m": other, "o": adam(other, num_steps)})
    addresses = [p.data_ptr() for p in other.parameters()]
    resume(store, new)
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert str(new.capture()) == str(old.capture())
    for one, two in zip(tensors_of(new.capture()), tensors_of(old.capture()), strict=True):
        assert torch.equal(one, two)


def test_gaps_between_pieces_are_checksummed_as_well(small_chunks, tmp_path):
    """Bytes that no target needs are still part of the checksum of the file."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(20_000))
    entry = entry_of(path.read_bytes())
    file = files.CheckedFile(path, entry)
    places = [(0, 3), (3, 4), (100, 700), (4090, 4100), (8192, 16384), (19_999, 20_000)]
    memory = [bytearray(end - begin) for begin, end in places]
    pieces = [
        files.Target(begin, torch.frombuffer(one, dtype=torch.uint8))
        for (begin, _), one in zip(places, memory, strict=True)
    ]
    file.read(pieces)
    assert memory == [path.read_bytes()[begin:end] for begin, end in places]
    changed = bytearray(path.read_bytes())
    changed[50] ^= 1
    path.write_bytes(changed)
    with pytest.raises(DamagedCheckpoint, match="for the 4096 bytes at offset 0,"):
        file.read(pieces)
    file.close()


PEAK = """
import sys
from pathlib import Path
import torch
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.state import restoring
from forge.state.registry import StateRegistry

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def build():
    model = torch.nn.ParameterList(torch.ones(1024, 1024) for _ in range(12))
    return model, torch.optim.AdamW(model.parameters())

way, directory = sys.argv[1:]
model, optimizer = build()
store = Store(Path(directory), CheckpointConfig())
live = StateRegistry({"model": model, "optimizer": optimizer})
if way == "save":
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    store.commit(store.snapshot(1, {"live": live.capture()}, copy=False))
    torch.save([model.state_dict(), optimizer.state_dict()], directory + ".pt")
    sys.exit()
before = peak()
if way == "forge":
    found = store.newest(offer=lambda state: restoring.in_place_targets(live, state["live"]))
    restoring.load(live, found.state["live"], found.fill())
else:
    for one, state in zip((model, optimizer), torch.load(directory + ".pt"), strict=True):
        one.load_state_dict(state)
print((peak() - before) >> 10)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_peak_of_a_load_is_the_state_that_was_not_there_yet(tmp_path):
    """A model that just fits into memory has to resume: 48 MiB here, with 96 MiB of averages."""

    def run(way):
        done = completed(["-c", PEAK, way, str(tmp_path / "checkpoints")], tmp_path)
        assert done.returncode == 0, done.stdout
        return done.stdout

    run("save")
    assert int(run("torch")) > 130, "the measure sees a second copy"
    assert int(run("forge")) < 96 + 24
