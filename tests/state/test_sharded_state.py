"""Sharded state is not saved yet: it is refused by name, and never loaded in part."""

import json
import subprocess
import sys
import zlib

import pytest
import torch

from forge.checkpoint.format import manifest, tensorfile
from forge.checkpoint.io.arena import Arena
from forge.checkpoint.io.output import write_file
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.tensor_reading import TensorFile
from forge.checkpoint.save.image import Image, room_for
from forge.errors import CheckpointError

REFUSED = """
import sys, warnings
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from forge.checkpoint import Store
from forge.errors import CheckpointError

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh)
for state in (
    {"weights": [distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])]},
    {"model": model.state_dict()},
    {"parameter": model.weight},
):
    try:
        Store.check_savable(state)
    except CheckpointError as error:
        print(error)
dist.destroy_process_group()
"""


def test_a_sharded_tensor_is_refused_by_its_name(tmp_path):
    """Its `data_ptr` and shape say otherwise: saved as it is, a shard would pass for the whole."""
    command = [sys.executable, "-W", "ignore", "-c", REFUSED, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = ("weights[0]", "model.weight", "parameter")
    assert done.stdout.splitlines() == [
        f"{name}: a tensor of the subclass DTensor cannot be saved yet" for name in names
    ]


def add_to_manifest(path, **changes):
    """As if a later forge had saved it."""
    content = json.loads((path / manifest.NAME).read_bytes())
    del content["checksum"]
    content.update(changes)
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (path / manifest.NAME).write_text(json.dumps({**content, "checksum": checksum}))


def test_what_several_ranks_saved_is_not_loaded_in_part(store, commit):
    """Rank 0's files alone read well, and hold a part of the state."""
    commit(store, 1)
    path = commit(store, 2)
    files = json.loads((path / manifest.NAME).read_bytes())["files"]
    other = {}
    for name, entry in files.items():
        renamed = name.replace("rank00000", "rank00001")
        (path / renamed).write_bytes((path / name).read_bytes())
        other[renamed] = entry
    add_to_manifest(path, world_size=2, files={**files, **other})
    with pytest.raises(CheckpointError, match="was saved by 2 ranks, and this job has 1"):
        store.newest()


def test_metadata_of_a_header_that_forge_does_not_know_is_passed_over(tmp_path):
    """Shards will say there where they belong."""
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.complex128)}
    layout = tensorfile.Layout(tensors, {"DCP_SHARDING_INFO": '{"a": {}}', "complex128": "no"})
    image = Image(layout, tensors, Arena(room_for(layout.size)))
    image.fill(tensors)
    with image.readers() as readers:
        entry = write_file(tmp_path / "file", layout.size, readers)
    file = TensorFile(CheckedFile(tmp_path / "file", entry))
    found = {name: torch.empty_like(one, device="cpu") for name, one in file.outline.items()}
    file.read(found, is_whole=True)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
