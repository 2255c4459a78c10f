"""Resubmits a job that Slurm ends and does not requeue: once, even if a process is killed then.

A note is written before sbatch is called. A process that finds a note without a job number first
looks in the queue for another job with this batch script.
"""

from __future__ import annotations

from pathlib import Path

from forge.jobdir.job_files import read_json, write_json
from forge.slurm import client

NOTE = "successor.json"
"""`<job dir>/.forge/successor.json`."""


def is_noted(folder: Path, job: str, restarts: int) -> bool:
    """Whether there is a note for this start of the job."""
    return (read_json(folder / NOTE) or {}).get("of") == [job, restarts]


def submit(folder: Path, script: Path, job: str, restarts: int, options: list[str]) -> str:
    """Submit a job's batch script again, for this job alone; returns the new number.

    Args:
        folder: The directory of the note.
        script: The batch script.
        job: The job's number, `<array>_<task>` in an array.
        restarts: SLURM_RESTART_COUNT of the start that gets a successor.
        options: More options for sbatch.
    Raises:
        SlurmRefused: If sbatch refuses, with Slurm's message.
        OSError: If the note cannot be written.
    """
    path = folder / NOTE
    found = None
    if is_noted(folder, job, restarts):
        noted = (read_json(path) or {})["job"]
        found = noted or client.resubmitted(job, str(script), client.queue())
    else:
        write_json(path, {"of": [job, restarts], "job": None}, is_synced=True)
    if found is None:
        task = job.partition("_")[2]
        number = client.submit(script, *options, *([f"--array={task}"] if task else []))
        found = f"{number}_{task}" if task else number
    write_json(path, {"of": [job, restarts], "job": found})
    return str(found)
