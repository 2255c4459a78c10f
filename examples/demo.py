"""`make demo`: the same sweep twice, the second time with five faults.

Both sweeps run with `hydra/launcher=local`, two jobs side by side, and show the launcher's own
display. In the second sweep the demo kills the process of one job, then the supervisor of the
other; it presses Ctrl+C, kills the launcher, and at last kills a job and flips a bit of its newest
checkpoint. At the end it compares the weights and the losses of every job bit by bit. The steps at
which the faults are injected are a seeded choice. All files are kept in `outputs/demo/<time>/`.

    python examples/demo.py [--seed N] [--steps N] [--picture PATH]
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
from demo_sweep import Attempt, Fault, Job, Sweep

from forge.process import children, processes

TRAIN = Path(__file__).resolve().parent / "train.py"
LEARNING_RATES = ("1e-2", "3e-3")
STEPS, SAVES = 700, 14  # examples/conf/train.yaml saves every 50 steps
POLL_S = 0.02
STALL_S = 120.0
"""A demo in which no job makes progress for so long has failed."""

INTRODUCTION = (
    "One sweep, twice, on two cores: a small GPT learns to write Python from the source of Python's"
    " standard library, in {steps} steps, with two learning rates side by side. The first sweep is"
    " not interrupted. The second sweep has five faults: the launcher restarts killed jobs by"
    " itself; after Ctrl+C and after SIGKILL of the launcher, the demo runs the command that the"
    " launcher printed."
)


class Unexpected(Exception):
    """The demo cannot continue."""


def plan(seed: int, steps: int, every_steps: int) -> list[Fault]:
    """Five faults, about evenly spread over the sweep, and well after the last save."""
    faults = [
        Fault("SIGKILL of task", "task", [0], -9, "the job's process is killed"),
        Fault(
            "SIGKILL of supervisor",
            "supervisor",
            [1],
            -9,
            "the parent of the job's process is killed",
        ),
        Fault("Ctrl+C", "launcher", [0, 1], 130, "all jobs save and stop"),
        Fault(
            "SIGKILL of launcher",
            "launcher",
            [0, 1],
            143,
            "the launcher is killed; its jobs save and stop",
        ),
        Fault(
            "SIGKILL and damage",
            "task",
            [1],
            -9,
            "the job is killed and its checkpoint damaged",
            True,
        ),
    ]
    chance = random.Random(seed)
    for number, fault in enumerate(faults, 1):
        fault.step = round(steps * (number + chance.uniform(-0.25, 0.25)) / (len(faults) + 1))
        fault.step += -fault.step % every_steps
        fault.step -= round(every_steps * chance.uniform(0.2, 0.7))
    return faults


@dataclass
class Demo:
    """Both sweeps, the screen, and what did not go as expected."""

    uninterrupted: Sweep
    interrupted: Sweep
    screen: Screen
    problems: list[str]

    def run(self, faults: list[Fault], overrides: list[str]) -> None:
        """Run both sweeps and inject the faults; raises Unexpected if the demo cannot continue."""
        train = [sys.executable, str(TRAIN), "-m", "hydra/launcher=local", *overrides]
        for sweep in (self.uninterrupted, self.interrupted):
            print(f"\n{paint(f'The {sweep.name} sweep', 'bold')}")
            command = [*train, f"hydra.sweep.dir={sweep.directory}"]
            print(paint(f"$ {shlex.join(command)}", "dim"), flush=True)
            sweep.start(command, self.screen)
            for fault in faults if sweep is self.interrupted else ():
                self._inject(fault, faults)
            self._wait_until(sweep, sweep.has_ended, "its end")
            self.screen.drain()
            assert sweep.launcher is not None
            code = sweep.launcher.returncode
            self._expect(code == 0, f"the {sweep.name} sweep ended with exit code {code}, not 0")

    def _inject(self, fault: Fault, faults: list[Fault]) -> None:
        sweep, hit = self.interrupted, [self.interrupted.jobs[number] for number in fault.hits]
        self._wait_until(sweep, lambda: self._is_time(fault, hit), f"step {fault.step}")
        before = {job.number: job.stand()[0] for job in hit}
        where = " and ".join(f"job {job.number} at step {job.stand()[1]}" for job in hit)
        self.screen.tell("✗", f"{fault.name}, {where}: {fault.story}", "bad")
        if fault.code == 143:  # the killed launcher no longer draws: wait for its last drawing
            until = time.monotonic() + 2.0
            self._wait_until(
                sweep, lambda: self.screen.is_told or time.monotonic() > until, "the next drawing"
            )
        self._hit(fault, hit[0])
        if fault.target == "launcher":
            self._resume(fault)
        for job in hit:
            trains = partial(job.trains_after, before[job.number])
            self._wait_until(sweep, trains, f"job {job.number} to resume")
            attempts = job.attempts(faults)
            hit_attempt = next(one for one in attempts if one.fault is fault)
            self._see_it_resume(fault, job, hit_attempt, attempts[hit_attempt.number])

    def _is_time(self, fault: Fault, hit: list[Job]) -> bool:
        """Whether the jobs train, and have reached the chosen step."""
        return all(
            job.stand()[1] >= fault.step
            and job.attempts()[-1].began
            and len(self.interrupted.processes_of(job)) == 2
            for job in hit
        )

    def _hit(self, fault: Fault, job: Job) -> None:
        sweep, fault.injected = self.interrupted, time.time()
        assert sweep.launcher is not None
        if fault.target == "launcher":
            pid = sweep.launcher.pid
        else:
            pid = sweep.processes_of(job)[fault.target]
        processes.send(pid, signal.SIGINT if fault.name == "Ctrl+C" else signal.SIGKILL)
        if fault.damages:
            fault.damaged = job.damage_newest()
            flipped = f"one bit of its newest checkpoint, {fault.damaged}, is flipped"
            self.screen.tell("", flipped, "bad")

    def _resume(self, fault: Fault) -> None:
        """Wait for the end of the launcher, and resume the sweep."""
        sweep = self.interrupted
        self._wait_until(sweep, sweep.has_ended, f"the end of the launcher after {fault.name}")
        self.screen.drain()
        assert sweep.launcher is not None
        code = sweep.launcher.returncode
        expected = 130 if fault.name == "Ctrl+C" else -signal.SIGKILL
        self._expect(code == expected, f"the launcher ended with exit code {code}, not {expected}")
        self.screen.tell("→", "resumed by the command that it printed, its resume.sh", "good")
        sweep.resume(self.screen)

    def _see_it_resume(self, fault: Fault, job: Job, before: Attempt, after: Attempt) -> None:
        for reason in after.passed_over:
            self.screen.tell("", f"job {job.number} skipped {reason}", "note")
        lost = f"{after.repeated} steps are repeated" if after.repeated else "nothing is repeated"
        self.screen.tell(
            "→", f"job {job.number} resumes at step {after.first_step}, {lost}", "good"
        )
        what = f"job {job.number}, {fault.name}"
        code = before.code
        self._expect(code == fault.code, f"{what}: exit code {code}, not {fault.code}")
        if fault.code > 0:
            self._expect(after.repeated <= 1, f"{what}: {lost}, though it had time to save")
        if fault.damages:
            is_seen = any(fault.damaged in reason for reason in after.passed_over)
            self._expect(is_seen, f"{what}: the damage of {fault.damaged} went unnoticed")

    def _wait_until(self, sweep: Sweep, condition: Callable[[], bool], what: str) -> None:
        """Pass the launcher's output on, and take samples, until a condition is true."""
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
    parser.add_argument("--seed", type=int, default=0, help="chooses the steps of the faults (0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each job ({STEPS})")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="copy the picture to PATH")
    options = parser.parse_args()
    if options.steps < 300:
        parser.error("--steps has to be at least 300: there are five faults")
    children.adopt_orphans()  # whatever happens, no process is left behind
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
    print(f"All files are kept in {root}")
    sweeps = [Sweep(name, root / name, []) for name in ("uninterrupted", "interrupted")]
    for sweep in sweeps:
        sweep.jobs = [
            Job(number, f"lr={lr}", sweep.directory / str(number), options.steps)
            for number, lr in enumerate(LEARNING_RATES)
        ]
    demo = Demo(sweeps[0], sweeps[1], Screen(), problems=[])
    faults = plan(options.seed, options.steps, every_steps)
    try:
        demo.run(faults, overrides)
        is_whole = True
    except Unexpected as unexpected:
        demo.problems.append(str(unexpected))
        is_whole = False
    except KeyboardInterrupt:
        print("\nInterrupted: all jobs are killed.")
        return 130
    finally:
        processes.kill_descendants()
        demo.screen.drain()
    if is_whole:
        print_sample(demo.uninterrupted)
        print_table(demo.uninterrupted, demo.interrupted, faults)
        demo.problems += compare(demo.uninterrupted, demo.interrupted)
        from demo_picture import draw  # matplotlib takes a second to import

        path = draw(demo.uninterrupted, demo.interrupted, faults, root / "demo.png")
        print(f"picture   {path}")
        if options.picture is not None:
            shutil.copyfile(path, options.picture)
    for problem in demo.problems:
        print(paint(f"UNEXPECTED: {problem}", "bad"))
    print(f"The whole demo took {clock(time.time() - demo.screen.t0)}.")
    return 1 if demo.problems else 0


if __name__ == "__main__":
    sys.exit(main())
