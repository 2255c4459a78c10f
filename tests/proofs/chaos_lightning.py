"""Chaos for Lightning: eight scripts, hit at random places and started again until they finish.

    python tests/proofs/chaos_lightning.py --times 8 --ranked 20 --seed 1 [automatic stream …]

Each run is hit one to three times, each time in an attempt of its own, by SIGTERM, SIGUSR1, SIGKILL
or its time limit: in a step, in a validation, in a save, as the training ends. Its last checkpoint,
its logged values and what the script reads after `fit` must be those of the undisturbed run; after
a stop no batch may be trained on twice. The undisturbed run must end as without forge. The
processes are forked from one that has imported Lightning; ends with 1 if a run ended otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from lightning_jobs import FOLDER, NUM_RANKS, LightningJob

SCRIPTS = (
    *("automatic", "manual", "stream", "streams", "combined", "datamodule"),
    *("ranks", "sharded"),
)
SIGNALS = ("TERM", "USR1", "KILL")
CODES = {"TERM": 143, "USR1": 75, "KILL": -9, "limit": 75}
MAX_ATTEMPTS = 12
LIMIT_S = (2.5, 5.0)
"""The time limit of an attempt: the first save is expected to take a second."""


@dataclass
class Outcome:
    """What one run went through."""

    hits: list[str] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    num_stops: int = 0
    problem: str = ""


def place(rng: random.Random, num_steps: int, num_ranks: int) -> str:
    kind = rng.choice(["step", "step", "validation", "save", "commit", "end", "last"])
    match kind:
        case "step":
            return f"step {rng.randrange(num_steps)}"
        case "last":
            return f"step {num_steps - 1}"
        case "end":
            return "end"
        case "save" if num_ranks > 1:  # the first two come before the ranks have met
            return f"save {rng.randint(3, 6)}"
        case _:
            return f"{kind} {rng.randint(1, 4)}"


def hit(job: LightningJob, rng: random.Random, outcome: Outcome, num_steps: int) -> None:
    """One attempt that is hit, if it comes to the place."""
    name, on = rng.choice([*SIGNALS, "limit"]), rng.choice([*range(job.size), None])
    if name == "limit":
        end = time.time() + rng.uniform(*LIMIT_S)
        outcome.hits.append("limit")
        codes = job.attempt(FORGE_END_TIME=str(end))
    else:
        at = place(rng, num_steps, job.size)
        ranks = f" on {'all' if on is None else on}" if job.size > 1 else ""
        outcome.hits.append(f"{name} {at}{ranks}")
        codes = job.attempt({at: name}, on if name != "KILL" else on or 0)
    outcome.codes.append(codes)
    unsaved = {"TERM": {-15}, "USR1": {-10}}.get(name, set())  # before the Run is entered
    expected = (
        {CODES[name], 0} | unsaved if job.size == 1 or name != "KILL" else {CODES[name], 0, 70}
    )
    assert set(codes) <= expected, f"exit codes {codes}"
    outcome.num_stops += codes[0] in (75, 143)


def disturb(name: str, number: int, seed: int, root: Path, whole: LightningJob) -> Outcome:
    """One run, hit and started again to its end, and compared."""
    rng, outcome = random.Random(f"{name},{seed},{number}"), Outcome()
    job = LightningJob(root / f"{name}_{number}", name)
    num_steps = len((whole.directory / "steps.txt").read_text().split())
    try:
        for _ in range(rng.randint(1, 3)):
            hit(job, rng, outcome, num_steps)
            if not any(outcome.codes[-1]):
                break
            if not job.has_checkpoint:  # the next attempt begins anew, without Lightning's files
                for path in job.directory.rglob("*.ckpt"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        while any(outcome.codes[-1]) and len(outcome.codes) < MAX_ATTEMPTS:
            outcome.codes.append(job.attempt())
        assert not any(outcome.codes[-1]), "it does not finish"
        assert not (found := job.differences(whole)), found[:3]
        if not any(KILLED.intersection(codes) for codes in outcome.codes):
            assert job.num_repeated == 0, f"{job.num_repeated} batches repeated"
    except AssertionError as error:
        outcome.problem = f"{error}\n{job.output[-3000:]}"
    else:
        shutil.rmtree(job.directory)
    return outcome


KILLED = frozenset({-9, 70})


def drill(name: str, times: int, seed: int, root: Path) -> int:
    """Runs of one script that ended otherwise; prints each."""
    plain, whole = LightningJob(root / f"{name}_plain", name, is_plain=True), None
    plain.run_to_end()
    whole = LightningJob(root / f"{name}_whole", name)
    whole.run_to_end()
    wrong = int(bool(found := plain.different_ends(whole)))
    print(f"{name}: {found[:3] or 'ends with the same bits with forge as without it'}", flush=True)
    bad = hits = stops = 0
    for number in range(times):
        outcome = disturb(name, number, seed, root, whole)
        bad, hits = bad + bool(outcome.problem), hits + len(outcome.hits)
        stops += outcome.num_stops
        told: Any = outcome.problem or "same bits"
        print(f"{number:4} {', '.join(outcome.hits)}: {outcome.codes} {told}", flush=True)
    print(f"{name}: {times - bad} of {times} runs exact, {hits} hits, {stops} stops", flush=True)
    return wrong + bad


def main() -> int:
    """The drill of the scripts that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(SCRIPTS))
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--ranked", type=int, default=20, help="times for scripts with ranks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.append(FOLDER)
    print(f"lightning {metadata.version('lightning')}, torch {metadata.version('torch')}")
    root = Path(tempfile.mkdtemp(prefix="forge-chaos-lightning-"))
    wrong = 0
    for name in options.names or SCRIPTS:
        times = options.ranked if NUM_RANKS.get(name, 1) > 1 else options.times
        wrong += drill(name, times, options.seed, root)
    if not wrong:
        shutil.rmtree(root)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
