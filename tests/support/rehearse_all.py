"""Every script of tests/support/scripts through `forge rehearse`: is what it says right?

    python tests/support/rehearse_all.py [--times 2] [--seed 0] [--parallel 2] [name …]

Prints a table; exits with 1 where a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Case:
    """One script, perhaps with arguments."""

    command: str
    differs: str = ""
    """Words of the first leaf or value that differs; empty: identical."""
    why: str = ""
    """What it keeps outside of `forge.Run`."""
    variable: str = ""
    """Where it has that: what the hints are to name."""

    @property
    def argv(self) -> list[str]:
        script, *arguments = self.command.split()
        return [sys.executable, str(SCRIPTS / script), *arguments]


CASES = (
    Case("plain.py"),
    Case("gpt.py"),
    Case("augmented.py"),
    Case("gan.py"),
    Case("dqn.py"),
    Case("dqn.py --forget-buffer", "loss", "the replay buffer", "buffer"),
    Case("diffusion.py"),
    Case("diffusion.py --forget-average", "average_error", "the average of the weights", "average"),
    Case("lbfgs.py"),
    Case("amp.py"),
    Case("plateau.py"),
    Case("plateau.py --forget-best", "best", "the best loss so far, in a local variable", "best"),
    Case("numpy_batches.py", "loss", "a generator of numpy, for batches", "rng"),
    Case("curriculum.py"),
    Case("semi_supervised.py", "loss", "an iterator over a second loader", "others"),
    Case("swa.py"),
    Case("lora.py"),
    Case("kfold.py"),
)

OMITTED = {
    "sampler": "order",
    "python-random": "rng",
    "numpy-random": "rng",
    "torch-random": "rng",
    "schedule": "schedule",
    "scaler": "scaler",
    "ema": "ema",
    "best-metric": "best",
    "prefetched-batch": "second",
    "hidden-state": "hidden",
    "replay-buffer": "buffer",
    "module-mode": "noise",
    "inner-optimizer": "inner",
    "dataset-attribute": "data.level",
}
"""What `omits.py` keeps to itself → the variable that has it."""
CASES += tuple(Case(f"omits.py {kind}", "step", kind, name) for kind, name in OMITTED.items())
CASES += tuple(Case(f"omits.py {kind} --fixed") for kind in OMITTED)


def verdict(case: Case, times: int, seed: int) -> tuple[bool, str, float, str]:
    """(whether it is right, in a few words, seconds, the whole output)."""
    began = time.monotonic()
    options = ["--times", str(times), "--seed", str(seed)]
    command = [sys.executable, "-m", "forge", "rehearse", *options, "--", *case.argv]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # several run beside each other
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found = [line.strip() for line in lines if line.startswith(("  step ", "  leaf "))]
    named = [line for line in lines if line.startswith("    ") and f"`{case.variable}`" in line]
    said = {0: "identical", 1: "differs"}.get(done.returncode, f"exit code {done.returncode}")
    is_right = said == ("differs" if case.differs else "identical")
    is_right &= not case.differs or any(case.differs in line for line in found)
    is_right &= not case.variable or bool(named)
    first = next((line for line in found if line.startswith("step")), "")
    words = "; ".join([said, *([first] if first else []), *(line.strip() for line in named)])
    return is_right, words, time.monotonic() - began, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="words of the commands wanted; all by default")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    cases = [
        case for case in CASES if not options.names or any(n in case.command for n in options.names)
    ]
    print("| script | kept outside | forge rehearse says | right | s |")
    print("| --- | --- | --- | --- | --- |")
    wrong, num_named = [], 0
    with ThreadPoolExecutor(options.parallel) as pool:
        found = pool.map(lambda case: verdict(case, options.times, options.seed), cases)
        for case, (is_right, words, took_s, output) in zip(cases, found, strict=True):
            cells = [f"`{case.command}`", case.why or "nothing", words]
            cells += ["yes" if is_right else "NO", f"{took_s:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
            wrong += [] if is_right else [output]
            num_named += bool(case.variable) and is_right
    num_planted = sum(bool(case.variable) for case in cases)
    print(f"\n{num_named} of {num_planted} omissions named; {len(wrong)} verdicts are wrong")
    print("".join(f"\n{output}" for output in wrong), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
