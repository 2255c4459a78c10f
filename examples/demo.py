"""`make demo`: the same sweep twice, the second time not left in peace.

Both run with `hydra/launcher=local`, two jobs side by side, and its display is seen as it is. In
the second sweep a job's process is killed, the parent of another's, and the launcher, after a
Ctrl+C that stops all; at last a job is killed and its newest checkpoint damaged. At the end weights
and losses of every job are compared bit by bit. Where to strike is a seeded choice of steps.
Everything is kept below `outputs/demo/<time>/`.

    python examples/demo.py [--seed N] [--steps N]
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_report import compare, print_sample, print_table
from demo_screen import Screen, clock, paint
from demo_sweep import Attempt, Blow, Job, Sweep

from forge.process import processes

TRAIN = Path(__file__).resolve().parent / "train.py"
LEARNING_RATES = ("1e-2", "3e-3")
STEPS, SAVES = 700, 14  # examples/conf/train.yaml saves every 50 steps
POLL_S = 0.02
STALL_S = 120.0
"""A demo in which no job makes progress for so long has failed."""

INTRODUCTION = (
    "One sweep, twice, on two cores: a small GPT learns to write Python from the source of Python's"
    " standard library, in {steps} steps, with two learning rates side by side. The first sweep is"
    " left undisturbed. The second is struck five times: what happens to single jobs the launcher"
    " mends by itself; after Ctrl+C, and after its own death, it is resumed by the command that it"
    " printed."
)


class Unexpected(Exception):
    """The demo cannot continue."""


def plan(seed: int, steps: int, every_steps: int) -> list[Blow]:
    """Five blows, about evenly spread over the sweep, and well away from the last save."""
    blows = [
        Blow("SIGKILL of task", "task", [0], -9, "its process is killed, without a word"),
        Blow("SIGKILL of supervisor", "supervisor", [1], -9, "the parent of its process is killed"),
        Blow("Ctrl+C", "launcher", [0, 1], 130, "somebody changes their mind"),
        Blow("SIGKILL of launcher", "launcher", [0, 1], 143, "it dies, its jobs are orphans"),
        Blow("SIGKILL and damage", "task", [1], -9, "its process is killed, its disk lies", True),
    ]
    chance = random.Random(seed)
    for number, blow in enumerate(blows, 1):
        blow.step = round(steps * (number + chance.uniform(-0.25, 0.25)) / (len(blows) + 1))
        blow.step += -blow.step % every_steps
        blow.step -= round(every_steps * chance.uniform(0.2, 0.7))
    return blows


@dataclass
class Demo:
    """Both sweeps, the screen, and what did not happen as it should."""

    undisturbed: Sweep
    disturbed: Sweep
    screen: Screen
    problems: list[str]

    def run(self, blows: list[Blow], overrides: list[str]) -> None:
        """The whole story; raises Unexpected where it cannot continue."""
        train = [sys.executable, str(TRAIN), "-m", "hydra/launcher=local", *overrides]
        for sweep in (self.undisturbed, self.disturbed):
            print(f"\n{paint(f'The {sweep.name} sweep', 'bold')}")
            command = [*train, f"hydra.sweep.dir={sweep.directory}"]
            print(paint(f"$ {shlex.join(command)}", "dim"), flush=True)
            sweep.start(command, self.screen)
            for blow in blows if sweep is self.disturbed else ():
                self._strike(blow, blows)
            self._wait_until(sweep, sweep.has_ended, "its end")
            self.screen.drain()
            assert sweep.launcher is not None
            code = sweep.launcher.returncode
            self._expect(code == 0, f"the {sweep.name} sweep ended with exit code {code}, not 0")

    def _strike(self, blow: Blow, blows: list[Blow]) -> None:
        sweep, hit = self.disturbed, [self.disturbed.jobs[number] for number in blow.hits]
        self._wait_until(sweep, lambda: self._is_time(blow, hit), f"step {blow.step}")
        before = {job.number: job.stand()[0] for job in hit}
        where = " and ".join(f"job {job.number} at step {job.stand()[1]}" for job in hit)
        self.screen.tell("✗", f"{blow.name}, {where}: {blow.story}", "bad")
        if blow.code == 143:  # the table is no longer drawn: what is not seen now comes too late
            until = time.monotonic() + 2.0
            self._wait_until(
                sweep, lambda: self.screen.is_told or time.monotonic() > until, "the next drawing"
            )
        self._hit(blow, hit[0])
        if blow.target == "launcher":
            self._resume(blow)
        for job in hit:
            trains = partial(job.trains_after, before[job.number])
            self._wait_until(sweep, trains, f"job {job.number} to resume")
            attempts = job.attempts(blows)
            struck = next(one for one in attempts if one.blow is blow)
            self._see_it_resume(blow, job, struck, attempts[struck.number])

    def _is_time(self, blow: Blow, hit: list[Job]) -> bool:
        """Whether the jobs train, in the step that was chosen or after it."""
        return all(
            job.stand()[1] >= blow.step
            and job.attempts()[-1].began
            and len(self.disturbed.processes_of(job)) == 2
            for job in hit
        )

    def _hit(self, blow: Blow, job: Job) -> None:
        sweep, blow.struck = self.disturbed, time.time()
        assert sweep.launcher is not None
        if blow.target == "launcher":
            pid = sweep.launcher.pid
        else:
            pid = sweep.processes_of(job)[blow.target]
        processes.send(pid, signal.SIGINT if blow.name == "Ctrl+C" else signal.SIGKILL)
        if blow.damages:
            blow.damaged = job.damage_newest()
            flipped = f"one bit of its newest checkpoint, {blow.damaged}, is flipped"
            self.screen.tell("", flipped, "bad")

    def _resume(self, blow: Blow) -> None:
        """See the launcher end, and resume the sweep."""
        sweep = self.disturbed
        self._wait_until(sweep, sweep.has_ended, f"the end of the launcher after {blow.name}")
        self.screen.drain()
        assert sweep.launcher is not None
        code = sweep.launcher.returncode
        expected = 130 if blow.name == "Ctrl+C" else -signal.SIGKILL
        self._expect(code == expected, f"the launcher ended with exit code {code}, not {expected}")
        self.screen.tell("→", "resumed by the command that it has printed, its resume.sh", "good")
        sweep.resume(self.screen)

    def _see_it_resume(self, blow: Blow, job: Job, before: Attempt, after: Attempt) -> None:
        for reason in after.passed_over:
            self.screen.tell("", f"job {job.number} passed over {reason}", "note")
        lost = f"{after.repeated} steps are repeated" if after.repeated else "nothing is repeated"
        self.screen.tell(
            "→", f"job {job.number} resumes at step {after.first_step}, {lost}", "good"
        )
        what = f"job {job.number}, {blow.name}"
        code = before.code
        self._expect(code == blow.code, f"{what}: exit code {code}, not {blow.code}")
        if blow.code > 0:
            self._expect(after.repeated <= 1, f"{what}: {lost}, though it had time to save")
        if blow.damages:
            is_seen = any(blow.damaged in reason for reason in after.passed_over)
            self._expect(is_seen, f"{what}: the damage of {blow.damaged} went unnoticed")

    def _wait_until(self, sweep: Sweep, condition: Callable[[], bool], what: str) -> None:
        """Show what the launcher shows, and take samples, until something is true."""
        seen: list[tuple[int, int]] = []
        deadline = time.monotonic() + STALL_S
        while not condition():
            for job in sweep.jobs:
                job.sample()
            if not self.screen.pump(POLL_S):
                if sweep.has_ended() and not condition():
                    raise Unexpected(f"the launcher ended early; waited for {what}")
                time.sleep(POLL_S)
            now = [job.stand() for job in sweep.jobs]
            if now != seen:
                seen, deadline = now, time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise Unexpected(f"nothing happens; waited for {what}")

    def _expect(self, is_fine: bool, otherwise: str) -> None:
        """Note a problem, and continue: the rest is still worth seeing."""
        if not is_fine:
            self.problems.append(otherwise)
            self.screen.tell("!", f"UNEXPECTED: {otherwise}", "bad")


def main() -> int:
    """Run the demo; 0 if everything happened as expected and not one bit differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="chooses where to strike (0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each job ({STEPS})")
    options = parser.parse_args()
    if options.steps < 300:
        parser.error("--steps has to be at least 300: five blows need some room")
    processes.adopt_orphans()  # whatever happens, no process is left behind
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script: the launcher would ignore our Ctrl+C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    every_steps = options.steps // SAVES
    overrides = [
        f"lr={','.join(LEARNING_RATES)}",
        f"steps={options.steps}",
        f"hydra.launcher.n_jobs={len(LEARNING_RATES)}",
    ]
    if options.steps != STEPS:
        overrides.append(f"resilience.checkpoint.every_steps={every_steps}")
    root = Path("outputs", "demo", time.strftime("%Y-%m-%d_%H-%M-%S"))
    root.mkdir(parents=True)
    print(paint("forge demo", "bold"))
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(textwrap.fill(INTRODUCTION.format(steps=options.steps), width))
    print(f"Everything is kept below {root}")
    sweeps = [Sweep(name, root / name, []) for name in ("undisturbed", "disturbed")]
    for sweep in sweeps:
        sweep.jobs = [
            Job(number, f"lr={lr}", sweep.directory / str(number), options.steps)
            for number, lr in enumerate(LEARNING_RATES)
        ]
    demo = Demo(sweeps[0], sweeps[1], Screen(), problems=[])
    blows = plan(options.seed, options.steps, every_steps)
    try:
        demo.run(blows, overrides)
        is_whole = True
    except Unexpected as unexpected:
        demo.problems.append(str(unexpected))
        is_whole = False
    except KeyboardInterrupt:
        print("\nInterrupted: every job is ended.")
        return 130
    finally:
        processes.kill_descendants()
        demo.screen.drain()
    if is_whole:
        print_sample(demo.undisturbed)
        print_table(demo.undisturbed, demo.disturbed, blows)
        demo.problems += compare(demo.undisturbed, demo.disturbed)
        from demo_picture import draw  # matplotlib takes a second to import

        path = draw(demo.undisturbed, demo.disturbed, blows, root / "demo.png")
        print(f"picture   {path}")
    for problem in demo.problems:
        print(paint(f"UNEXPECTED: {problem}", "bad"))
    print(f"The whole demo took {clock(time.time() - demo.screen.t0)}.")
    return 1 if demo.problems else 0


if __name__ == "__main__":
    sys.exit(main())
