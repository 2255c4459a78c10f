"""The submissions of a sweep: the files of its jobs, and the record of their Slurm job ids.

<sweep dir>/.forge/slurm/<n>.bundle   all jobs of a submission, since a network disk is slow with
                                      thousands of small files: the launcher writes it, and in the
                                      batch script each job's wrapper unpacks its own job into the
                                      job's directory; its first line is JSON, with the position of
                                      each part
<sweep dir>/.forge/slurm/<n>.sh       the batch script
<sweep dir>/.forge/slurm/jobs.jsonl   two lines for each call of sbatch: before the call, the batch
                                      script and Hydra's numbers of its jobs; after the call, the
                                      script and Slurm's job id

Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.filesystem.files import (
    append,
    make_trusted_directory,
    open_trusted,
    read_if_there,
    read_plain,
)
from forge.jobdir import job_state
from forge.jobdir.job_files import (
    CODE,
    STATE,
    TASK,
    forge_dir,
    is_busy,
    write_atomically,
    write_json,
)
from forge.jobdir.job_state import State
from forge.jobdir.plan import JobPlan, from_json, read_earlier
from forge.slurm.client import Queued

_SUFFIX = ".bundle"


def submissions(sweep: Path) -> Path:
    """The directory in which a sweep records its submissions."""
    return forge_dir(sweep) / "slurm"


class Submitted:
    """The last submission of each job of a sweep.

    Args:
        sweep: The sweep's directory.
        is_looked_at: Whether the record is only shown, so that it does not matter who wrote it.
    """

    def __init__(self, sweep: Path, *, is_looked_at: bool = False) -> None:
        self.sweep = sweep
        self._path = submissions(sweep) / "jobs.jsonl"
        self.ids: dict[int, str] = {}
        """Hydra's number of a job -> its Slurm id: `12`, or `12_3` in an array."""
        self.indices: dict[int, int] = {}
        """Its place in the bundle of its submission."""
        self.scripts: dict[int, str] = {}
        """Path of each job's batch script, which is unique; Slurm reuses ids."""
        self.composed: dict[int, str] = {}
        """Fingerprint of the config with which each job was submitted."""
        self._unanswered: dict[str, list[int]] = {}
        text = _shown(self._path) if is_looked_at else read_if_there(self._path)
        for line in text.split("\n"):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # incomplete after a crash

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever submitted."""
        return not self.ids and not self._unanswered

    def note_request(self, script: Path, numbers: list[int], composed: list[str]) -> None:
        """Record a submission before sbatch: this process can die before Slurm answers."""
        short = [one[:12] for one in composed]
        self._write({"script": str(script), "numbers": numbers, "composed": short})

    def has_changed(self, number: int, composed: str) -> bool:
        """Whether a job's config has changed since its submission."""
        return self.composed.get(number) not in (None, composed[:12])

    def note_answer(self, script: Path, slurm_id: str) -> None:
        """Record Slurm's answer, so that it survives a crash of this process."""
        self._write({"script": str(script), "id": slurm_id})

    def find_lost(self, queue: Mapping[str, Queued]) -> None:
        """Find the ids of submissions without an answer, by the batch scripts in the queue."""
        for name, queued in queue.items():
            if self.is_lost(Path(queued.script)):
                self.note_answer(Path(queued.script), name.partition("_")[0])

    def is_lost(self, script: Path) -> bool:
        """Whether the script was submitted, but Slurm's answer was not received."""
        return str(script) in self._unanswered

    def _take(self, entry: dict[str, Any]) -> None:
        if "numbers" in entry:
            numbers = [int(number) for number in entry["numbers"]]
            self._unanswered[entry["script"]] = numbers
            self.scripts |= dict.fromkeys(numbers, entry["script"])
            self.indices |= {number: index for index, number in enumerate(numbers)}
            self.composed |= dict(zip(numbers, entry["composed"], strict=True))
            return
        numbers, slurm_id = self._unanswered.pop(entry["script"]), entry["id"]
        for index, number in enumerate(numbers):
            self.ids[number] = slurm_id if len(numbers) == 1 else f"{slurm_id}_{index}"

    def _write(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        append(self._path, json.dumps(entry) + "\n")


def _shown(path: Path) -> str:
    try:
        return read_plain(path).decode(errors="replace")
    except FileNotFoundError:
        return ""


# -- the bundle of a submission --------------------------------------------------------------------


def bundle_paths(folder: Path) -> Iterator[Path]:
    """Paths for new bundles: each name is higher than all existing ones, whatever the clock is."""
    names = (path.stem for path in folder.glob(f"*{_SUFFIX}"))
    highest = max((int(name) for name in names if name.isdecimal()), default=0)
    first = max(time.time_ns(), highest + 1)
    return (folder / f"{number:019}{_SUFFIX}" for number in itertools.count(first))


def write_bundle(
    path: Path,
    common: bytes,
    jobs: list[tuple[Path, JobPlan, bytes]],
    code: dict[str, str],
) -> None:
    """Write a bundle.

    Args:
        path: One of `bundle_paths`.
        common: The part that is the same for all jobs, pickled.
        jobs: The directory, the plan and the pickled config of each job.
        code: The fingerprint of the code that starts them (`code.fingerprint`).
    """
    entries, parts, position = [], [common], len(common)
    for directory, plan, config in jobs:
        data = json.dumps(plan.to_json()).encode()
        entries.append([str(directory), position, len(data), len(config)])
        parts += [data, config]
        position += len(data) + len(config)
    content = {"common": len(common), "jobs": entries, "code": code}
    head = json.dumps(content).encode() + b"\n"
    make_trusted_directory(path.parent)
    write_atomically(path, b"".join([head, *parts]), is_synced=True)


def write_unpacked(path: Path, directories: list[Path]) -> None:
    """Write a bundle of jobs that are unpacked already: their plans name this bundle.

    Args:
        path: One of `bundle_paths`.
        directories: The directories of the jobs.
    """
    entries = [[str(directory), 0, 0, 0] for directory in directories]
    content = {"common": 0, "jobs": entries, "code": {}}
    make_trusted_directory(path.parent)
    write_atomically(path, json.dumps(content).encode() + b"\n", is_synced=True)


def read_plan(path: Path, number: int) -> JobPlan:
    """A job's plan."""
    with os.fdopen(open_trusted(path), "rb") as file:
        _, position, size, _ = json.loads(file.readline())["jobs"][number]
        file.seek(position, os.SEEK_CUR)
        return from_json(json.loads(file.read(size)), str(path))


def unpack(path: Path, number: int) -> Path:
    """Write a job's plan and task into the job's directory, unless they are there already.

    The requeue counts of an earlier launch are reset; its checkpoints stay.

    Returns:
        The job's directory.
    """
    with os.fdopen(open_trusted(path), "rb") as file:
        head = json.loads(file.readline())
        begin = file.tell()
        name, position, plan_size, config_size = head["jobs"][number]
        directory = Path(name)
        # Keep the files of a later launch (its bundle has a higher name), and those of a job that
        # is running (somebody has requeued a job of an earlier launch by hand).
        if read_earlier(directory).launch >= path.name or is_busy(directory):
            return directory
        common = file.read(head["common"])
        file.seek(begin + position)
        plan = from_json(json.loads(file.read(plan_size)), str(path))
        config = file.read(config_size)
    make_trusted_directory(forge_dir(directory))
    state = job_state.read(directory)
    if state is None or state.state is not State.finished:
        (forge_dir(directory) / STATE).unlink(missing_ok=True)
    if not (forge_dir(directory) / CODE).exists():  # the first start notes it
        write_json(forge_dir(directory) / CODE, head["code"])
    task = pickle.dumps({"common": common, "config": config})
    write_atomically(forge_dir(directory) / TASK, task)
    code = {} if plan.snapshot else head["code"]  # nobody edits the copy
    plan = replace(plan, code=code, launch=path.name)
    plan.write(directory)  # last: it marks the job as unpacked
    return directory
