"""How the wrapper's job goes back into the queue, and on which nodes it does not start.

If Slurm refuses the requeue, or does not answer until the allocation ends, the job ends and says
so: the sweep's command starts it again. Standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from forge.errors import ExitCode, NoAnswer, Reason, SlurmError
from forge.job.ending import Ending
from forge.job.job import Job, print_line
from forge.job.requeue import Decision, decide_restart, spread
from forge.jobdir.job_state import Counts, State
from forge.jobdir.plan import JobPlan
from forge.slurm import client
from forge.slurm.allocation import ASK_S, Allocation
from forge.slurm.exclusions import Choice, Exclusions
from forge.slurm.job_info import Why

_GRACE_S = 3600.0
"""Longer than any grace time of a preemption."""
_TICK_S = 1.0


class Requeueing:
    """The requeue of one job, with the nodes that it avoids."""

    def __init__(
        self,
        job: Job,
        allocation: Allocation,
        exclusions: Exclusions,
        look: Callable[[], None],
    ) -> None:
        """`look`: takes note of signals to the batch script."""
        self._job, self._allocation, self._exclusions = job, allocation, exclusions
        self._look = look

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
        except SlurmError as error:
            return self._give_up(ending, str(error))
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

    def _give_up(self, ending: Ending, problem: str) -> int:
        """End the job, which Slurm does not requeue."""
        because = f"{ending.text}; Slurm did not requeue the job: {problem}"
        self._job.say(f"{because}. Run the sweep's command again: it submits the job")
        self._job.record("stopped", because=because)
        code = ending.exit_code
        self._job.write(State.stopped, because, code=code, reason=Reason.unanswered)
        return code


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
