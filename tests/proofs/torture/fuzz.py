"""Checkpoints whose checksums match and whose content no forge has written: bugs, and attackers.

The manifest, the state and the header of the tensor file are mutated, as trees and as text, with
everything that vouches for them computed anew. Whatever comes of it is a checkpoint or a
CheckpointError, soon and within little memory.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torture import children, scenario
from torture.children import Counts, Plan
from torture.damage import within_memory

from forge.checkpoint.format.manifest import NAME as MANIFEST
from forge.checkpoint.format.manifest import STATE, TENSORS, Manifest, entry_of, num_chunks
from forge.errors import CheckpointError

MUTANTS = 4000
"""Of each of the three."""

PATIENCE_S = 120


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


ODD = [
    *(None, True, -1, 0, 1, 1 << 31, 1 << 62, 1 << 70, -(1 << 70), 1.5, 1e308, float("nan")),
    *(float("inf"), "", "x" * 1000, "../../etc/passwd", "/dev/zero", "\ud800", "\0", "!tensor"),
    *([], {}, [[]], [1 << 40, 1], {"a": 1}, [None] * 50, nested(50), nested(300, "dict")),
    *(nested(depth) for depth in (450, 600)),
    *({"!tensor": "weights", "stride": stride} for stride in ([1 << 40, 1], [0, 0], [-1, 1], 3)),
    *({"!tensor": "weights", "device": device} for device in ("xpu", "mps", "meta", "cuda:9", 7)),
    *({"!tensor": name} for name in ("nothing", None, [], {})),
    *({"!int": text} for text in ("0x" + "f" * 100_000, "x", None, 3)),
    *({"!float": text} for text in ("nan", "1" * 100_000, None, [])),
    *({"!size": value} for value in ([1 << 70], [-1], "ab", None)),
    *({"!numpy_scalar": v} for v in (["<f8", ""], ["O", "AAAAAAAAAAA="], ["<f8", "AA=="], [], 1)),
    *({"!ndarray": v, "bytes": {"!tensor": "weights"}} for v in (["<f8", [1 << 60]], ["O", [1]])),
    *({"!ndarray": v, "bytes": {"!tensor": "mask"}} for v in (["V0", [1]], ["<f4", [-5]], 0)),
    *({"!device": v} for v in ("cuda:99999", "cpu:-5", "", 5, None, "meta")),
    *({"!dtype": v} for v in ("nn", "os", "float33", None, "_inductor", "onnx")),
    *({"!complex": v} for v in ([1], [1, 2, 3], ["a", "b"], None)),
    *({f"!{k}": v} for k in ("Counter", "dict", "OrderedDict") for v in ([[[], 1]], [1], 5, "ab")),
    *({f"!{k}": v} for k in ("set", "tuple", "frozenset") for v in ([[]], [{}], 5, "ab")),
    *({f"!{k}": v} for k in ("bytes", "bytearray") for v in ("§", "A", 5, None, [300])),
    {"!nothing": 1},
    {"size": 1, "chunks": [1]},
    {"size": 1 << 40, "chunks": [0] * (1 << 16)},
]


def rich_state() -> dict[str, Any]:
    """One of every kind of value that there is."""
    return {
        **scenario.state_of(2, "b"),
        "array": numpy.arange(6.0).reshape(2, 3),
        "scalar": numpy.float32(3),
        "complex": torch.ones(3, dtype=torch.complex128) * 2j,
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "plain": [1 << 300, float("nan"), 2j, b"ab", bytearray(b"c"), torch.float16],
        "classes": [torch.device("cpu"), torch.Size([2]), {1: 2}, {3}],
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "empty": torch.empty(0, 4),
    }


def _copy(tree: Any) -> Any:
    return json.loads(json.dumps(tree))  # copy.deepcopy takes no deep ones


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(tree, dict | list) and len(path) < 100:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += _places(value, (*path, key))
    return found


def mutate(tree: Any, rng: random.Random) -> Any:
    """One to three changes to a JSON tree."""
    tree = _copy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places or rng.random() < 0.01:
            return _copy(rng.choice(ODD))
        *above, key = rng.choice(places)
        parent = tree
        for step in above:
            parent = parent[step]
        kind = rng.randrange(8)
        odd = _copy(rng.choice(ODD))
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[str(rng.choice(ODD))[:200]] = parent.pop(key)
        elif kind == 2 and isinstance(parent, dict):
            parent[str(rng.choice(ODD))[:200]] = odd
        elif kind == 3 and isinstance(parent, list):
            parent.insert(key, odd)
        elif kind == 4 and type(parent[key]) is int:
            parent[key] += rng.choice((-1, 1, 7, -parent[key] * 2, 1 << 40))
        elif kind == 5:
            other = tree
            for step in rng.choice(places):
                other = other[step] if _has(other, step) else other
            parent[key] = _copy(other)
        else:
            parent[key] = odd
    return tree


def _has(tree: Any, key: Any) -> bool:
    return key in tree if isinstance(tree, dict) else isinstance(tree, list) and key < len(tree)


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    """Changes that no tree shows: keys twice, odd bytes, deep nesting, cut off."""
    kind, place = rng.randrange(6), rng.randrange(len(text))
    if kind == 0:
        key = rng.choice((b'"step": 9,', b'"size": -1,', b'"data_offsets": [0, 4],', b'"a": 1,'))
        brace = text.find(b"{", place)
        return text[: brace + 1] + key + text[brace + 1 :]
    if kind == 1:
        depth = rng.choice((500, 5000, 100_000))
        return text[:place] + rng.choice((b"[", b'{"a":')) * depth + text[place:]
    if kind == 2:
        return text[:place] + rng.randbytes(3) + text[place + 3 :]
    if kind == 3:
        return text[:place] + text[rng.randrange(len(text)) :]
    if kind == 4:
        return text[:place] + rng.choice((b"NaN", b"1e999", b"9" * 5000, b"-0")) + text[place:]
    return text.replace(b"0", rng.choice((b"1", b"-1", b"0.0", b"[]")), rng.randrange(1, 5))


class Bench:
    """One checkpoint, whose files are put together anew for each mutant."""

    def __init__(self, directory: Path) -> None:
        self.store = scenario.open_store(directory)
        snapshot = self.store.snapshot(2, rich_state(), copy=False)
        self.path = self.store.commit(snapshot)
        self.files = {name: (self.path / name).read_bytes() for name in (STATE, TENSORS)}
        self.manifest = json.loads((self.path / MANIFEST).read_bytes())
        del self.manifest["checksum"]
        self.expected = self.store.read(self.path).state

    def put(self, name: str, content: bytes) -> None:
        """A file, and a manifest that says of it what is true."""
        files = {**self.manifest["files"], name: entry_of(content)}
        known = {**self.manifest, "files": files}
        (self.path / MANIFEST).write_bytes(Manifest(**known).to_bytes())
        for other, pristine in self.files.items():
            (self.path / other).write_bytes(content if other == name else pristine)

    def put_manifest(self, text: bytes) -> None:
        """A manifest with the checksum that belongs to it, if it can be read at all."""
        try:
            content = json.loads(text)
            content.pop("checksum", None)
            checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
            position = text.rindex(b"}")
            text = text[:position] + b', "checksum": %d' % checksum + text[position:]
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass
        (self.path / MANIFEST).write_bytes(text)

    def read(self, is_exact: bool) -> str:
        """`told` or `read`; with `is_exact` only the same values may be read."""
        signal.alarm(PATIENCE_S)
        try:
            self.store.holds(2)
            found = self.store.read(self.path)
        except CheckpointError:
            return "told"
        finally:
            signal.alarm(0)
        if is_exact:
            assert repr(found.state) == repr(self.expected), "other values in silence"
            described = found.manifest
            assert (type(described.step), described.step) == (int, 2)
            assert type(described.is_complete) is bool
            assert type(described.attempt) is int
            assert type(described.job) is str
        return "read"


def _all(plan: Plan) -> Counts:
    counts = Counts()
    bench = Bench(plan.root / "checkpoints")
    plan.break_forge()
    rng = random.Random(plan.seed)
    tensors = bench.files[TENSORS]
    length = int.from_bytes(tensors[:8], "little")
    header, body = tensors[8 : 8 + length], tensors[8 + length :]

    def with_header(text: bytes) -> None:
        claimed = len(text) if rng.random() < 0.95 else rng.choice((0, 1, 1 << 40, 1 << 63))
        bench.put(TENSORS, claimed.to_bytes(8, "little") + text + body)

    def matching(size: int) -> None:
        """Files as large as the manifest says: nothing but memory is missing."""
        entry = {"size": size, "chunks": [0] * num_chunks(size)}
        for name in bench.files:
            files = {**bench.manifest["files"], name: entry}
            bench.put_manifest(json.dumps({**bench.manifest, "files": files}).encode())
            os.truncate(bench.path / name, size)
            assert bench.read(is_exact=True) == "told"
            bench.put(name, bench.files[name])

    matching(1 << 37)
    targets: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
        "manifest": (json.dumps(bench.manifest).encode(), bench.put_manifest),
        "state": (bench.files[STATE], lambda text: bench.put(STATE, text)),
        "header": (header, with_header),
    }
    for name, (text, put) in targets.items():
        tree = json.loads(text)
        for number in range(MUTANTS):
            if plan.skips(rng, counts):
                continue
            content = (
                json.dumps(mutate(tree, rng)).encode() if number % 4 else mutate_text(text, rng)
            )
            put(content)
            try:
                outcome = bench.read(is_exact=name == "manifest")
                counts.add(**{f"{name}_{outcome}": 1})
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no CheckpointError
                counts.add(**{f"{name}_failed": 1})
                shown = content[:300] if len(content) < 5000 else content[:60]
                trace = children.traceback.format_exc(limit=-2)
                counts.failures.append(f"{name} {number}: {error!r} {trace} of {shown!r}")
    bench.store.close()
    assert os.path.isdir(plan.root)
    return counts


def run(plan: Plan) -> Counts:
    """Read mutants, in a process that cannot have much more memory."""
    counts = Counts()
    counts.take(children.in_child(within_memory, lambda: _all(plan), timeout_s=3600.0))
    return counts
