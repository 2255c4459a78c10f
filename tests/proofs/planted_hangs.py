"""Hangs planted in every section of a Run, and what is none: who is named, after how long.

    python tests/proofs/planted_hangs.py

Each row is a job of one rank or of four, in one rank of which something stands still: in a lock, in
a system call, or in a C call that keeps the interpreter's lock. It has to be found, to name that
rank and that line, and to end as `hang.action` says: a restart with the bits of a job in which
nothing stood. Then ten long compilations, a debugger, and a SIGSTOP of a minute, which are no hang.
Exits with 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from hanging_apps import COMPILES, TIMEOUT_S, HangingApp, HangingJob, stopped, traced
from harness import until
from showcase_jobs import table

SIZE = 4
STOPPED_S = 60.0
HEAD = ["section", "stands in", "ranks", "named", "limit s", "found s", "line", "action", "end"]
WHERE = ("start_up", "step", "save", "evaluation", "collective")
HOW = ("lock", "pipe", "gil")


class Table:
    """Rows as they come, and what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[list[str]] = []
        self.problems: list[str] = []
        self._undisturbed: dict[tuple[int, bool], HangingJob] = {}

    def app(self, tasks: int, misbehave: str = "") -> HangingApp:
        return HangingApp(self.folder / str(len(list(self.folder.iterdir()))), tasks, misbehave)

    def undisturbed(self, tasks: int, ddp: bool = True) -> HangingJob:
        if (tasks, ddp) not in self._undisturbed:
            app = self.app(tasks)
            app.finish(f"hang.ddp={ddp}")
            self._undisturbed[tasks, ddp] = app.job(0)
        return self._undisturbed[tasks, ddp]

    def has_same_bits(self, job: HangingJob, tasks: int, ddp: bool = True) -> bool:
        other = self.undisturbed(tasks, ddp)
        pairs = [
            (one, other.weights_of(rank)[name])
            for rank in range(tasks)
            for name, one in job.weights_of(rank).items()
        ]
        return job.metrics == other.metrics and all(torch.equal(*pair) for pair in pairs)

    def hang(self, where: str, how: str, tasks: int, action: str) -> None:
        """A job in which a rank stands; `collective`: where the other ranks wait for it."""
        app, rank = self.app(tasks), 2 if tasks > 1 else 0
        ddp, planted = where != "collective", where if where != "collective" else "step"
        options = [f"hang.where={planted}", f"hang.how={how}", f"hang.rank={rank}"]
        app.run(*options, f"hang.ddp={ddp}", f"resilience.hang.action={action}")
        job = app.job(0)
        hangs, state = job.hangs, job.state
        found = job.summary() if hangs else {"rank": "-", "waited_s": 0.0, "line": "-"}
        end, limit_s = f"{state['state']} {state['code']}", TIMEOUT_S
        if action == "restart" and state["state"] == "finished":
            end += ", same bits" if self.has_same_bits(job, tasks, ddp) else ", other bits"
        line = Path(found["line"]).name
        stood = [f"{found['rank']}", f"{limit_s:.1f}", f"{found['waited_s']:.1f}", line]
        waiting = {one["section"] for number, one in found["ranks"].items() if int(number) != rank}
        is_seen = where != "collective" or waiting == {"collective"}
        self._add([where, how, str(tasks), *stood, action, end])
        wanted = "failed 70" if action == "halt" else "finished 0, same bits"
        is_right = end == wanted and found["rank"] == rank and found["line"] == app.line(how)
        if not (is_right and is_seen and len(hangs) == 1 and job.is_free()):
            self.problems.append(f"{where} {how} {tasks} {action}: {found}, {state}")

    def none(self, what: str, job: HangingJob, tasks: int) -> None:
        """A job that has ended, in which nothing was to be found."""
        queries = f"{len(job.events('no hang'))} queries"
        state = job.state
        is_same = self.has_same_bits(job, tasks)
        end = f"{state['state']} {state['code']}, {'same' if is_same else 'other'} bits"
        self._add(["-", what, str(tasks), "-", "2.0", "-", queries, "restart", end])
        if job.hangs or state["counts"]["restarts"] or not is_same:
            self.problems.append(f"{what}: {job.hangs}, {state}")

    def _add(self, row: list[str]) -> None:
        self.rows.append(row)
        print(" | ".join(row), flush=True)


def suspended(rows: Table, what: str, how: AbstractContextManager, tasks: int, wait_s: float):
    app = rows.app(tasks)
    where = ("hang.where=step", "hang.how=slow", f"hang.rank={tasks // 2}")
    sweep = app.start(*where, "resilience.hang.timeout_s=2")
    job = app.job(0)
    mark = job.directory / "stands 0"
    until(lambda: mark.exists() and mark.read_text(), "the rank")
    with how(int(mark.read_text())):
        (app.folder / "go").touch()
        time.sleep(wait_s)
    assert sweep.wait() == 0, sweep.output
    rows.none(what, job, tasks)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Table(Path(folder))
        for tasks in (1, SIZE):
            for where in WHERE[: None if tasks > 1 else -1]:
                for how in HOW:
                    rows.hang(where, how, tasks, "restart")
        rows.hang("step", "lock", 1, "halt")
        rows.hang("save", "gil", SIZE, "halt")
        for tasks in (1, SIZE):
            suspended(rows, f"SIGSTOP for {STOPPED_S:.0f} s", stopped, tasks, STOPPED_S)
            suspended(rows, "a debugger for 10 s", traced, tasks, 10.0)
            app = rows.app(tasks, COMPILES)
            app.finish("resilience.hang.timeout_s=2", "resilience.hang.start_s=30")
            rows.none("10 compilations of 3 s", app.job(0), tasks)
        print(f"\n{table(rows.rows, HEAD)}")
        print("\n".join(rows.problems) or "Each as it should be.")
        return bool(rows.problems)


if __name__ == "__main__":
    sys.exit(main())
