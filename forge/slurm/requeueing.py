"""How the wrapper's job goes back into the queue, and on which nodes it does not start.

If Slurm refuses the requeue, the wrapper resubmits the job. If the controller does not answer until
the allocation ends, the wrapper notes this in the job's state, and the launcher submits the job.
Standard library only.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from forge.errors import ExitCode, NoAnswer, NotRequeueable, Reason, SlurmError, SlurmRefused
from forge.job.ending import Ending
from forge.job.job import Job, print_line
from forge.job.requeue import Decision, decide_restart, spread
from forge.jobdir.job_files import forge_dir, read_json, write_json
from forge.jobdir.job_state import Counts, JobState, State
from forge.jobdir.plan import JobPlan
from forge.slurm import client
from forge.slurm.allocation import ASK_S, Allocation
from forge.slurm.exclusions import Choice, Exclusions
from forge.slurm.job_info import Why

_GRACE_S = 3600.0
"""Longer than any grace time of a preemption."""
_TICK_S = 1.0
_NOTE = "successor.json"
"""`<job dir>/.forge/successor.json`."""


class Requeueing:
    """The requeue of one job, with the nodes that it avoids."""

    def __init__(
        self,
        job: Job,
        allocation: Allocation,
        exclusions: Exclusions,
        script: Path,
        look: Callable[[], None],
    ) -> None:
        """`script`: the batch script. `look`: takes note of signals to the batch script."""
        self._job, self._allocation, self._exclusions = job, allocation, exclusions
        self._script, self._look = script, look

    def requeue(self, ending: Ending, decision: Decision) -> int:
        """Requeue the job; returns the exit code of this process."""
        allocation, job, choice = self._allocation, self._job, Choice()
        if job.limits.is_up_to_site:
            return self._wait_for_slurm()
        try:
            allocation.insist(allocation.learn, self._look)
            if allocation.why is not Why.cancelled:
                choice = self._choose()
                allocation.insist(self._put_back, self._look)
            if allocation.why is Why.cancelled:
                job.say("stopped: cancelled")
                return job.end(ending.imposed(Reason.cancelled), "cancelled")
            if allocation.why is not Why.requeued:
                job.record("requeued", job=allocation.name)
        except NotRequeueable as refusal:
            return self._resubmit(ending, decision.pause_s, str(refusal), choice)
        except SlurmError as error:
            return self._leave_note(ending, str(error))
        job.write(State.queued, decision.because)
        try:
            self._exclude(choice)
            if decision.pause_s:
                client.delay(allocation.name, decision.pause_s, ASK_S)
        except SlurmError as error:
            job.say(
                "the job is requeued, but forge could not exclude this node or delay the start,"
                f" so the job may start on it again: {error}"
            )
        return int(ExitCode.REQUEUE)

    def _put_back(self, within_s: float) -> None:
        """Requeue the job, unless it was cancelled or requeued meanwhile: `allocation.why`.

        A requeue also brings back a cancelled job, so the controller is asked before each try.
        """
        allocation, deadline = self._allocation, time.monotonic() + within_s
        while True:
            left_s = deadline - time.monotonic()
            allocation.learn(left_s)
            if allocation.why in (Why.cancelled, Why.requeued):
                return
            try:
                return client.requeue(allocation.name, min(left_s, ASK_S))
            except NoAnswer:
                if left_s <= ASK_S:
                    raise

    def _wait_for_slurm(self) -> int:
        """If requeues are left to the site: wait until Slurm ends the job, and requeues it.

        Slurm does not requeue a job that exits during the grace time, so the wrapper waits.
        """
        deadline = time.monotonic() + _GRACE_S
        while self._allocation.why is Why.preempted and time.monotonic() < deadline:
            time.sleep(_TICK_S)  # Slurm kills this process
        return int(ExitCode.REQUEUE)

    # -- nodes to avoid ------------------------------------------------------------------------

    def too_few_nodes(self, ending: Ending) -> str:
        """Why the job cannot start, if that would be on a node that it has found sick itself."""
        if ending.reason is not Reason.unhealthy:
            return ""
        nodes = ", ".join(self._choose().missing(self._job.directory))
        return nodes and (
            "the job is not started again, since too few nodes are left for it without"
            f" {nodes}. Have the node repaired, then run the sweep's command again"
        )

    def _choose(self) -> Choice:
        needed = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        within_s = min(self._allocation.asking_s() / 2, ASK_S)
        return self._exclusions.choose(self._allocation.info, needed, within_s)

    def _exclude(self, choice: Choice) -> None:
        """Exclude the nodes for the job, which is pending again. Raises SlurmError."""
        if self._exclusions.apply(self._allocation.name, choice, ASK_S):
            left_out = [one.node for one in choice.left_out]
            self._job.record("excluded", nodes=choice.names, left_out=left_out)
            self._job.set_backend(**self._exclusions.to_json())
            self._job.write(State.queued, self._job.state.because)

    def avoid_sick_nodes(self) -> None:
        """Requeue the job if another job of the sweep has found one of its nodes sick.

        Such a requeue does not count, since nothing was started. But if Slurm allocates the node
        again, or too few other nodes are left, the job starts on it.
        """
        limits, job, allocation = self._job.limits, self._job, self._allocation
        if not limits.enabled or limits.is_up_to_site or not self._exclusions.standing():
            return
        try:
            nodes = client.hostnames(job.state.nodes, ASK_S)
            found = [one for one in self._exclusions.standing() if one.node in nodes]
            if not found:
                return
            allocation.learn(ASK_S)
            if allocation.why is not Why.unknown:
                return  # Slurm stops the job in any case
            choice = self._choose()
            left = self._exclusions.left
            going = [one for one in found if one in choice.kept and one.node not in left]
            if not going:
                nodes = [one.node for one in found]
                job.record("stays", nodes=nodes, because="Slurm gives it no others")
                what = ", ".join(map(str, found))
                return job.say(
                    f"starting on nodes that failed a health check, as Slurm has no others: {what}"
                )
            self._put_back(ASK_S)
            if allocation.why in (Why.cancelled, Why.requeued):
                return
        except SlurmError as error:
            return job.say(
                "forge could not move the job away from nodes that failed a health check, so the"
                f" job starts on the nodes that it has: {error}"
            )
        left += [one.node for one in going]
        because = f"requeued before it began, to avoid {', '.join(map(str, going))}"
        job.say(because)
        job.record("requeued", job=allocation.name, because=because)
        job.set_backend(**self._exclusions.to_json())
        job.write(State.queued, because)
        try:
            self._exclude(choice)
        except SlurmError as error:
            job.say(f"forge could not exclude this node, so the job may start on it again: {error}")
        sys.exit(int(ExitCode.REQUEUE))

    # -- if Slurm does not requeue the job -----------------------------------------------------

    def finish_resubmission(self, before: JobState) -> None:
        """End this process if an earlier wrapper was killed while it resubmitted the job."""
        name, restarts = self._allocation.name, self._allocation.restarts
        if _is_noted(forge_dir(self._job.directory), name, restarts):
            refusal = "forge's wrapper process was killed while it resubmitted the job"
            ended = Ending(Reason.preempted, int(ExitCode.REQUEUE), before.because)
            sys.exit(self._resubmit(ended, 0.0, refusal, Choice()))

    def _resubmit(self, ending: Ending, pause_s: float, refusal: str, choice: Choice) -> int:
        """Submit the same job again under a new number, since Slurm does not requeue it."""
        job, name, restarts = self._job, self._allocation.name, self._allocation.restarts
        options = [f"--begin=now+{math.ceil(pause_s)}"] if pause_s else []
        if choice.names:
            options.append(f"--exclude={','.join(choice.names)}")
        try:
            new = _submit_again(forge_dir(job.directory), self._script, name, restarts, options)
        except (SlurmRefused, OSError) as error:
            return self._leave_note(ending, f"{refusal}; {error}")
        self._exclusions.take(choice)
        job.record("resubmitted", job=name, successor=new)
        job.say(
            f"Slurm does not requeue job {name} ({refusal}): resubmitted as {new}."
            f" Jobs that depend on {name} do not wait for {new}: change their dependency by"
            f" `scontrol update JobId=<their id> Dependency=<type>:{new}`."
        )
        job.set_backend(successor=new, **self._exclusions.to_json())
        job.write(State.queued, ending.text)
        return int(ExitCode.REQUEUE)

    def _leave_note(self, ending: Ending, problem: str) -> int:
        """Note for the launcher, or a command that resumes the sweep, to resubmit the job."""
        because = f"{ending.text}; could not be requeued: {problem}"
        self._job.say(
            f"{because}. If the sweep's command is still running, it resubmits the job; otherwise"
            " run that command again"
        )
        self._job.record("stopped", because=because)
        self._job.set_backend(unrequeued=problem)
        code = ending.exit_code
        self._job.write(State.stopped, because, code=code, reason=Reason.unanswered)
        return code


def _is_noted(folder: Path, job: str, restarts: int) -> bool:
    """Whether there is a note for this start of the job."""
    return (read_json(folder / _NOTE) or {}).get("of") == [job, restarts]


def _submit_again(folder: Path, script: Path, job: str, restarts: int, options: list[str]) -> str:
    """Submit a job's batch script again, for this job alone; returns the new number.

    Only once, even if a process is killed then: a note is written before sbatch is called. If the
    note has no job number, the next process first looks for another job with this batch script.

    Args:
        folder: The directory of the note.
        script: The batch script.
        job: The job's number, `<array>_<task>` in an array.
        restarts: SLURM_RESTART_COUNT of the start that gets a successor.
        options: More options for sbatch.
    Raises:
        SlurmRefused: If sbatch refuses, with Slurm's message.
        OSError: If the note cannot be written.
    """
    path = folder / _NOTE
    found = None
    if _is_noted(folder, job, restarts):
        noted = (read_json(path) or {})["job"]
        found = noted or client.resubmitted(job, str(script), client.queue())
    else:
        write_json(path, {"of": [job, restarts], "job": None}, is_synced=True)
    if found is None:
        task = job.partition("_")[2]
        number = client.submit(script, *options, *([f"--array={task}"] if task else []))
        found = f"{number}_{task}" if task else number
    write_json(path, {"of": [job, restarts], "job": found})
    return str(found)


def wait_for_room(plan: JobPlan, error: OSError) -> int:
    """The disk is full at the first start of a job: requeue it for later, within its limits.

    Returns:
        The exit code of this process.
    """
    name = client.own_job(os.environ)
    # All restarts so far had this cause: once unpacked, a job has a state of its own.
    counts = Counts(failures=int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    ending = Ending.of(ExitCode.DISK_FULL)
    decision = decide_restart(ending, counts, plan.requeue, -1, has_run=False)
    decision = spread(decision, name, counts.failures)
    text = f"{decision.because} ({error})"
    try:
        if decision.starts_again:
            client.requeue(name, 6 * ASK_S)
            client.delay(name, decision.pause_s, ASK_S)
    except SlurmError as refusal:
        text += f"; could not be requeued: {refusal}"
    print_line(text)
    return int(ExitCode.DISK_FULL)
