"""One sweep of `examples/train.py` on a true cluster, with everything done to it that Slurm can do.

    python tests/proofs/showcase.py [--keep]

Eight jobs train on the two nodes of a throwaway cluster. Two urgent jobs preempt those on n2, some
with 10 s of grace time, some with none; one of these jobs is cancelled in the middle of the save
that the preemption led to. On n1 a job comes to its time limit, a task is killed, a job is
cancelled. Six have to finish with the bits and losses of undisturbed runs, two stay cancelled, and
every requeue happens exactly once. Exits with 1 otherwise.

A job that is at its place before it is struck is suspended (SIGSTOP), so that nothing depends on
how fast a machine is; Slurm's own SIGCONT, which comes with each of its signals, wakes it.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from harness import Process
from showcase_jobs import CASES, OPTIONS, Facts, Job, jobs_of, problems_of, row, summary, table
from slurm_apps import urgent

from forge.process import processes

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
STEPS = 250
PLACES = (60, 130)
"""Steps after which the first and the second urgent job come; the others are struck early, too."""
COMMON = (
    f"steps={STEPS}",
    "data.max_bytes=150_000",  # quicker to read
    "resilience.signal.warning_s=60",  # of two minutes: it comes 30 s to 60 s after a start
    "resilience.shutdown.timeout_s=8",
)
STALL_S = 180.0
MISSED = "the moment was missed, which says nothing of forge (start the drill again)"
"""A drill in which nothing moves for so long has failed."""
LOOK_S = 2.0


def overrides(seeds: list[int]) -> list[str]:
    """The sweep's: seeds, and the options of each job for sbatch."""
    found = [f"seed={','.join(map(str, seeds))}", *COMMON]
    for key, name in OPTIONS.items():
        values = ",".join(str(getattr(case, name)) for case in CASES)
        found.append(f"+{name}_of=[{values}]")
        found.append(f"resilience.slurm.{key}='${{oc.select:{name}_of.${{seed}}}}'")
    return found


def start(folder: Path, launcher: list[str], seeds: list[int], **env: str) -> Process:
    """Start a sweep; its jobs lie in `folder`, what the launcher prints beside it."""
    command = [sys.executable, str(TRAIN), "-m", *launcher, "hydra.launcher.progress=plain"]
    command += [*overrides(seeds), f"hydra.sweep.dir={folder}"]
    print(f"\n$ {shlex.join(command)}", flush=True)
    return Process(command, folder.with_suffix(".txt"), folder.parent, **env)


