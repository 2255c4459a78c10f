"""Waiting for submitted jobs: by the files they write, and by one squeue for all of them.

Neither needs Slurm's accounting. A job that ends says so in its own directory; one that the
cluster no longer knows, and that has not said anything, is reported at the next look.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from forge import messages, slurm
from forge.errors import ExitCode
from forge.launch.display import Display
from forge.launch.observed import ObservedJob
from forge.launch.view import State
from forge.requeue import Reason

_LOOK_S = 0.5
_LOOK_PER_JOB_S = 0.005
_ASK_S, _ASK_LEAST_S, _ASK_PER_JOB_S = 15.0, 3.0, 0.3
"""squeue: every 15 s where there are many jobs, sooner where there are few."""
_PATIENCE = 4
"""Questions without an answer, in a row, until people are told."""
_SILENCE_S = 10.0
"""A network disk may show what a job wrote so much later than Slurm its end."""


@dataclass
class SubmittedJob(ObservedJob):
    """A job of the cluster."""

    slurm_id: str = ""
    logs: Path | None = None
    """Folder of what the batch scripts print."""
    _gone: float | None = None

    def is_own(self, content: dict[str, Any]) -> bool:
        """Whether it was written under the number that the job has now."""
        return bool(content.get("slurm_job") == self.slurm_id)

    def look(self) -> None:
        """Take in what the wrapper says, and why it ended if it did."""
        super().look()
        content = self.read_state() if self.state.is_final and not self.reason else None
        if content is not None and content.get("slurm_job") == self.slurm_id:
            self.reason, self.code = content.get("reason", ""), content.get("code", 0)

    def learn(self, queued: slurm.Queued | None, now: float) -> None:
        """Take in what squeue says; None: it does not know the job."""
        if queued is not None and queued.is_alive:
            self._gone = None
            if queued.reason == "BadConstraints" and self._num_excluded() > 0:
                self._give_up()
            elif queued.state in ("PENDING", "REQUEUED", "CONFIGURING"):
                self.state = State.queued
                restarted = f"{self.because}, " if self.restarts and self.because else ""
                self.because = restarted.split("waiting")[0] + f"waiting ({queued.reason})"
            return
        if self._gone is None:
            self._gone = now
        elif now - self._gone > _SILENCE_S or (queued is not None and now - self._gone > 3):
            self.look()
            if not self.state.is_final:
                self._vanished(queued)

    def _num_excluded(self) -> int:
        """Restarts on other nodes, since one was unhealthy."""
        content = self.read_state() or {}
        return int(content["counts"]["excluded"]) if self.is_own(content) else 0

    def _give_up(self) -> None:
        """Every node that it could run on was excluded: it would wait for ever."""
        slurm.cancel(self.slurm_id)
        self.state, self.reason = State.failed, Reason.unhealthy.name
        self.code = int(ExitCode.UNHEALTHY)
        self.because = f"{self._num_excluded()} nodes are unhealthy, and there is no other for it"

    def _vanished(self, queued: slurm.Queued | None) -> None:
        is_cancelled = queued is not None and queued.state == "CANCELLED"
        self.state = State.stopped if is_cancelled else State.failed
        self.reason, self.code = "cancelled" if is_cancelled else "crashed", 1
        said = "knows nothing of it any more" if queued is None else f"says {queued.state}"
        if queued is not None and queued.reason not in ("None", ""):
            said += f" ({queued.reason})"
        content = self.read_state()
        if content is not None and content["state"] == "finished":  # under another number
            self.state, self.because, self.code = State.finished, "finished", 0
            return
        self.because = f"Slurm {said}, and its wrapper has not said how it ended"
        found = self.logs.glob(f"{self.slurm_id}_0_log.*") if self.logs is not None else ()
        logs = [str(path) for path in sorted(found)]
        if logs and not is_cancelled:
            what = "the batch script's output" if content is not None else "did its setup fail?"
            self.because += f"; {what} {' '.join(logs)}"


class Watcher:
    """Waits until every job has ended; a signal ends the waiting, not the jobs."""

    def __init__(self, jobs: list[SubmittedJob], progress: Any) -> None:
        self._jobs = jobs
        self._progress = progress
        self._received: list[int] = []
        self._ask_s = min(_ASK_S, max(_ASK_LEAST_S, _ASK_PER_JOB_S * len(jobs)))
        self._asked = time.monotonic()
        self._refused = 0

    def run(self) -> int | None:
        """Returns the signal that ended the waiting, or None once every job has ended."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    before[number] = signal.signal(number, self._on_signal)
        mode: Any = "plain" if self._progress == "none" else self._progress
        try:
            with Display(len(self._jobs), len(self._jobs), mode=mode) as display:
                while not self._received and self._look():
                    if self._progress != "none":
                        display.update([job.view() for job in self._jobs])
                    # Nothing tells of a file that changes on another machine.
                    select.select([], [], [], _LOOK_S + _LOOK_PER_JOB_S * len(self._jobs))
                if self._progress != "none":
                    display.update([job.view() for job in self._jobs])
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return self._received[0] if self._received else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _look(self) -> bool:
        """Whether there is anything to wait for."""
        waiting = [job for job in self._jobs if not job.state.is_final]
        for job in waiting:
            job.look()
        waiting = [job for job in waiting if not job.state.is_final]
        now = time.monotonic()
        if waiting and now - self._asked >= self._ask_s:
            self._asked = now
            try:
                queue = slurm.queue()
            except slurm.Refused as error:
                self._refused += 1
                if self._refused == _PATIENCE:  # a busy controller answers sooner
                    said = str(error).splitlines()[-1]
                    messages.warn(f"The cluster does not answer: {said}. Waiting by files alone.")
                return True
            self._refused = 0
            for job in waiting:
                job.learn(queue.get(job.slurm_id), now)
        return bool(waiting)
