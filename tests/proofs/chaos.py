"""Chaos: many small jobs, each hit at random moments and started again until it finishes.

    python tests/proofs/chaos.py 200 --seed 1

Every job is hit by one to five of SIGTERM, SIGUSR1, SIGUSR2, SIGINT and SIGKILL at moments drawn
from the seed: during imports, while it is built, in a step, in a save, as it ends. All must finish
with the very bits and metrics of the undisturbed run; after a signal that was answered by a save
at most one step may be repeated; no process may outlive its job. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from harness import Job, assert_same_run

from forge.jobdir import ledger

SIGNALS = ("TERM", "USR1", "USR2", "INT", "KILL")
COOPERATIVE = {143: "TERM", 130: "INT", 75: "USR1 or USR2"}
SPECS = (
    {"loader": "plain"},
    {"loader": "stateful"},
    {"loader": "plain", "workers": 2, "augment": "random"},
    {"loader": "generator", "evaluate_every": 7, "evaluate_s": 0.004},
    {"loader": "plain", "policy": {"checkpoint": {"async_save": True}}},
)
COMMON = {"steps": 60, "step_s": 0.01}
TRAINING_S = 0.9
"""About what the steps and the end of an undisturbed job take, without imports."""
MAX_ATTEMPTS = 30


@dataclass
class Outcome:
    """What one job went through."""

    number: int
    hits: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    problem: str = ""


def make_job(directory: Path, spec: dict) -> Job:
    policy = {"checkpoint": {"every_steps": 10} | spec.get("policy", {}).get("checkpoint", {})}
    return Job(directory, **(COMMON | spec | {"policy": policy}))


def disturb(number: int, seed: int, root: Path, attempt_s: float, undisturbed: Job) -> Outcome:
    """One job, hit and restarted to its end, and compared."""
    rng = random.Random(f"{seed},{number}")
    outcome, processes = Outcome(number), []
    job = make_job(root / f"job_{number}", SPECS[number % len(SPECS)])
    for _ in range(rng.randint(1, 5)):
        name, is_anytime = rng.choice(SIGNALS), rng.random() < 0.25
        delay_s = rng.uniform(0, 1.1 * attempt_s if is_anytime else TRAINING_S)
        previous = ledger.read_progress(job.checkpoints)
        process = job.start()
        processes.append(process)
        if not is_anytime:  # most of an attempt's time is imports: aim at what follows them

            def has_begun(job=job, previous=previous) -> bool:
                now = ledger.read_progress(job.checkpoints)
                return now is not None and (previous is None or now[0] > previous[0])

            process.wait_for(has_begun, "training")
        try:
            process.popen.wait(delay_s)  # a hit that comes too late hits nobody
        except subprocess.TimeoutExpired:
            process.signal(signal.Signals["SIG" + name])
            outcome.hits.append(name)
        outcome.codes.append(process.wait())
        if outcome.codes[-1] == 0:
            break
    while outcome.codes[-1] != 0 and len(outcome.codes) < MAX_ATTEMPTS:
        outcome.codes.append(job.run())
        if outcome.codes[-1] == 1:
            break
    try:
        assert outcome.codes[-1] == 0, f"exit codes {outcome.codes}\n{job.output[-3000:]}"
        assert_same_run(job, undisturbed)
        outcome.repeated = repeated_after_cooperative(job)
        assert max(outcome.repeated, default=0) <= 1, f"repeated {outcome.repeated}"
        assert all(one.is_session_gone() for one in processes), "a process outlived its job"
    except AssertionError as error:
        outcome.problem = str(error)
    else:
        shutil.rmtree(job.directory)
    return outcome


def repeated_after_cooperative(job: Job) -> list[int]:
    """Steps done again by each attempt whose predecessor answered its signal with a save."""
    attempts = job.history.attempts
    found = []
    for before, after in itertools.pairwise(attempts):
        stopped = any(event["kind"] == "stop" for event in before.events)
        for event in after.events:
            if event["kind"] == "start" and stopped:
                found.append(event["previous_step"] - event["step"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="forge-chaos-"))
    began = time.monotonic()
    undisturbed = []
    for i, spec in enumerate(SPECS):
        undisturbed.append(make_job(root / f"undisturbed_{i}", spec))
        undisturbed[-1].run_to_end()
    attempt_s = (time.monotonic() - began) / len(SPECS)
    print(f"{options.count} jobs, seed {options.seed}; undisturbed {attempt_s:.1f} s each")

    def one(number: int) -> Outcome:
        reference = undisturbed[number % len(SPECS)]
        outcome = disturb(number, options.seed, root, attempt_s, reference)
        mark = "FAILED" if outcome.problem else "same bits"
        print(
            f"{number:4} hit by {','.join(outcome.hits):24} codes {outcome.codes} {mark}",
            flush=True,
        )
        return outcome

    with ThreadPoolExecutor(options.parallel) as pool:
        outcomes = list(pool.map(one, range(options.count)))
    failed = [outcome for outcome in outcomes if outcome.problem]
    for outcome in failed:
        print(f"\njob {outcome.number} in {root}: {outcome.problem}")
    hits = collections.Counter(hit for outcome in outcomes for hit in outcome.hits)
    repeated = [count for outcome in outcomes for count in outcome.repeated]
    print(
        f"\n{len(outcomes)} jobs, {sum(hits.values())} hits ({dict(sorted(hits.items()))}),"
        f" {sum(len(o.codes) for o in outcomes)} attempts in {time.monotonic() - began:.0f} s"
        f"\nfinished with the bits and metrics of the undisturbed run:"
        f" {len(outcomes) - len(failed)}"
        f"\ncooperative stops: {len(repeated)}, steps repeated after them: at most"
        f" {max(repeated, default=0)}"
    )
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
