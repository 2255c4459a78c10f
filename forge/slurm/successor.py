"""A job that Slurm ends and does not bring back, resubmitted: once, whoever is killed meanwhile.

What is about to be submitted is written down before sbatch, with a comment that no other job has.
Whoever finds that note and no number in it asks the queue for the comment before it submits.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from forge.jobdir.job_files import read_json, write_json
from forge.slurm import client

NOTE = "successor.json"
"""`<job dir>/.forge/successor.json`."""


def is_noted(folder: Path, job: str, restarts: int) -> bool:
    """Whether this start of the job was to have a successor."""
    return (read_json(folder / NOTE) or {}).get("of") == [job, restarts]


def submit(folder: Path, script: Path, job: str, restarts: int, options: list[str]) -> str:
    """Submit a job's batch script once more, for this job alone; its new number.

    Args:
        folder: Where the note is kept.
        script: The batch script.
        job: The job's number, `<array>_<task>` in an array.
        restarts: Which start of it is to have a successor.
        options: More options for sbatch.
    Raises:
        Refused: With Slurm's words.
        OSError: Where it could not be written down before.
    """
    path, start = folder / NOTE, [job, restarts]
    note = read_json(path) or {}
    found = None
    if is_noted(folder, job, restarts):
        found = note["job"] or client.find_by_comment(note["comment"])
    else:
        comment = f"{client.comment_of(script)} forge-{secrets.token_hex(8)}".strip()
        note = {"of": start, "comment": comment, "job": None}
        write_json(path, note, is_synced=True)
    if found is None:
        array = os.environ.get("SLURM_ARRAY_TASK_ID")
        options = [*options, f"--comment={note['comment']}"]
        options += [f"--array={array}"] if array else []
        found = client.submit(script, *options)
        found += f"_{array}" if array else ""
    write_json(path, note | {"job": found})
    return str(found)
