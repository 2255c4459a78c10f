"""A job that Slurm ends and does not bring back, resubmitted: once, whoever is killed meanwhile.

What is about to be submitted is written down before sbatch. Whoever finds that note, and no number
in it, asks the queue for another job with this batch script before it submits.
"""

from __future__ import annotations

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
        SlurmRefused: With Slurm's words.
        OSError: Where it could not be written down before.
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
