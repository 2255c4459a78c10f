"""The local queue: starts jobs in free slots, monitors them, and stops them all together."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType

from forge.errors import ExitCode
from forge.filesystem.files import open_file
from forge.job.ending import signal_name
from forge.jobdir import plan
from forge.jobdir.job_files import OUTPUT, PLAN, TOKEN, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.launch.local.resources import Slots
from forge.launch.opening import handled
from forge.launch.planning import ROOT
from forge.launch.progress.display import Display
from forge.launch.progress.observed import ObservedJob, Views

_START = f"import sys; sys.path.append({ROOT!r}); from forge.job.local import main;"
_START += " sys.exit(main(sys.argv[1:]))"
_LOOK_S = 0.1
"""Seconds between two checks of the jobs and their files."""
_MAX_WRAPPERS = 2
LIMIT = (signal.SIGUSR2, signal.SIGUSR1)
"""Signals that announce a time limit, as Slurm's `--signal` does."""
_REFUSED = (ExitCode.IN_USE, ExitCode.BAD_CONFIG)
"""Exit codes after which a new wrapper would fail for the same reason."""


@dataclass
class QueuedJob(ObservedJob):
    """A job of the batch, from the queue to its end."""

    process: subprocess.Popen[bytes] | None = None
    slot: int | None = None
    wrappers: int = 0
    """Number of its wrappers that ended without a final state."""

    def is_own(self, content: JobState) -> bool:
        """Whether the state was written by the wrapper that this queue started."""
        return self.process is not None and content.pid == self.process.pid


class Queue:
    """Runs the jobs of a batch; `run` returns when all have ended."""

    def __init__(
        self,
        jobs: list[QueuedJob],
        slots: Slots,
        display: Display,
        stops_at: float = math.inf,
    ) -> None:
        """`stops_at`: Unix time at which all jobs have to save and exit."""
        self._jobs = jobs
        self._views = Views(jobs)
        self._slots = slots
        self._free = list(range(slots.count))[::-1]
        self._display = display
        self._stops_at = stops_at
        self._received: list[int] = []
        self._handled = 0
        for job in jobs:
            content = job.read_state()
            if content is not None and content.state is State.finished:
                job.state, job.because = State.finished, "finished before"
                job.restarts = content.counts.restarts

    def run(self) -> int | None:
        """Run every job; returns the signal that stopped the sweep, or None."""
        with handled(self._on_signal, *LIMIT), self._display:
            try:
                self._loop()
            except BaseException:
                self._received.append(signal.SIGTERM)
                self._loop()  # wait for the jobs to end
                raise
        return self._received[0] if self._received else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only a repeated Ctrl+C counts. A lost connection sends SIGHUP twice, by kernel and shell;
        # srun forwards a SIGTERM that its task also gets; and the end of an enclosing Slurm job
        # signals all its processes more than once.
        if not self._received or (number == signal.SIGINT and TOKEN not in os.environ):
            self._received.append(number)

    def _loop(self) -> None:
        while True:
            if not self._received and time.time() >= self._stops_at:
                self._received.append(LIMIT[0])
            if len(self._received) > self._handled:
                self._handled = len(self._received)
                self._stop(self._received[-1], self._handled)
            while self._free and (job := self._next()) is not None:
                self.start(job)
            running = [job for job in self._jobs if job.process is not None]
            has_ended = False
            for job in running:
                job.poll()
                if job.process is not None and job.process.poll() is not None:
                    self._ended(job)
                    has_ended = True
            self._display.update(self._views.now())
            is_left = self._next() is not None
            if has_ended and is_left:
                continue  # start the next job in the free slot now
            if not is_left and not any(job.process is not None for job in self._jobs):
                return
            time.sleep(_LOOK_S)

    def _next(self) -> QueuedJob | None:
        """The next job to start; None if no further job starts."""
        if self._received:
            return None
        return next((job for job in self._jobs if job.state is State.queued), None)

    # -- a job ---------------------------------------------------------------------------------

    def start(self, job: QueuedJob, *, is_continued: bool = False) -> None:
        """Start the wrapper of a job; `is_continued`: an earlier wrapper was killed."""
        if job.slot is None:
            job.slot = self._free.pop()
        environment = dict(os.environ)
        if self._slots.has_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._slots.gpus[job.slot])
        try:
            self._spawn(job, environment, is_continued=is_continued)
        except OSError as error:
            job.state, job.because, job.code = State.failed, f"cannot be started: {error}", 1
            self._free.append(job.slot)
            job.slot = None

    def _spawn(self, job: QueuedJob, environment: dict[str, str], *, is_continued: bool) -> None:
        # The job's own token, also if this launcher runs inside a job with a token.
        environment[TOKEN] = plan.read_earlier(job.directory).token
        if not environment[TOKEN]:
            path = forge_dir(job.directory) / PLAN
            what = "the file that describes the job is missing; run the sweep's command again"
            raise FileNotFoundError(errno.ENOENT, what, str(path))
        flags = ["--parent", str(os.getpid())] + ["--continue"] * is_continued
        output = open_file(job.directory / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            job.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *flags, str(job.directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl+C reaches only the launcher, which passes it on
            )
        finally:
            os.close(output)
        job.state = State.starting

    def _ended(self, job: QueuedJob) -> None:
        """Handle the end of a job's wrapper: the job ended, or the wrapper was killed."""
        assert job.process is not None
        code = job.process.returncode
        job.poll()
        content = job.read_state() if job.state.is_final else None
        job.process = None
        if content is not None:
            job.reason, job.code = content.reason, content.code
        elif not self._received and job.wrappers <= _MAX_WRAPPERS and code not in _REFUSED:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            self._display.say(
                f"job {job.number}: forge's wrapper process {how}, and is started again"
            )
            job.wrappers += code >= 0  # a kill does not count; another error might repeat
            self.start(job, is_continued=True)
            return
        elif self._received:
            job.state, job.because, job.code = State.stopped, "stopped", code
        else:
            job.state, job.code = State.failed, code
            job.because = (
                f"forge's wrapper process exited with code {code}, see {job.directory / OUTPUT}"
            )
        assert job.slot is not None
        self._free.append(job.slot)
        job.slot = None

    # -- stopping ------------------------------------------------------------------------------

    def _stop(self, number: int, count: int) -> None:
        """On the first signal the jobs save and exit; the second kills them."""
        live = [job for job in self._jobs if job.process is not None]
        name = "Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name
        again = "pressing it again" if number == signal.SIGINT else "Ctrl+C"
        text = f"saving and exiting; {again} kills them" if count == 1 else "killing them"
        self._display.say(f"{name}: {len(live)} job{'s' * (len(live) != 1)}, {text}")
        for job in live:
            assert job.process is not None
            if count == 1:
                job.process.send_signal(signal.SIGINT if number == signal.SIGINT else 15)
            elif count == 2:
                job.process.send_signal(signal.SIGQUIT)
            else:
                job.process.kill()
        for job in self._jobs:
            if job.state is State.queued:
                job.because = "not started"
