"""`forge rehearse`: does this script end with the same bits when it is stopped and killed?

It runs twice undisturbed, and then as often as wanted hit by a stop and a SIGKILL at steps drawn
from a seed, each time started again by the same command (`rehearsal`). What it ends with is
compared with the first run: the newest checkpoint of each `forge.Run`, leaf by leaf, and all that
was logged, step by step.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from forge.checkpoint.format.leaves import differences
from forge.errors import ExitCode, RehearsalFailed
from forge.process import processes
from forge.rehearse.rehearsal import STOPS, Logged, Rehearsal, Run, Strike

_USAGE = (
    "forge rehearse [--times N] [--seed S] [--directory DIR] [--timeout-s T] -- python train.py"
)
_OBJECTS = "live."
"""Where a checkpoint has what was given to `forge.Run`. The rest of it may differ between two
undisturbed runs: by a generator that nobody seeds, and perhaps nobody uses."""

# -- what is compared --------------------------------------------------------------------------


def differing_leaves(one: Run, other: Run) -> Iterator[tuple[str, str]]:
    """(path, how) of each leaf of their checkpoints that is not the same."""
    for place in dict.fromkeys([*one.states, *other.states]):
        if place not in one.states or place not in other.states:
            yield place, f"only in {(one if place in one.states else other).name}"
            continue
        # What was logged last is compared with all that was, by step.
        a, b = ({**run.states[place], "metrics": None} for run in (one, other))
        of_run = f" of {place}" if len(one.states) > 1 else ""
        yield from ((f"{path}{of_run}", what) for path, what in differences(a, b))


def differing_values(one: Run, other: Run) -> Iterator[tuple[Logged, str]]:
    """Each logged value that is not the same, by step, and how."""
    a, b = one.logged, other.logged
    for key in sorted(a.keys() | b.keys()):
        yield from ((key, what) for _, what in differences(a.get(key), b.get(key)))


# -- the command -------------------------------------------------------------------------------


def plan(num_steps: int, seed: int) -> list[Strike]:
    """A stop and a kill, in either order, at two boundaries of so many steps or soon after."""
    rng = random.Random(seed)
    places = sorted(rng.sample(range(1, num_steps + 1), min(2, num_steps)))
    names = rng.sample([rng.choice(STOPS), "SIGKILL"], 2)
    found, before = [], 0
    for name, place in zip(names, places, strict=False):
        fraction = rng.choice([0.0, round(rng.random(), 2)])
        if place == num_steps:  # no boundary follows: it would be chance which came first, the end
            fraction = 0.0
        found.append(Strike(name, place - before + 1, fraction))
        # Where it resumes: a stop within a step comes to the end of that step.
        before = place + 1 if name in STOPS and fraction > 0 else place
    return found


def rehearse(rehearsal: Rehearsal, times: int, seed: int) -> int:
    """0: every run ended as the first; 1: not all did; 2: there is nothing to compare."""
    _say(f"{'run':<14} {'s':>6} {'steps':>6}  {'hit at step → resumed at':<40}")
    try:
        first = rehearsal.run("undisturbed 1", [])
        _row(first)
        second = rehearsal.run("undisturbed 2", [])
    except RehearsalFailed as error:
        _say(f"The undisturbed script {error}")
        return 2
    leaves = [path for path, _ in differing_leaves(first, second)]
    places = {*first.states, *second.states}  # one of them alone may have a checkpoint there
    free = {path for path in leaves if path not in places and not path.startswith(_OBJECTS)}
    if len(free) < len(leaves):
        _is_same(first, second, free)
        _say(
            "Two undisturbed runs differ, so nothing can be said of resumes. Seed every generator"
            " of random numbers, and choose deterministic kernels where the device has others."
        )
        return 1
    measured = {name for (_, _, name), _ in differing_values(first, second)}
    _row(second, "identical")
    if measured:
        names = ", ".join(sorted(measured))
        _say(f"  not compared, since undisturbed runs differ in them alone: {names}")
    free |= measured
    if not first.num_steps:
        _say("Its forge.Run took no step: there is nowhere to hit it.")
        return 2
    num_bad = num_hits = 0
    for number in range(times):
        name = f"disturbed {number + 1}"
        try:
            run = rehearsal.run(name, plan(first.num_steps, seed + number))
            num_hits += len(run.hits)
            is_same = _is_same(first, run, free)
        except RehearsalFailed as error:
            _say(f"{name:<14} {error}")
            is_same = False
        if not is_same:
            num_bad += 1
            repeated = ["--times", "1", "--seed", str(seed + number), "--", *rehearsal.command]
            _say(f"  again: forge rehearse {shlex.join(repeated)}")
    if num_bad:
        _say(f"{num_bad} of {times} disturbed runs are not identical")
        return 1
    if not num_hits:
        _say("No run was hit: does `resilience.signal.actions` ignore SIGTERM and SIGUSR1?")
        return 2
    _say(f"identical, hit {num_hits} times")
    return 0


def _is_same(first: Run, run: Run, free: set[str]) -> bool:
    """Compare, and print a row, with the first leaf and the first logged value that differ."""
    leaves = (one for one in differing_leaves(first, run) if one[0] not in free)
    found = [f"leaf {path}: {what}" for path, what in islice(leaves, 1)]
    values = (one for one in differing_values(first, run) if one[0][2] not in free)
    for (step, place, name), what in islice(values, 1):
        of_run = f" of {place}" if len(first.states) > 1 else ""
        found.append(f"step {step}: {name}{of_run}: {what}")
    _row(run, "differs" if found else "identical", *found)
    return not found


def _row(run: Run, ended: str = "", *below: str) -> None:
    row = f"{run.name:<14} {run.took_s:6.1f} {run.num_steps:>6}  {run.trace():<40} {ended}"
    _say("\n  ".join([row.rstrip(), *below]))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """`forge rehearse`."""
    parser = argparse.ArgumentParser(prog="forge rehearse", usage=_USAGE)
    parser.add_argument("--times", type=int, default=3, help="how many disturbed runs (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one (default: 0)")
    parser.add_argument("--directory", type=Path, help="where runs go: a new one, which is kept")
    parser.add_argument("--timeout-s", type=float, help="limit of each start of the script")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python train.py …")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or options.times < 1:
        parser.error("expected a command, and --times of at least 1")
    if options.directory is not None:
        try:
            options.directory.mkdir(parents=True)
        except OSError as error:
            parser.error(f"--directory {options.directory}: expected to make it: {error.strerror}")
    root = options.directory or Path(tempfile.mkdtemp(prefix="forge-rehearse-"))
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the script, too
    try:
        rehearsal = Rehearsal(command, root.absolute(), options.timeout_s)
        code = rehearse(rehearsal, options.times, options.seed)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    if code == 0 and options.directory is None:
        shutil.rmtree(root)
    else:
        _say(f"The runs are in {root}")
    return code
