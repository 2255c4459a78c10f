"""What becomes of jobs that a cluster, or somebody on it, once lost: one table.

    python tests/proofs/lost_jobs.py

Runs the tests that do it, on their own clusters, and watches: Slurm's states over time, Restarts,
what each job's wrapper counted and why, the steps that were trained again, the final bits.
Exits with 1 where a test fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import wait_for
from showcase_jobs import stops, table
from slurm_apps import SlurmApp, SlurmJob
from sweeps import SweptJob, assert_same_job

from forge.jobdir import ledger

HERE = Path(__file__).parents[1]
TESTS = (
    "proofs/test_lost_jobs.py",
    "slurm/test_no_room_slurm.py",
    "launch/slurm/test_without_policy.py",
    "launch/slurm/test_waiting.py::test_a_full_queue_is_said_in_sbatch_s_own_words_and_waited_for",
    "launch/slurm/test_waiting.py::test_why_jobs_wait_is_said_and_what_to_do_about_it",
)
DONE = {
    "removed": "preempted, PreemptMode=CANCEL, GraceTime=0",
    "anew": "the same, and Requeue=0; then forge resume",
    "withdrawn": "scancel in that partition",
    "lost": "node lost with everything on it",
    "full": "scancel --full --signal=TERM",
    "script": "batch shell killed",
    "stepd": "slurmstepd of the step killed",
    "extended": "TimeLimit 1 min extended to 10",
    "patient": "slurmctld away, back within the allocation",
    "left": "slurmctld away beyond the allocation of 1 min; then forge resume",
    "test_a_job_without_room_for_its_checkpoint_waits_in_the_queue_and_resumes": "disk full",
    "test_a_preempted_job_without_a_policy_comes_back_where_slurm_brings_it_back": "no policy,"
    " preempted",
    "test_a_function_without_a_run_finishes_however_often_it_is_preempted": "function without a Run"
    " preempted three times",
    "test_a_full_queue_is_said_in_sbatch_s_own_words_and_waited_for": "queue full at submission",
    "test_why_jobs_wait_is_said_and_what_to_do_about_it": "PartitionDown, afterok of a failed job",
}
"""A job's kind, or the test that it is of -> what was done to it."""
HEADER = (
    *("what was done", "Slurm's states, s after the job was seen first", "Restarts"),
    *("attempts", "why each ended", "counted", "steps repeated", "weights and losses"),
)
COUNTED = ("preemptions", "timeouts", "failures", "early_evictions")
LOOK_S = 0.3
SILENT_S = 3.0


class Watched:
    """Asks a sweep's cluster for the states of all jobs until the sweep is closed."""

    def __init__(self, app: SlurmApp) -> None:
        self.app = app
        self.states: dict[str, list[tuple[float, str]]] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        form = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
        while not self._has_ended.wait(LOOK_S):
            began, lines = time.monotonic(), []
            with contextlib.suppress(Exception):  # the cluster ends, or is away for a minute
                lines = self.app.cluster.run("squeue", *form).splitlines()
            took_s = time.monotonic() - began
            for seen in self._alive() if took_s > SILENT_S else ():
                seen.append((began, f"(no answer for {took_s:.0f} s)"))
            for line in lines:
                self._take(*line.strip().split("|"))

    def _alive(self) -> list[list[tuple[float, str]]]:
        words = ("PENDING", "RUNNING", "COMPLETING")
        return [seen for seen in self.states.values() if seen[-1][1].startswith(words)]

    def _take(self, job: str, state: str, reason: str) -> None:
        if state == "PENDING" and reason not in ("None", "Priority"):
            state += f" {reason}"
        seen = self.states.setdefault(job, [])
        if not seen or seen[-1][1] != state:
            seen.append((time.monotonic(), state))

    def rows(self, test: str, undisturbed: SweptJob) -> list[list[str]]:
        """One for each job of the sweep, at its end."""
        with contextlib.suppress(AssertionError):  # its launcher does not wait for Slurm's end
            wait_for(lambda: not self._alive(), "end of all jobs", 10)
        self._has_ended.set()
        self._thread.join()
        jobs, kinds = self.app.jobs_by_place(), list(self.app.jobs())
        names = kinds if set(kinds) <= DONE.keys() else [test] * len(jobs)
        pairs = [pair for pair in zip(names, jobs, strict=True) if pair[1].state]  # has begun
        return [self._row(DONE[name], job, undisturbed) for name, job in pairs]

    def _row(self, done: str, job: SlurmJob, undisturbed: SweptJob) -> list[str]:
        attempts = ledger.read(job.directory).attempts
        told = [one for one in job.told if "because" in one]
        counted = [f"{name} {job.counts[name]}" for name in COUNTED if job.counts[name]]
        try:
            assert_same_job(job, undisturbed)
            result = "IDENTICAL"
        except AssertionError:
            result = "DIFFERENT"
        except FileNotFoundError:
            result = "-"
        return [
            done,
            self._seen(job.slurm_id),
            job.shown.get("Restarts", "-"),
            str(sum(one["kind"] == "attempt" for one in job.told)),
            ", ".join(one["because"] for one in told),
            ", ".join(counted) or "-",
            ", ".join(str(one.repeated) for one in stops(attempts)) or "-",
            result,
        ]

    def _seen(self, job: str) -> str:
        seen = self.states.get(job, [])
        return f"{job}: " + ", ".join(f"{state} {at - seen[0][0]:.0f}" for at, state in seen)


def main() -> int:
    rows: list[list[str]] = []
    watched: dict[SlurmApp, Watched] = {}
    make, close = SlurmApp.__init__, SlurmApp.close

    def begin(app: SlurmApp, *given: Any, **named: Any) -> None:
        make(app, *given, **named)
        watched[app] = Watched(app)

    def end(app: SlurmApp) -> None:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
        rows.extend(watched[app].rows(test.partition("[")[0], undisturbed))
        close(app)

    with (
        tempfile.TemporaryDirectory(prefix="forge-lost-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        undisturbed = SweptJob(Path(folder, "run", "undisturbed_slurm", "app", "sweep", "0"))
        patch.setattr(SlurmApp, "__init__", begin)
        patch.setattr(SlurmApp, "close", end)
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/run"]
        code = pytest.main([*options, *(str(HERE / one) for one in TESTS)])
    print(f"\n{table(rows, HEADER)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
