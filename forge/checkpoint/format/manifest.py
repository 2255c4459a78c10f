"""The manifest, the last file that a save writes; and the names of the other files.

It lists every other file with its size and the CRC-32 of each chunk, and has a CRC-32 of itself.
There are chunks so that threads can share the writing and the verifying of a file.
A directory is a checkpoint if and only if its manifest is valid and its files match it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge._version import __version__
from forge.errors import CheckpointError, DamagedCheckpoint, NewerFormat
from forge.filesystem import durable
from forge.filesystem.files import open_file, write_all

CHUNK = 16 << 20
"""Bytes per chunk and per write: with writes of 1 MiB, saving takes 2.7 times as long."""

NAME = "manifest.json"
FORMAT = 2
MAX_BYTES = 64 << 20
"""Size limit of a manifest: parsing takes many times as much memory."""
_MAX_TIME = 1e11
"""Limit of a Unix time in seconds, before or after 1970; larger values are damage."""
Logged = Mapping[str, tuple[int, float]]
"""Metric -> the step at which it was last logged, and the value."""
Files = dict[str, dict[str, Any]]
"""Name -> {"size": bytes, "chunks": CRC-32 of `chunk_bytes` each}."""

LATEST = "latest"
"""A relative symlink to the newest checkpoint."""

FINAL = "final_"
"""`final_step_<N>` has the state at the end of main, if it differs from the state after step N.

No job resumes from it: the script's code after the last loop computed it from `step_<N>`.
"""


def _fastest() -> Callable[..., int]:
    """ISA-L's CRC-32, or zlib's if there is no `isal` wheel for the processor: same results."""
    try:
        found: Callable[..., int] = importlib.import_module("isal.isal_zlib").crc32
    except (ImportError, AttributeError):
        return zlib.crc32
    return found


crc32 = _fastest()
"""CRC-32 of bytes, continued from an earlier value. ISA-L does 13 GB/s, plain zlib 1.5."""


def num_chunks(size: int) -> int:
    """Number of chunks of a file of `size` bytes."""
    return -(-size // CHUNK)


def entry_of(content: bytes) -> dict[str, Any]:
    """The manifest's entry for a file with this content."""
    view = memoryview(content)
    chunks = [crc32(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK)]
    return {"size": len(view), "chunks": chunks}


def write_small(path: Path, content: bytes) -> dict[str, Any]:
    """Write a new file and sync it; return its entry for the manifest."""
    with durable.new_file(path) as fd:
        write_all(fd, content)
    return entry_of(content)


def files_of(rank: int) -> tuple[str, str]:
    """The files of one rank in a checkpoint (state, tensors); the manifest is for all ranks."""
    return f"state_rank{rank:05d}.json", f"tensors_rank{rank:05d}.safetensors"


STATE, TENSORS = files_of(0)


