"""All jobs of one submission in one file: a network disk is slow with thousands of small files.

The launcher writes the file. In the batch script, each job's wrapper unpacks its own job into the
job's directory. The first line of the file is JSON and lists the position of each part. The file is
written atomically. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from forge.filesystem.files import make_trusted_directory, open_trusted
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

_SUFFIX = ".bundle"


def paths(folder: Path) -> Iterator[Path]:
    """Paths for new bundles: each name is higher than all existing ones, whatever the clock is."""
    names = (path.stem for path in folder.glob(f"*{_SUFFIX}"))
    highest = max((int(name) for name in names if name.isdecimal()), default=0)
    first = max(time.time_ns(), highest + 1)
    return (folder / f"{number:019}{_SUFFIX}" for number in itertools.count(first))


def write(
    path: Path,
    common: bytes,
    jobs: list[tuple[Path, JobPlan, bytes]],
    code: dict[str, str],
) -> None:
    """Write a bundle.

    Args:
        path: One of `paths`.
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
        path: One of `paths`.
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
    is_kept = state is not None and (state.state is State.finished or "unrequeued" in state.backend)
    if not is_kept:
        (forge_dir(directory) / STATE).unlink(missing_ok=True)
    if not (forge_dir(directory) / CODE).exists():  # the first start notes it
        write_json(forge_dir(directory) / CODE, head["code"])
    task = pickle.dumps({"common": common, "config": config})
    write_atomically(forge_dir(directory) / TASK, task)
    code = {} if plan.snapshot else head["code"]  # nobody edits the copy
    plan = replace(plan, code=code, launch=path.name)
    plan.write(directory)  # last: it marks the job as unpacked
    return directory
