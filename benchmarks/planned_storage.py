"""Storage for torch.distributed.checkpoint (DCP) that writes forge's files. An experiment.

Each rank writes a safetensors file and a JSON file; there is a manifest, and no pickle. The header
of each rank's tensors has the offset of its shard and the size of the whole tensor, under the same
keys as torch's own safetensors writer, so that DCP's planners can read it on any number of ranks.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from forge.checkpoint.format import manifest, tensorfile
from forge.checkpoint.format.codec import Encoder, decode
from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.io.copying import flat
from forge.checkpoint.io.host_buffer import HostBuffer
from forge.checkpoint.io.output import write_file
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.tensor_reading import TensorFile, TensorPart
from forge.checkpoint.save.staged_file import StagedFile, room_for
from forge.filesystem import durable

SHARDS = "DCP_SHARDING_INFO"
"""Key of the header's metadata under which torch's own writer of safetensors keeps the offsets."""

FLAT = "tensors"
"""Key of a flat dictionary of tensors, since DCP takes half a millisecond per top-level key."""

Times = dict[str, float]


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Add the milliseconds of the block to `times[name]`."""
    begin = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + 1000 * (time.perf_counter() - begin)


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, but values other than tensors become JSON instead of pickles; timed."""

    def __init__(self, times: Times, label: str, *, is_flat: bool, is_cached: bool) -> None:
        super().__init__(flatten_state_dict=not is_flat, enable_plan_caching=is_cached)
        self._cached_plans_key = label  # the cache is global: a key per state
        self._is_flat = is_flat
        self._times = times

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Flatten the state."""
        with timed(self._times, "set_up_planner"):
            state_dict = state_dict[FLAT] if self._is_flat else state_dict
            super().set_up_planner(state_dict, *args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        """Plan the tensors of this rank."""
        with timed(self._times, "create_local_plan"):
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan the tensors that each rank writes."""
        with timed(self._times, "create_global_plan"):
            return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the plan of this rank."""
        with timed(self._times, "finish_plan"):
            return super().finish_plan(new_plan)

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Encode a value other than a tensor as JSON; raises if it would need a pickle."""
        if isinstance(object, torch.Tensor):
            return object
        encoder = Encoder()
        tree = encoder.encode(object, write_item.index.fqn)
        assert not encoder.tensors, f"{write_item.index.fqn} holds tensors in a value of its own"
        return io.BytesIO(json.dumps(tree).encode())


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, but with JSON instead of pickles; timed."""

    def __init__(self, times: Times, *, is_flat: bool) -> None:
        super().__init__(flatten_state_dict=not is_flat)
        self._is_flat = is_flat
        self._times = times

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Flatten the state."""
        with timed(self._times, "planning"):
            state_dict = state_dict[FLAT] if self._is_flat else state_dict
            super().set_up_planner(state_dict, *args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        """Plan the tensors that this rank reads."""
        with timed(self._times, "planning"):
            return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a value other than a tensor, without executing code from the file."""
        pickled = io.BytesIO()
        torch.save(decode(json.loads(value.getvalue()), {}), pickled)  # for DCP's planner
        pickled.seek(0)
        super().load_bytes(read_item, pickled)


class Writer(StorageWriter):
    """Writes the files of forge."""

    def __init__(self, arena: HostBuffer | None = None) -> None:
        self.times: Times = {}
        self.folder = Path()
        self.filled_at = 0.0
        self._rank = 0
        self._arena = arena
        self._key: Any = None
        self._image: StagedFile | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a checkpoint."""
        self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self._rank = kwargs.get("rank", 0)
        self.folder.mkdir(exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Copy the planned tensors, then write them."""
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, Any] = {}
        shards: dict[str, dict[str, list[int]]] = {}
        with timed(self.times, "resolve_data"), torch.no_grad():
            for item in plan.items:
                name, data = item.index.fqn, planner.resolve_data(item)
                assert name not in tensors, f"{name}: several shards of it on one rank"
                if item.tensor_data is None:
                    texts[name] = json.loads(data.getvalue())
                    continue
                tensors[name] = data
                shards[name] = {
                    "saved_offsets": list(item.tensor_data.chunk.offsets),
                    "global_shape": list(item.tensor_data.size),
                }
        with timed(self.times, "layout"):
            image = self._image_of(tensors, shards)
        with timed(self.times, "fill"):
            image.fill(tensors)
        self.filled_at = time.perf_counter()
        with timed(self.times, "write_file"):
            files = self._write(image, texts)
        results = [WriteResult(item.index, 0, files) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _image_of(self, tensors: dict[str, torch.Tensor], shards: Any) -> StagedFile:
        key = [(name, t.dtype, t.shape) for name, t in tensors.items()], shards
        if self._image is None or key != self._key:
            layout = Layout(tensors, {SHARDS: json.dumps(shards), "DCP_VERSION": "1.0"})
            if self._arena is None:
                self._arena = HostBuffer(room_for(layout.size))
            self._image = StagedFile(layout, tensors, self._arena)
            self._key = key
        head, arena = self._image.layout.head, self._arena
        assert arena is not None
        arena.memory[: len(head)] = head  # another writer can have used the buffer
        return self._image

    def _write(self, image: StagedFile, texts: dict[str, Any]) -> dict[str, Any]:
        names = f"tensors_rank{self._rank:05}.safetensors", f"state_rank{self._rank:05}.json"
        with image.readers() as readers:
            tensors = write_file(self.folder / names[0], image.layout.size, readers)
        tree = tensorfile.write_small(self.folder / names[1], json.dumps(texts).encode())
        return dict(zip(names, (tensors, tree), strict=True))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest; DCP's metadata is dropped, since the files contain all of it."""
        files = {name: entry for r in results for name, entry in r[0].storage_data.items()}
        described = Manifest(step=0, attempt=0, files=files, world_size=len(results))
        tensorfile.write_small(self.folder / manifest.NAME, described.to_bytes())
        durable.sync_directory(self.folder)
        durable.sync_directory(self.folder.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept folders."""
        return True


class Reader(StorageReader):
    """Reads and verifies forge's files on any number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.times: Times = {}
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}
        self._holder: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader has no state."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Build DCP's metadata from the manifest and the headers."""
        with timed(self.times, "headers"):
            self._files = manifest.read(self._folder).files
            found: dict[str, Any] = {}
            for file in self._files:
                if file.endswith(".json"):
                    for name in json.loads((self._folder / file).read_bytes()):
                        found[name] = BytesStorageMetadata()
                        self._holder[MetadataIndex(name)] = file
                else:
                    self._add_shards(file, found)
            return Metadata(found)

    def _add_shards(self, file: str, found: dict[str, Any]) -> None:
        with open(self._folder / file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shards = json.loads(header.pop("__metadata__")[SHARDS])
        for name, entry in header.items():
            offsets = torch.Size(shards[name]["saved_offsets"])
            properties = TensorProperties(dtype=tensorfile.DTYPES[entry["dtype"]])
            size = torch.Size(shards[name]["global_shape"])
            whole = found.setdefault(name, TensorStorageMetadata(properties, size, []))
            whole.chunks.append(ChunkStorageMetadata(offsets, torch.Size(entry["shape"])))
            self._holder[MetadataIndex(name, offsets)] = file

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read each file with data of the plan; raises if a checksum is wrong."""
        with timed(self.times, "read_data"):
            by_file: dict[str, list[Any]] = {}
            for item in plan.items:
                by_file.setdefault(self._holder[item.storage_index], []).append(item)
            for file, items in by_file.items():
                opened = CheckedFile(self._folder / file, self._files[file])
                if file.endswith(".json"):
                    texts = json.loads(opened.content())
                    for item in items:
                        assert item.type is LoadItemType.BYTE_IO
                        text = json.dumps(texts[item.storage_index.fqn])
                        planner.load_bytes(item, io.BytesIO(text.encode()))
                else:
                    held = TensorFile(opened)
                    tensors = {
                        n: torch.empty_like(t, device="cpu") for n, t in held.outline.items()
                    }
                    held.read_parts(
                        [TensorPart(n, 0, flat(t)) for n, t in tensors.items()], is_whole=True
                    )
                    self._copy(tensors, items, planner)
                opened.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @staticmethod
    def _copy(tensors: dict[str, torch.Tensor], items: list[Any], planner: Any) -> None:
        for item in items:
            places = zip(item.storage_offsets, item.lengths, strict=True)
            source = tensors[item.storage_index.fqn][tuple(slice(a, a + n) for a, n in places)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept folders."""
        return True
