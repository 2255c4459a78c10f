"""`make demo`: the same training twice at the same time, one of them not left in peace.

The disturbed run is stopped by SIGTERM, SIGUSR1 and Ctrl+C, killed, and killed once more with its
newest checkpoint damaged; each time the command that forge printed starts it again. At the end
weights and losses of the two are compared bit by bit. Where to strike is a seeded choice of
steps. Everything is kept below `outputs/demo/<time>/`.

    python examples/demo.py [--seed N] [--steps N]
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo_job import Attempt, Blow, Job, damage_newest
from demo_report import compare, print_sample, print_table
from demo_screen import Screen, clock, paint
from omegaconf import OmegaConf

CONF = Path(__file__).resolve().parent / "conf"
POLL_S = 0.01
STALL_S = 120.0
"""A demo in which no run makes progress for so long has failed."""

INTRODUCTION = (
    "One training, twice, side by side on two cores: a small GPT learns to write Python from the"
    " source of Python's standard library, in {steps} steps. One run is left undisturbed. The"
    " other is stopped three times and killed twice, then finds its newest checkpoint damaged;"
    " each time it is started again by the command that forge printed."
)


class Unexpected(Exception):
    """The demo cannot go on."""


def plan(seed: int, steps: int, every_steps: int) -> list[Blow]:
    """Five blows, about evenly spread over the run; kills well away from the last save."""
    blows = [
        Blow("SIGTERM", signal.SIGTERM, 143, "somebody else needs the machine"),
        Blow("SIGUSR1", signal.SIGUSR1, 75, "somebody asks for a requeue"),
        Blow("Ctrl+C", signal.SIGINT, 130, "somebody changes their mind"),
        Blow("SIGKILL", signal.SIGKILL, -9, "the node dies, without a word"),
        Blow("SIGKILL", signal.SIGKILL, -9, "the node dies, and its disk lies", damages=True),
    ]
    chance = random.Random(seed)
    for number, blow in enumerate(blows, 1):
        blow.step = round(steps * (number + chance.uniform(-0.25, 0.25)) / (len(blows) + 1))
        if blow.signal == signal.SIGKILL:
            blow.step += -blow.step % every_steps
            blow.step -= round(every_steps * chance.uniform(0.2, 0.7))
    return blows


@dataclass
class Demo:
    """Both runs, the screen, and what did not happen as it should."""

    undisturbed: Job
    disturbed: Job
    screen: Screen
    problems: list[str]

    def run(self, blows: list[Blow], overrides: list[str]) -> None:
        """The whole story; raises Unexpected where it cannot go on."""
        train = [sys.executable, str(CONF.parent / "train.py"), *overrides]
        for job in (self.undisturbed, self.disturbed):
            job.start(shlex.join([*train, f"hydra.run.dir={job.directory}"]))
        self._see_it_begin(self.disturbed.attempt)
        for blow in blows:
            self._strike(blow)
            before = self.disturbed.attempt
            self.disturbed.start(self._printed_command())
            number = self.disturbed.attempt.number
            self.screen.tell(f"attempt {number}", "started by the command that was printed", "bold")
            if number == 2:
                self.screen.tell("", f"$ {self.disturbed.resume_command()}", "dim")
            self._see_it_go_on(before, self.disturbed.attempt)
        for job in (self.disturbed, self.undisturbed):
            self._wait_until(job.has_ended, f"the end of the {job.name} run")
            self._see_it_finish(job)

    def kill(self) -> None:
        """Leave no process behind."""
        for job in (self.undisturbed, self.disturbed):
            for attempt in job.attempts:
                if attempt.process.poll() is None:
                    os.killpg(attempt.process.pid, signal.SIGKILL)
                    attempt.process.wait()

    def _strike(self, blow: Blow) -> None:
        job, attempt = self.disturbed, self.disturbed.attempt
        self._reach(blow.step)
        attempt.blow, attempt.struck, step = blow, time.time(), job.step()
        os.kill(attempt.process.pid, blow.signal)
        self.screen.tell(blow.name, f"in step {step}: {blow.story}", "bad")
        self._wait_until(job.has_ended, f"the end of attempt {attempt.number} after {blow.name}")
        code, stop = attempt.code, job.event("stop")
        self._expect(code == blow.code, f"{blow.name}: exit code {code}, not {blow.code}")
        if blow.signal == signal.SIGKILL:
            self.screen.tell("", f"exit code {code}: no time to save anything")
        elif stop is None:
            self._expect(False, f"{blow.name}: no stop is recorded; see {attempt.log}")
        else:
            took = attempt.ended - attempt.struck
            saved = f"saved at step {stop['step']}; {took:.1f} s later gone, exit code {code}"
            self.screen.tell("", saved)
        if blow.damages:
            attempt.damaged = damage_newest(job.directory / "checkpoints")
            damage = f"a bit in the middle of its newest checkpoint, {attempt.damaged}, is flipped"
            self.screen.tell("damage", damage, "bad")

    def _see_it_begin(self, attempt: Attempt) -> None:
        job, what = self.disturbed, f"attempt {attempt.number} to begin"
        self._wait_until(lambda: bool(attempt.began) or job.has_ended(), what)
        if not attempt.began:
            raise Unexpected(f"attempt {attempt.number} did not begin to train; see {attempt.log}")

    def _see_it_go_on(self, before: Attempt, attempt: Attempt) -> None:
        self._see_it_begin(attempt)
        for reason in attempt.passed_over:
            self.screen.tell("", f"passed over {reason}", "note")
        lost = "nothing is repeated"
        if attempt.repeated:
            lost = f"{attempt.repeated} steps are repeated"
        self.screen.tell("", f"goes on at step {attempt.first_step}: {lost}")
        assert before.blow is not None
        if before.blow.signal != signal.SIGKILL:
            problem = f"{attempt.repeated} steps are repeated after {before.blow.name}"
            self._expect(attempt.repeated <= 1, problem)
        if before.damaged:
            is_seen = any(before.damaged in reason for reason in attempt.passed_over)
            self._expect(is_seen, f"the damage of {before.damaged} went unnoticed")

    def _see_it_finish(self, job: Job) -> None:
        if job.is_finished:
            return
        job.is_finished = True
        code, took = job.attempt.code, clock(job.attempt.ended - job.attempts[0].started)
        self._expect(code == 0, f"{job.name} ended with {code}, not 0; see {job.attempt.log}")
        self.screen.tell(job.name, f"has finished, {took} after its start", "good")

    def _reach(self, step: int) -> None:
        job = self.disturbed
        self._wait_until(lambda: (job.step() or 0) >= step or job.has_ended(), f"step {step}")
        if job.has_ended():
            raise Unexpected(f"attempt {job.attempt.number} ended early; see {job.attempt.log}")

    def _printed_command(self) -> str:
        command, attempt = self.disturbed.resume_command(), self.disturbed.attempt
        shown = [line.strip() for line in attempt.log.read_text().splitlines()]
        assert attempt.blow is not None
        # Printed at every start, and once more by whoever had the time to say goodbye.
        least = 1 if attempt.blow.signal == signal.SIGKILL else 2
        self._expect(shown.count(command) >= least, f"{attempt.log} does not show: {command}")
        return command

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        jobs = (self.undisturbed, self.disturbed)
        seen: list[int | None] = []
        deadline = 0.0
        while not condition():
            now = [job.step() for job in jobs]
            if now != seen:
                seen, deadline = now, time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise Unexpected(f"nothing happens; waited for {what}")
            for job in jobs:
                job.note_progress()
            if self.undisturbed.has_ended():
                self._see_it_finish(self.undisturbed)
            if self.screen.is_due():
                self.screen.show([(j.name, j.last_step, j.steps, j.remark()) for j in jobs])
            time.sleep(POLL_S)

    def _expect(self, is_fine: bool, otherwise: str) -> None:
        """Tell a problem, and go on: the rest is still worth seeing."""
        if not is_fine:
            self.problems.append(otherwise)
            self.screen.tell("UNEXPECTED", otherwise, "bad")


def main() -> int:
    """Run the demo; 0 if everything happened as expected and not one bit differs."""
    plain, train = OmegaConf.load(CONF / "plain.yaml"), OmegaConf.load(CONF / "train.yaml")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="chooses where to strike (0)")
    parser.add_argument("--steps", type=int, help=f"steps of each run ({plain.steps})")
    options = parser.parse_args()
    every_steps, overrides = train.resilience.checkpoint.every_steps, []
    if options.steps is None:
        options.steps = plain.steps
    elif options.steps < 100:
        parser.error("--steps has to be at least 100: five blows need some room")
    else:
        every_steps = options.steps // 20
        overrides = [
            f"steps={options.steps}",
            f"resilience.checkpoint.every_steps={every_steps}",
        ]
    root = Path("outputs", "demo", time.strftime("%Y-%m-%d_%H-%M-%S"))
    root.mkdir(parents=True)
    print(paint("forge demo", "bold"))
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(textwrap.fill(INTRODUCTION.format(steps=options.steps), width))
    print(f"Output and checkpoints: {root}\n")
    jobs = [Job(name, root / name, options.steps) for name in ("undisturbed", "disturbed")]
    demo = Demo(jobs[0], jobs[1], Screen(), problems=[])
    try:
        demo.run(plan(options.seed, options.steps, every_steps), overrides)
    except Unexpected as unexpected:
        demo.problems.append(str(unexpected))
    except KeyboardInterrupt:
        demo.screen.close()
        print("Interrupted: both runs are ended.")
        return 130
    finally:
        demo.screen.close()
        demo.kill()
    if all(job.attempts and job.attempt.code == 0 for job in jobs):
        print_sample(demo.undisturbed)
        print_table(demo.disturbed, demo.undisturbed)
        demo.problems += compare(demo.undisturbed, demo.disturbed)
        from demo_picture import draw  # matplotlib takes a second to import

        print(f"picture   {draw(demo.undisturbed, demo.disturbed, root / 'demo.png')}")
    for problem in demo.problems:
        print(paint(f"UNEXPECTED: {problem}", "bad"))
    print(f"The whole demo took {clock(time.time() - demo.screen.t0)}.")
    return 1 if demo.problems else 0


if __name__ == "__main__":
    sys.exit(main())
