"""Chaos for the local launcher: sweeps whose processes are killed, and started again to the end.

    python tests/proofs/chaos_sweeps.py 100 --seed 1 --parallel 1

Each sweep of four short jobs is hit by up to five rounds of SIGKILL at moments drawn from the
seed: on a task, a process below one, a supervisor, a wrapper, the launcher; or on several at one
instant, up to all. Whenever the launcher is gone the same command is started again, until it ends
with 0. Then every job must have the very bits and metrics of an undisturbed run (with Hydra's own
launcher), no two attempts of a job may have run at the same time, and no process may be left.
Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from harness import JOBS, Process, assert_same_bits

from forge.jobdir import ledger
from forge.jobdir.job_files import PLAN, STATE, TOKEN, forge_dir, read_json
from forge.process import processes

SCRIPT = JOBS / "sweep.py"
POOL = {"lr": ("0.01", "0.03"), "seed": ("1", "2"), "workers": ("0", "1")}
SWEEPS = (
    ("lr=0.01,0.03", "seed=1,2", "workers=1"),
    ("lr=0.03", "seed=1,2", "workers=0,1"),
    ("lr=0.01,0.03", "seed=2", "workers=1,0"),
    ("lr=0.01,0.03", "seed=1,2", "workers=0"),
)
RULE = "resilience.requeue.rules=[{exit_codes:[1],max_restarts:50}]"
"""Without it a job whose worker is killed has failed, and the sweep's next start resumes."""
TARGETS: dict[str, tuple[str, ...]] = {
    "task": ("task",),
    "child": ("child",),
    "supervisor": ("supervisor",),
    "wrapper": ("wrapper",),
    "launcher": ("launcher",),
    "wrapper+supervisor": ("wrapper", "supervisor"),
    "supervisor+task": ("supervisor", "task"),
    "launcher+wrapper": ("wrapper", "launcher"),
    "whole job": ("wrapper", "supervisor", "task", "child"),
    "everything": ("launcher", "wrapper", "supervisor", "task", "child"),
}
"""What each kind hits; its first is there, the others where they live at that instant."""
ONE_JOB = {"wrapper+supervisor", "supervisor+task", "launcher+wrapper", "whole job"}
"""Kinds that hit the processes of one job (beside the launcher); 'everything' hits all jobs."""
MARK = "FORGE_CHAOS"
AWAITED_S = 3.0
"""So long a hit waits for what it is meant for; then it is a task's."""
ORPHAN_S = 3.0
"""A wrapper without its launcher has to notice within so many seconds."""
MAX_STARTS = 30
PATIENCE_S = 420
LEAVING_S = 10.0


@dataclass(frozen=True)
class Found:
    """A live process of a sweep."""

    pid: int
    kind: str
    job: str
    """The job's directory; empty for the launcher."""
    parent: int


@dataclass(frozen=True)
class Hit:
    """One round of SIGKILL, drawn before anything runs."""

    kind: str
    delay_s: float
    awaited: str
    """Counts the delay from the birth of such a process; empty: from the hit before."""
    pick: float


@dataclass
class Outcome:
    """What one sweep went through."""

    number: int
    hits: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    attempts: int = 0
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Sweep:
    """One sweep's directory and command, started again and again."""

    def __init__(self, directory: Path, overrides: tuple[str, ...]) -> None:
        self.directory = directory
        self.output = directory.with_name(f"{directory.name}.txt")
        self.mark = uuid.uuid4().hex
        launcher = ("hydra/launcher=local", "hydra.launcher.n_jobs=2")
        self.command = [sys.executable, str(SCRIPT), "-m", *launcher]
        self.command += ["hydra.launcher.progress=plain", f"hydra.sweep.dir={directory}"]
        self.command += overrides

    def start(self) -> Process:
        return Process(self.command, self.output, cwd=JOBS, **{MARK: self.mark})

    @property
    def jobs(self) -> list[Path]:
        return sorted(path.parent.parent for path in self.directory.glob(f"*/.forge/{PLAN}"))

    def processes(self) -> list[Found]:
        """Every live process that the sweep has started, by what it is."""
        found: list[Found] = []
        for pid in processes.marked(MARK, self.mark):
            try:
                raw = Path("/proc", str(pid), "cmdline").read_bytes()
                stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
            except OSError:
                continue
            command = raw.decode(errors="replace").split("\0")
            state, parent, _, session = stat.rpartition(")")[2].split()[:4]
            if state in "ZX":
                continue
            if any("from forge.job.local import" in word for word in command):
                kind = "wrapper" if session == str(pid) else "supervisor"
            elif any("from forge.launch.task import" in word for word in command):
                kind = "child" if "forge.launch.task" in _command_of(parent) else "task"
            else:
                kind = "launcher" if session == str(pid) else "child"
            job = self._job_in(command) or self._job_in(_command_of(session).split("\0"))
            found.append(Found(pid, kind, job, int(parent)))
        return found

    def _job_in(self, words: list[str]) -> str:
        return next((one for one in words if one.startswith(f"{self.directory}{os.sep}")), "")


