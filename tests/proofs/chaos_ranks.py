"""Chaos for many ranks: small jobs, hit at random moments and started again until they finish.

    python tests/proofs/chaos_ranks.py 50 --seed 1 --ranks 4 [--wrap fsdp2]

Every job is hit by one to three of SIGTERM, SIGUSR1, SIGINT (one rank, or all of them) and SIGKILL
(one rank): in a step, a save or an evaluation, as it ends. All must finish with the very bits and
metrics of the undisturbed run; after a signal no step may be repeated; none may hang or leave a
process. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chaos import repeated_after_cooperative
from harness import Process
from ranked import RankedJob

from forge.jobdir import ledger

SIGNALS = ("TERM", "USR1", "INT", "KILL")
SPEC = {"n": 40, "pause_s": 0.02, "checkpoint": {"every_steps": 7}}
TRAINING_S = 1.5
"""About what the steps of an undisturbed job take."""
MAX_ATTEMPTS = 12
HANGS_S = 240.0


@dataclass
class Outcome:
    """What one job went through."""

    number: int
    hits: list[str] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    problem: str = ""


def ended(processes: list[Process]) -> list[int]:
    """The exit codes, once all ranks have ended by themselves."""
    deadline = time.monotonic() + HANGS_S
    codes = [one.wait(max(deadline - time.monotonic(), 1.0)) for one in processes]
    assert all(one.is_session_gone() for one in processes), "a process is left"
    return codes


def hit(job: RankedJob, rng: random.Random, outcome: Outcome) -> list[int]:
    """One attempt that is hit, once it trains."""
    name, before = rng.choice(SIGNALS), ledger.read_progress(job.checkpoints)
    target = rng.choice([*range(job.size), "all"]) if name != "KILL" else rng.randrange(job.size)
    processes = job.start()

    def trains() -> bool:
        now = ledger.read_progress(job.checkpoints)
        return now is not None and (before is None or now[0] > before[0])

    processes[0].wait_for(trains, "training")
    time.sleep(rng.uniform(0, TRAINING_S))  # a moment, not an event: that is what is drawn
    for one in processes if target == "all" else [processes[target]]:
        if one.popen.poll() is None:
            one.signal(signal.Signals["SIG" + name])
    outcome.hits.append(f"{name} {target}")
    return ended(processes)


def spec_of(options: argparse.Namespace) -> dict:
    return SPEC | {"wrap": options.wrap, "norm": options.norm == "batch"}


def disturb(number: int, options: argparse.Namespace, root: Path, whole: RankedJob) -> Outcome:
    """One job, hit and restarted to its end, and compared."""
    rng, outcome = random.Random(f"{options.seed},{number}"), Outcome(number)
    job = RankedJob(root / f"job_{number}", options.ranks, **spec_of(options))
    try:
        for _ in range(rng.randint(1, 3)):
            outcome.codes.append(hit(job, rng, outcome))
            if not any(outcome.codes[-1]):
                break
        while any(outcome.codes[-1]) and len(outcome.codes) < MAX_ATTEMPTS:
            outcome.codes.append(ended(job.start()))
        assert not any(outcome.codes[-1]), "it does not finish"
        job.assert_same_run(whole)
        repeated = repeated_after_cooperative(job)
        assert max(repeated, default=0) == 0, f"repeated {repeated}"
    except AssertionError as error:
        outcome.problem = f"{str(error)[:3000]}\n{job.output[-6000:]}"
    else:
        shutil.rmtree(job.directory)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--norm", choices=("batch", "layer"), default="batch")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    root = Path(tempfile.mkdtemp(prefix="forge-chaos-ranks-"))
    began = time.monotonic()
    whole = RankedJob(root / "undisturbed", options.ranks, **spec_of(options))
    whole.run_to_end()
    bad, hits, attempts = 0, collections.Counter[str](), 0
    with ThreadPoolExecutor(1) as pool:  # four ranks keep two cores busy
        for outcome in pool.map(
            lambda number: disturb(number, options, root, whole), range(options.count)
        ):
            bad += bool(outcome.problem)
            hits.update(one.partition(" ")[0] for one in outcome.hits)
            attempts += len(outcome.codes)
            told = outcome.problem or "same bits"
            print(f"{outcome.number:4} hit by {', '.join(outcome.hits):30} {told}", flush=True)
    print(
        f"{options.count} jobs of {options.ranks} ranks, {hits.total()} hits ({dict(hits)}),"
        f" {attempts} attempts in {time.monotonic() - began:.0f} s; finished with the bits and"
        f" metrics of the undisturbed run: {options.count - bad}"
    )
    if not bad:
        shutil.rmtree(root)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
