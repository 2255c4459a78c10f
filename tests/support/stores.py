"""Small checkpoints, what their files are called, and what a store has to hold."""

import json
import zlib

import torch

from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import Origin

STATE, TENSORS = "state_rank00000.json", "tensors_rank00000.safetensors"


def leftovers(directory):
    """What is hidden there, but for the lock, the token and an empty work directory."""
    hidden = [p for p in directory.iterdir() if p.name.startswith(".")]
    hidden = [p for p in hidden if p.name not in (".lock", ".lock.kept", ".fence.json")]
    return [p.name for p in hidden if not p.name.startswith(".work_") or any(p.iterdir())]


def assert_holds(store, step, state_of):
    found = store.newest()
    assert found.manifest.step == step
    assert found.state["step"] == step
    assert torch.equal(found.state["weights"], state_of(step)["weights"])


def state_of(step):
    """A state that tells its step, and has a tensor that is not tiny."""
    return {"step": step, "weights": torch.full((64,), float(step)), "names": ["a", "b"]}


def commit(store, step, logged=None):
    origin = Origin(logged=logged or {})
    return store.commit(store.snapshot(step, state_of(step), copy=False, origin=origin))


def rewrite_manifest(path, **changes):
    """As an attacker, or a bug, would: with a checksum that matches."""
    content = json.loads((path / manifest.NAME).read_bytes())
    del content["checksum"]
    content.update(changes)
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (path / manifest.NAME).write_text(json.dumps({**content, "checksum": checksum}))