def _command_of(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def draw(rng: random.Random) -> list[Hit]:
    """The hits of one sweep."""
    hits = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice([*TARGETS, "launcher"])
        # Births are over in an instant, and are where little is in order yet.
        awaited = rng.choice(("", "launcher", "wrapper", "wrapper", "supervisor", "task"))
        most_s = rng.choice((0.02, 0.1, 0.5, 3.0)) if awaited else 6.0
        delay_s = rng.uniform(0, most_s)
        hits.append(Hit(kind, delay_s, awaited, rng.random()))
    return hits


def disturb(sweep: Sweep, hits: list[Hit], rng: random.Random, outcome: Outcome) -> None:
    """Run the sweep to its end, through all its hits."""
    waiting = list(hits)
    process: Process | None = None
    seen: set[int] = set()
    due: float | None = None
    last = began = time.monotonic()
    restart_at = 0.0
    orphans: dict[int, float] = {}
    while time.monotonic() - began < PATIENCE_S:
        if process is None and time.monotonic() >= restart_at:
            assert len(outcome.codes) < MAX_STARTS, f"exit codes {outcome.codes}"
            process = sweep.start()
        elif process is not None and process.popen.poll() is not None:
            outcome.codes.append(process.popen.returncode)
            if outcome.codes[-1] == 0:
                return
            process = None
            restart_at = time.monotonic() + rng.choice((0.0, 0.0, rng.uniform(0, 2)))
        now = time.monotonic()
        is_watching = waiting or orphans or now - last < 2 * ORPHAN_S
        live = sweep.processes() if is_watching else []
        launchers = {one.pid for one in live if one.kind == "launcher"}
        orphans = {
            one.pid: orphans.get(one.pid, now)
            for one in live
            if one.kind == "wrapper" and one.parent not in launchers
        }
        for one in live:
            if now - orphans.get(one.pid, now) > ORPHAN_S:
                state = read_json(forge_dir(one.job) / STATE) or {}
                if state.get("pid") == one.pid and state["state"] == "running":
                    raise AssertionError(f"no launcher for {ORPHAN_S} s, and goes on: {one}")
        if waiting and due is None:
            is_born = any(o.kind == waiting[0].awaited and o.pid not in seen for o in live)
            if is_born or not waiting[0].awaited or now - last > AWAITED_S:
                due = (now if waiting[0].awaited else last) + waiting[0].delay_s
        seen |= {one.pid for one in live}
        if waiting and due is not None and now >= due:
            name = strike(live, waiting[0])
            if not name and now - due > AWAITED_S:  # nothing of that kind lives
                name = strike(live, replace(waiting[0], kind="task"))
            if name:
                outcome.hits.append(name)
                waiting.pop(0)
                last, due = now, None
        time.sleep(0.02 if waiting else 0.05)
    if process is not None:
        outcome.codes.append(process.wait(0.1))
    raise AssertionError(f"not at its end after {PATIENCE_S} s")


def strike(live: list[Found], hit: Hit) -> str:
    """Kill what the hit is meant for; returns what was killed, in words, or nothing."""
    kinds = TARGETS[hit.kind]
    leading = [one for one in live if one.kind == kinds[0]]
    if not leading:
        return ""
    chosen = leading[int(hit.pick * len(leading))]
    if hit.kind == "everything":
        struck = live
    elif hit.kind in ONE_JOB:
        struck = [one for one in live if one.kind in kinds and one.job in (chosen.job, "")]
    else:
        struck = [chosen]
    found = {one.kind for one in struck if processes.send(one.pid, signal.SIGKILL)}
    is_whole = found >= set(kinds) - {"child"}
    return hit.kind if is_whole or found == set(kinds) else "+".join(sorted(found))


def check(sweep: Sweep, references: dict[frozenset[str], Path], outcome: Outcome) -> None:
    """Everything that must hold after a sweep."""
    problems = outcome.problems
    left = remaining(sweep, LEAVING_S)
    if left:
        problems.append(f"left behind after {LEAVING_S} s: {left}")
    lines = (forge_dir(sweep.directory) / "jobs.jsonl").read_text().split("\n")
    entries = [json.loads(line) for line in lines if line]
    if len(entries) != 4 or len(sweep.jobs) != 4:
        problems.append(f"not four jobs: {entries}, {sweep.jobs}")
    for entry in entries:
        job = sweep.directory / entry["subdir"]
        reference = references[_identity(entry["overrides"])]
        try:
            assert_same_bits(weights(job), weights(reference))
        except Exception as error:  # noqa: BLE001 - a missing or torn file is one as well
            problems.append(f"{job}: other weights than {reference}: {error!r}")
        if ledger.read(job).metrics != ledger.read(reference).metrics:
            problems.append(f"{job}: other metrics than {reference}")
        lives = sorted(
            tuple(map(float, text.split()))
            for text in (path.read_text() for path in (job / "lives").iterdir())
            if text  # else it was killed before its first word
        )
        outcome.attempts += len(lives)
        for (begin, end), (next_begin, _) in itertools.pairwise(lives):
            if next_begin <= end:
                text = f"two at once for {end - next_begin:.3f} s, {end - begin:.3f} s of life"
                problems.append(f"{job}: {text}: {lives}")


def remaining(sweep: Sweep, timeout_s: float) -> list[str]:
    """What is left of the sweep's processes, once those that are leaving had their time."""
    deadline = time.monotonic() + timeout_s
    while True:
        tokens = [read_json(forge_dir(job) / PLAN)["token"] for job in sweep.jobs]
        found = {one.pid: str(one) for one in sweep.processes()}
        for token in tokens:
            found |= {pid: f"{pid} with the token of a job" for pid in _alive(token) - found.keys()}
        if not found or time.monotonic() >= deadline:
            return list(found.values())
        time.sleep(0.05)


def _alive(token: str) -> set[int]:
    """Processes with a job's token; a zombie's environment cannot be read."""
    return set(processes.marked(TOKEN, token))


def weights(job: Path) -> dict[str, torch.Tensor]:
    return torch.load(job / "weights.pt", weights_only=True)


def _identity(overrides: list[str]) -> frozenset[str]:
    return frozenset(one for one in overrides if one.partition("=")[0] in POOL)


def run_references(root: Path) -> dict[frozenset[str], Path]:
    """Overrides -> directory of a run that nobody disturbed."""
    choices = [f"{name}={','.join(values)}" for name, values in POOL.items()]
    command = [sys.executable, str(SCRIPT), "-m", f"hydra.sweep.dir={root}", "step_s=0", *choices]
    subprocess.run(command, cwd=JOBS, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    return found_references(root)


def found_references(root: Path) -> dict[frozenset[str], Path]:
    """What `run_references` left in `root`."""
    found = {}
    for path in root.glob("*/.hydra/overrides.yaml"):
        overrides = [line.removeprefix("- ") for line in path.read_text().splitlines()]
        found[_identity(overrides)] = path.parent.parent
    assert len(found) == 8
    return found


def one_sweep(number: int, seed: int, root: Path, references: dict) -> Outcome:
    """One sweep, disturbed and checked; its directory is kept where something was wrong."""
    rng = random.Random(f"{seed},{number}")
    outcome = Outcome(number)
    overrides = rng.choice(SWEEPS) + (RULE,) * rng.randint(0, 1)
    sweep = Sweep(root / f"sweep_{number}", overrides)
    hits = draw(rng)
    began = time.monotonic()
    try:
        disturb(sweep, hits, rng, outcome)
        check(sweep, references, outcome)
    except Exception as error:  # noqa: BLE001 - the others go on
        outcome.problems.append(f"{type(error).__name__}: {error}")
    outcome.wall_s = time.monotonic() - began
    for pid in processes.marked(MARK, sweep.mark):
        processes.send(pid, signal.SIGKILL)
    if not outcome.problems:
        shutil.rmtree(sweep.directory)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first sweep")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="forge-chaos-sweeps-"))
    began = time.monotonic()
    references = run_references(root / "undisturbed")
    reference_s = time.monotonic() - began
    print(
        f"{options.count} sweeps, seed {options.seed}; references {reference_s:.1f} s", flush=True
    )

    def one(number: int) -> Outcome:
        outcome = one_sweep(number, options.seed, root, references)
        mark = "FAILED" if outcome.problems else "same bits"
        print(
            f"{number:4} hit: {', '.join(outcome.hits)}; codes {outcome.codes},"
            f" {outcome.attempts} attempts, {outcome.wall_s:.0f} s {mark}",
            flush=True,
        )
        return outcome

    numbers = range(options.first, options.first + options.count)
    with ThreadPoolExecutor(options.parallel) as pool:
        outcomes = list(pool.map(one, numbers))
    failed = [outcome for outcome in outcomes if outcome.problems]
    for outcome in failed:
        print(f"\nsweep {outcome.number} in {root}:", *outcome.problems, sep="\n  ")
    hits = collections.Counter(hit for outcome in outcomes for hit in outcome.hits)
    killed = sum(outcome.codes.count(-signal.SIGKILL) for outcome in outcomes)
    others = collections.Counter(c for o in outcomes for c in o.codes if c not in (0, -9))
    print(
        f"\n{len(outcomes)} sweeps, {sum(hits.values())} hits ({dict(sorted(hits.items()))})"
        f"\nstarts of a launcher: {sum(len(o.codes) for o in outcomes)}; {killed} were killed,"
        f" others failed with {dict(others)}"
        f"\nattempts of the {4 * len(outcomes)} jobs: {sum(o.attempts for o in outcomes)}"
        f"\nfinished with the bits and metrics of undisturbed runs, one attempt at a time, and"
        f" nothing left: {len(outcomes) - len(failed)}, in {time.monotonic() - began:.0f} s"
    )
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
