"""Do the parts of a job's time sum to its wall time? Real jobs, disturbed at random.

    python tests/proofs/time_of_jobs.py 50 --seed 1

A sweep of short jobs on this machine, each of which is hit up to three times by SIGTERM, SIGUSR1 or
SIGKILL: at its start, in a step, in a save, in an evaluation, or at a random moment, as drawn from
the seed. The same command is started again until all have finished. Then the parts of each job's
time (queued, starting, productive, repeated, saving, evaluating, stopping, idle) have to sum within
1 % to the time from the launch to the last write of its ledger, by the file system's clock; no part
may be negative, and no two may overlap. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from showcase_jobs import table
from started import ended_here
from sweeps import CONF, TRAIN, App

import forge
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State
from forge.sweeps import times
from forge.sweeps.job import SweepJob
from forge.sweeps.times import Part

HIT = '''
    import random, threading

    class Planted:
        """State in whose save a signal can come."""

        def __init__(self, hit):
            self.hit = hit

        def state_dict(self):
            self.hit("save")
            return {}

        def load_state_dict(self, state):
            pass

    def hits(cfg, out):
        """Returns the function that every section calls: it sends the signal drawn for it."""
        (out / "hits").mkdir(exist_ok=True)
        number = len(list((out / "hits").iterdir()))
        draw = random.Random(f"{cfg.draw},{cfg.seed},{number}")
        section = draw.choice(("start", "step", "save", "evaluation", "any"))
        name = draw.choice(("SIGTERM", "SIGUSR1", "SIGKILL"))
        delay_s, calls = draw.uniform(0, 2), [draw.randrange(1, 4)]
        def hit(where):
            calls[0] -= where == section
            is_due = where == section and (calls[0] <= 0 or where in ("start", "any"))
            if is_due and number < cfg.seed % 4 and not (out / "hits" / str(number)).exists():
                (out / "hits" / str(number)).write_text(f"{name} in {section}")
                os.kill(os.getpid(), getattr(signal, name))
        if section == "any":
            timer = threading.Timer(delay_s, hit, ["any"])
            timer.daemon = True
            timer.start()
        return hit

'''
APP = (
    TRAIN.replace("    def misbehave(", f"{HIT}    def misbehave(")
    .replace(
        "with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:\n",
        'hit = hits(cfg, out)\n        hit("start")\n'
        "        with forge.Run(\n            cfg.resilience, model=model, optimizer=optimizer,"
        " planted=Planted(hit)\n        ) as run:\n"
        "            @run.every(10)\n            def evaluate(step):\n"
        '                time.sleep(0.05)\n                hit("evaluation")\n'
        "                time.sleep(0.05)\n\n",
    )
    .replace("misbehave(cfg, step)\n  ", 'hit("step")\n  ')
)
MOST_STARTS = 8


def disturb(app: App, count: int, draw: int) -> float:
    """Run the sweep until all jobs have finished; the unix time of the launch."""
    began = time.time()
    for _ in range(MOST_STARTS):
        done = app.run(
            f"seed=range({count})", f"+draw={draw}", "step_s=0.03", "hydra.launcher.n_jobs=2",
            "resilience.requeue.max_no_progress=9",
        )  # fmt: skip
        if done.returncode == 0:
            return began
    raise AssertionError(f"not finished after {MOST_STARTS} starts:\n{done.stdout}")


def row(job: SweepJob, began: float) -> tuple[list[str], float, bool]:
    """The row of a job, its deviation from the wall time, and whether all is as it should be."""
    wall_s = job_ledger(job.directory).stat().st_mtime - began
    attempts = job.history()
    found = times.segments(attempts, began, attempts[-1].ended or 0.0, is_queued=True)
    sums = times.totals(found)
    deviation = abs(sum(sums.values()) - wall_s) / wall_s
    is_right = deviation <= 0.01 and min(sums.values()) >= 0 and job.state is State.finished
    is_right &= all(one.end == other.begin for one, other in itertools.pairwise(found))
    hits = ", ".join(path.read_text() for path in sorted((job.directory / "hits").iterdir()))
    cells = [str(job.number), hits or "-", str(len(attempts)), f"{wall_s:.2f}"]
    cells += [f"{sums[part]:.2f}" for part in Part]
    return [*cells, f"{deviation:.3%}", "" if is_right else "WRONG"], deviation, is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forge-time-") as folder, ended_here():
        with closing(App(Path(folder) / "app", APP, CONF)) as app:
            began = disturb(app, options.count, options.seed)
            rows = [row(job, began) for job in forge.sweep(app.sweep_dir).jobs]
        header = ["job", "hit by", "starts", "wall s", *(part.value for part in Part), "off by", ""]
        print(table([cells for cells, *_ in rows], header))
        num_right = sum(is_right for *_, is_right in rows)
        largest = max(deviation for _, deviation, _ in rows)
        print(f"\n{num_right} of {options.count}; the largest deviation is {largest:.3%}")
        return int(num_right < options.count)


if __name__ == "__main__":
    sys.exit(main())