class Drill:
    """The sweep on the cluster, and what is done to it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        outer = {name: "" for name in os.environ if name.startswith(("SLURM", "SBATCH"))}
        environment = outer | cluster.environment
        self.began = time.monotonic()
        seeds = list(range(len(CASES)))
        self.launcher = start(folder / "sweep", ["hydra/launcher=slurm"], seeds, **environment)
        self.jobs: dict[int, Job] = {}
        self.num_urgent = dict.fromkeys(seeds, 0)
        self._due: list[tuple[Job, int, int, Callable[[Job], None]]] = []
        """(job, attempt, step, what is done to it then)."""
        self._moved = time.monotonic()
        self._seen: object = None
        self._said: dict[int, str] = {}
        self._looked = 0.0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def run(self) -> None:
        """The whole story, to the end of the launcher."""
        self._until(lambda: len(self.jobs) == len(CASES), "the jobs")
        on_n2 = [job for job in self.jobs.values() if job.case.node == "n2"]
        self._due = [(job, 1, PLACES[0], self._suspend) for job in on_n2]
        slow, limited, killed, cancelled = (
            next(job for job in self.jobs.values() if job.case.fate == fate)
            for fate in ("cancelled while it saves", "time limit", "killed", "cancelled")
        )
        self._due.append((limited, 1, PLACES[0], self._suspend))
        self._due.append((killed, 1, PLACES[0] + 10, self._kill))
        self._due.append((cancelled, 1, PLACES[0] + 10, self._cancel))
        self._until(lambda: all(job is limited for job, *_ in self._due), "everybody's place")
        self._preempt(on_n2)
        self._cancel_in_its_save(slow)
        on_n2.remove(slow)
        self._due += [(job, 2, PLACES[1], self._suspend) for job in on_n2]
        self._until(lambda: all(job is limited for job, *_ in self._due), "those preempted")
        self._preempt(on_n2)
        self._until(lambda: self.launcher.popen.poll() is not None, "the end of the sweep")
        self.say(f"the launcher ends with {self.launcher.popen.returncode}")
        self._until(lambda: all(job.shown_last for job in self.jobs.values()), "Slurm's word")
        for stop in limited.stop_events():
            limited.blows.append(
                (f"time limit of 2 min, {stop.get('signal', 'no signal')}", stop["step"])
            )

    # -- what is done --------------------------------------------------------------------------

    def _suspend(self, job: Job) -> None:
        assert processes.send(job.task, signal.SIGSTOP)

    def _kill(self, job: Job) -> None:
        assert processes.send(job.task, signal.SIGKILL)
        self._tell(job, "SIGKILL of its task")

    def _cancel(self, job: Job) -> None:
        job.scancel()
        self._tell(job, "scancel")

    def _preempt(self, jobs: list[Job]) -> None:
        """An urgent job for the whole of n2."""
        for job in jobs:
            grace_s = 0 if job.case.partition == "zero" else 10
            self._tell(job, f"preempted, GraceTime {grace_s} s")
            self.num_urgent[job.number] += 1
        urgent(self.cluster, self.folder, "--nodelist=n2")

    def _cancel_in_its_save(self, job: Job) -> None:
        """It stands still before the notice of its preemption, so the next save is for that."""
        task = job.task  # found now: to look for it takes as long as a save
        deadline = time.monotonic() + STALL_S
        while not job.saving():
            assert time.monotonic() < deadline, "no save after the notice"
            select.select([], [], [], 0.0005)
        assert processes.send(task, signal.SIGSTOP), f"{MISSED}: its task is gone"
        wait_for(job.is_suspended, "its task to stand still")
        half, shown = job.saving(), job.shown
        assert half, f"{MISSED}: it had saved before it could be suspended"
        assert shown["JobState"] == "RUNNING", shown
        assert shown["PreemptTime"] not in ("None", "N/A"), shown
        job.scancel()
        self._tell(job, f"scancel while {half.partition('.tmp')[0].lstrip('.')} is half written")
        self.num_urgent[job.number] = 0  # which would have been one requeue

    def _tell(self, job: Job, what: str) -> None:
        step = job.stand()[1]
        job.blows.append((what, step))
        self.say(f"job {job.number}: {what}, at step {step}")

    # -- waiting -------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Look after all jobs until something is true; give up only where nothing moves."""
        while not condition():
            self._poll()
            for one in list(self._due):
                job, attempt, step, act = one
                has, done = job.stand()
                if has >= attempt and done >= step:
                    self._due.remove(one)
                    act(job)
            seen = [(job.stand(), job.state.get("state")) for job in self.jobs.values()]
            if seen != self._seen:
                self._seen, self._moved = seen, time.monotonic()
            stalled_s = time.monotonic() - self._moved
            assert stalled_s < STALL_S, f"nothing moves; waited for {what}"
            select.select([], [], [], 0.02)  # files that others write tell nobody

    def _poll(self) -> None:
        for number, job in jobs_of(self.folder / "sweep", self.cluster).items():
            self.jobs.setdefault(number, job)
        self.jobs = dict(sorted(self.jobs.items()))
        for job in self.jobs.values():
            state = job.state
            said = f"{state.get('state', '')}: {state.get('because', '')}".removesuffix(": ")
            if state and said != self._said.get(job.number):
                self._said[job.number] = said
                self.say(f"job {job.number}: {said}")
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            for job in self.jobs.values():
                job.poll()

    # -- the end -------------------------------------------------------------------------------

    def problems(self, facts: dict[int, Facts], undisturbed: dict[int, Facts]) -> list[str]:
        """Everything that is not as it has to be."""
        found = [
            f"job {number}: {problem}"
            for number, one in facts.items()
            for problem in problems_of(
                CASES[number], one, undisturbed.get(number), self.num_urgent[number]
            )
        ]
        if any(len(one.metrics) != STEPS for one in undisturbed.values()):
            found.append(f"not {STEPS} steps were logged")
        if self.launcher.popen.returncode != 1 or "6 of 8 finished" not in self.launcher.output:
            found.append(f"the launcher does not report what became:\n{self.launcher.output}")
        try:
            wait_for(lambda: not self.cluster.run("squeue", "--noheader"), "empty queue")
            wait_for(lambda: not any(j.marked for j in self.jobs.values()), "end of all processes")
        except AssertionError as error:
            found.append(str(error))
        return found


def run_undisturbed(folder: Path) -> dict[int, Facts]:
    """The six that finish, with the same overrides on this machine, by seed."""
    seeds = [seed for seed, case in enumerate(CASES) if not case.dies]
    launcher = ["hydra/launcher=local", "hydra.launcher.n_jobs=2"]
    process = start(folder / "undisturbed", launcher, seeds)
    try:
        assert process.wait(900) == 0, process.output
    finally:
        process.signal(signal.SIGTERM)
        process.wait(60)
    return {number: job.facts() for number, job in jobs_of(folder / "undisturbed", None).items()}


def show(folder: Path) -> list[str]:
    """Everything; returns what is not as it has to be."""
    undisturbed = run_undisturbed(folder)
    cluster = Cluster(folder / "slurm")
    drill = None
    try:
        drill = Drill(cluster, folder)
        drill.run()
        facts = {number: job.facts() for number, job in drill.jobs.items()}
        problems = drill.problems(facts, undisturbed)
        rows = [row(job, facts[n], undisturbed.get(n)) for n, job in drill.jobs.items()]
        print(f"\n{table(rows)}\n\n{summary(list(facts.values()))}")
        took_s = time.monotonic() - drill.began
    finally:
        if drill is not None:
            drill.launcher.signal(signal.SIGKILL)
            drill.launcher.wait(60)
        cluster.stop()
    left = processes.marked("SLURM_CONF", cluster.environment["SLURM_CONF"])
    if left:
        problems.append(f"processes are left: {left}")
    print(f"The sweep took {took_s:.0f} s; processes that are left of it: {len(left)}.")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep what was written, always")
    options = parser.parse_args()
    if problem := missing():
        print(problem)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="forge-showcase-"))
    print(f"Everything is below {folder}")
    try:
        problems = show(folder)
    except AssertionError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"UNEXPECTED: {problem}")
    if problems or options.keep:
        print(f"Kept: {folder}")
    else:
        shutil.rmtree(folder)
        print("Everything held.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
