"""Every kill, power cut, failing call, damage, zombie and dead rank that the torture suite knows.

    python tests/proofs/torture/all_points.py [--only kills,power=0.2] [--seed 1] [--share 0.1]

Prints what was done and what survived; ends with 1 where anything did not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # the processes that fork here must have no threads
    os.environ["TORCH_CPP_LOG_LEVEL"] = (
        "FATAL"  # a stack in C++ for each rank that has lost another
    )
    # A TCPStore asks for the name of each address that connects; a lost answer is 5 s of waiting.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torture import broken, damage, errors, full, fuzz, kills, power, ranks, zombies
from torture.children import UNDISTURBED, Counts, Plan

from forge import messages

PARTS = {
    "kills": kills.run,
    "power": power.run,
    "errors": errors.run,
    "full": full.run,
    "damage": damage.run,
    "fuzz": fuzz.run,
    "zombies": zombies.run,
    "ranks": ranks.run,
}


def prove(plan: Plan, ways: list[str]) -> Counts:
    """Break each promise, and demand that the part that watches over it fails."""
    counts = Counts()
    for way in ways:
        part = broken.FOUND_BY[way]
        root = plan.root / way
        root.mkdir()
        share = min(1.0, plan.share * broken.RARE.get(way, 1))
        found = PARTS[part](
            replace(
                plan, root=root, share=share, break_forge=broken.WAYS[way], is_over_at_failure=True
            )
        )
        noticed = [failure for failure in found.failures if UNDISTURBED not in failure]
        counts.add(**{f"{way}_found_by_{part}": len(noticed)})
        if not noticed:
            counts.failures.append(f"{part} did not notice {way}: {found.numbers}")
    return counts


PARTS["proofs"] = partial(prove, ways=list(broken.FOUND_BY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas; or part=SHARE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all points, at random")
    parser.add_argument("--broken", default="nothing", choices=broken.WAYS, help="break forge so")
    parser.add_argument("--ways", help="names, by commas: what the proofs break; all by default")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    messages.warn = lambda text: None
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        os.environ.pop(name, None)
    if options.ways:
        PARTS["proofs"] = partial(prove, ways=options.ways.split(","))
    is_failed = False
    for one in options.only.split(","):
        name, _, share = one.partition("=")
        began = time.monotonic()
        root = Path(tempfile.mkdtemp(prefix=f"torture-{name}-", dir=options.directory))
        try:
            way = broken.WAYS[options.broken]
            counts = PARTS[name](Plan(root, options.seed, float(share or options.share), way))
        finally:
            shutil.rmtree(root, ignore_errors=True)
        is_failed = is_failed or bool(counts.failures)
        if options.json:
            found = {"part": name, "numbers": counts.numbers, "failures": counts.failures}
            print(json.dumps(found), flush=True)
            continue
        numbers = ", ".join(f"{value} {key}" for key, value in counts.numbers.items())
        print(f"{name}: {numbers} in {time.monotonic() - began:.1f} s", flush=True)
        for failure in counts.failures[:20]:
            print(f"  FAILED {failure}")
    return 1 if is_failed else 0


if __name__ == "__main__":
    sys.exit(main())