@dataclass(frozen=True)
class Origin:
    """The fields of a manifest that training provides."""

    attempt: int = 0
    """Number of the attempt that saves it."""
    job: str = ""
    """The job's id, from the `job.json` in the checkpoint directory."""
    logged: Logged = field(default_factory=dict)
    """The metrics logged up to its step."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's files, and who wrote it when."""

    step: int
    """Steps done."""
    attempt: int
    """Number of the attempt that wrote it."""
    files: Files
    is_complete: bool = False
    """Whether training had finished."""
    chunk_bytes: int = CHUNK
    world_size: int = 1
    job: str = ""
    """The job's id, from the `job.json` in the checkpoint directory."""
    created: float = 0.0
    """Unix time in seconds."""
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float | str] = field(default_factory=dict)
    """Metric -> its last value; a string for NaN and infinities, which JSON does not have."""
    logged_at: dict[str, int] = field(default_factory=dict)
    """Metric -> the step at which it was last logged."""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Encode the manifest.

        Returns:
            The content of the file, its own checksum included.
        Raises:
            CheckpointError: If it is larger than `read` accepts.
        """
        content = asdict(self)
        raw = json.dumps(
            {**content, "checksum": _checksum(content)}, indent=1, allow_nan=False
        ).encode()
        if len(raw) > MAX_BYTES:
            raise CheckpointError(
                f"{NAME} would have {len(raw)} bytes, above the limit of {MAX_BYTES}, because"
                f" run.log got {len(self.metrics)} different names, and {NAME} has the last value"
                " of each. Use the same few names at each step."
            )
        return raw


def metrics_of(logged: Logged) -> dict[str, Any]:
    """The fields of a manifest for the logged metrics."""
    finite = {n: value if math.isfinite(value) else str(value) for n, (_, value) in logged.items()}
    return {"metrics": finite, "logged_at": {name: step for name, (step, _) in logged.items()}}


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    All formats have the same checksum, so that it is verified before the format is read.

    Raises:
        DamagedCheckpoint: Says what is wrong.
        NewerFormat: If only a newer version of forge can read it.
    """
    path = directory / NAME
    try:
        with os.fdopen(open_file(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise DamagedCheckpoint(f"{NAME} has more than {MAX_BYTES} bytes")
            raw = file.read(MAX_BYTES)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {NAME}, so the save did not finish") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(raw)
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise DamagedCheckpoint(f"{NAME} does not match its own checksum")
        if type(content["format"]) is int and content["format"] > FORMAT:
            raise NewerFormat(
                f"{directory} has format {content['format']}, but forge {__version__} only reads"
                f" formats up to {FORMAT}. Nothing was changed. Install the version of forge that"
                " wrote the checkpoint, or a newer version; or move the checkpoint away, to resume"
                " from an older checkpoint."
            )
        if content["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"{NAME} has format {content['format']}; this version of forge reads format"
                f" {FORMAT}"
            )
        manifest = Manifest(**content)
        for key, example in asdict(Manifest(step=0, attempt=0, files={})).items():
            if type(getattr(manifest, key)) is not type(example):  # a step must not be 1.0 or True
                raise DamagedCheckpoint(
                    f"{NAME}: `{key}` is {getattr(manifest, key)!r:.100}; expected a value of type"
                    f" {type(example).__name__}"
                )
        numbers = [[e["size"], *e["chunks"]] for e in manifest.files.values()]
        values, steps = manifest.metrics.values(), manifest.logged_at.values()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read: {error!r}") from error
    # Not more names than there are: a wrong number of ranks can be large.
    ranks = range(min(manifest.world_size, len(manifest.files)))
    expected = [name for rank in ranks for name in files_of(rank)]
    wrong = sorted(manifest.files.keys() ^ set(expected))
    if wrong or len(ranks) != manifest.world_size:
        raise DamagedCheckpoint(
            f"{NAME} does not name two files for each of {manifest.world_size} ranks; missing or"
            f" unexpected: {', '.join(wrong[:4])}"
        )
    if not abs(manifest.created) < _MAX_TIME:
        raise DamagedCheckpoint(f"{NAME} has {manifest.created} as `created`")
    if not all(type(number) is int and number >= 0 for entry in numbers for number in entry):
        raise DamagedCheckpoint(f"{NAME} has a size or checksum that is not a number")
    if not all(type(v) is str or _is_finite(v) for v in values) or {*map(type, steps)} - {int}:
        raise DamagedCheckpoint(f"{NAME} has a metric that is not a number")
    if manifest.chunk_bytes != CHUNK or any(
        num_chunks(entry["size"]) != len(entry["chunks"]) for entry in manifest.files.values()
    ):
        raise DamagedCheckpoint(
            f"{NAME}: the number of checksums does not fit the sizes of the files; expected one for"
            f" each {CHUNK} bytes"
        )
    return manifest


def _is_finite(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless every file exists with its size."""
    for name, expected in manifest.files.items():
        try:
            status = os.lstat(directory / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} is missing: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpoint(f"{name} is not a regular file")
        if status.st_size != expected["size"]:
            raise DamagedCheckpoint(
                f"{name}: expected {expected['size']} bytes, found {status.st_size}"
            )
