"""The wrapper of a job in forge's own batch script: `python -m forge.slurm.wrapper <bundle>`.

The batch script outlives the tasks, runs outside the container and has Slurm's commands. The
wrapper starts the tasks as a step, asks the controller why they ended, and alone requeues the job:

    preempted, time limit, requested, unhealthy or lost node ─► requeued, within the limits
    another job of the sweep has excluded one of its nodes   ─► requeued before the tasks start
    crashed, killed, hung, forced exit, SIGTERM              ─► restarted on the same nodes
    cancelled                                                ─► not started again

Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from forge.errors import ExitCode, Reason, is_disk_full
from forge.filesystem.files import exit_on_error
from forge.job.backend import TaskBackend
from forge.job.ending import Ending
from forge.job.job import Job
from forge.job.requeue import Decision
from forge.job.task import Task
from forge.job.wrapper import Wrapper, job_of, patience_s
from forge.jobdir import node_fault
from forge.jobdir import plan as plan_file
from forge.jobdir.job_state import JobState, State
from forge.jobdir.node_fault import NodeFault
from forge.jobdir.plan import JobPlan
from forge.slurm import client, requeueing, submitted
from forge.slurm.allocation import Allocation
from forge.slurm.exclusions import Exclusions
from forge.slurm.job_info import FINAL, IMPOSED, Why
from forge.slurm.requeueing import Requeueing
from forge.slurm.running_step import RunningStep

_TICK_S = 1.0
_SRUN_FAILED = 1
"""Exit code of srun if it cannot start a step, for example since a node does not answer."""
_HERE = (
    *(Reason.signalled, Reason.crashed, Reason.out_of_memory),
    *(Reason.rank_lost, Reason.forced, Reason.failed, Reason.code_changed, Reason.hung),
)
"""Reasons to restart the tasks on the same nodes."""
_BROUGHT_BACK = "requeued by Slurm: preempted without a grace time, or `scontrol requeue` by hand"
"""The controller's answer is the same for both."""


class WrappedJob(TaskBackend):
    """A job that was submitted by `hydra/launcher=slurm`."""

    is_queue = True

    def __init__(self, job: Job, plan: JobPlan, script: Path) -> None:
        """`script` is the batch script."""
        super().__init__(job)
        assert plan.slurm is not None, "planned for one machine"
        self._plan, self._slurm, self._script = plan, plan.slurm, script
        self._task = Task.of(job.directory, plan)
        self._allocation = Allocation(job, plan, plan.slurm.kill_wait_s)
        self._step = RunningStep(job, plan.slurm)
        sweep = script.parents[2]  # <sweep dir>/.forge/slurm/<script>
        self._exclusions = Exclusions(job.directory, sweep, plan.slurm.exclude_h, job.say)
        self._requeueing = Requeueing(job, self._allocation, self._exclusions, self.look)
        self._has_begun = True
        """Whether a task of the last attempt has begun."""
        self._is_killing = False
        """Whether a person has asked to kill the tasks."""
        self._is_new_allocation = False
        """Whether the job need not be requeued after the end of an attempt of an earlier start."""

    def take_over(self) -> Ending | None:
        """Continue with the budgets of this job's earlier starts.

        Returns:
            The end of the last attempt, if its wrapper was killed before it could count it.
        """
        job, allocation = self.job, self._allocation
        if self._slurm.name not in ("", os.environ.get("SLURM_JOB_NAME")):
            client.rename(allocation.name, self._slurm.name)  # the jobs of an array share a name
        before = job.read()  # the launcher has removed those of earlier sweeps
        if before is None:
            job.set_budgets(None)
            job.counts.restarts += allocation.restarts
            return None
        if before.state is State.finished:
            job.set_budgets(before)
            return Ending.of(ExitCode.FINISHED)
        is_same_job = before.job == allocation.name
        restarts = int(before.start or 0)
        is_same_start = is_same_job and restarts == allocation.restarts
        self._exclusions.load(before.backend, is_same_list=is_same_job)
        job.set_backend(**self._exclusions.to_json())
        if before.state.is_final and is_same_start:  # then its wrapper was killed
            sys.exit(before.exit_code)
        if before.ends_next_start:
            sys.exit(job.repeat_end(before))
        if before.state.is_final:
            job.set_budgets(None)
            return None  # requeued by hand: another chance
        job.set_budgets(before)
        if is_same_start:
            self._step.continue_at(int(before.backend.get("step", -1)))
        # Slurm starts a job with a new number without a requeue.
        self._account(allocation.restarts - (restarts + 1 if is_same_job else 0))
        if before.state is not State.running:
            return None
        # The killed wrapper has perhaps not read the ranks' reports of sick nodes.
        self._exclusions.note(node_fault.read_all(job.directory, self._slurm.ranks).values())
        return self._end_of_killed_wrapper(before, is_same_start=is_same_start)

    def _end_of_killed_wrapper(self, before: JobState, *, is_same_start: bool) -> Ending:
        killed = Ending.of(-signal.SIGKILL)
        if is_same_start:  # the batch script has started another wrapper
            self._step.end()
            return killed
        # Slurm itself has requeued the job: the wrapper had no time to note it, or was killed.
        self._is_new_allocation = True
        if before.backend.get("is_ending"):
            return killed.imposed(Reason.preempted, _BROUGHT_BACK)
        return killed.imposed(Reason.node_failed)

    def _account(self, unseen: int) -> None:
        """Count requeues by Slurm that no wrapper has seen."""
        if unseen > 0:
            counts = self.job.counts
            counts.preemptions += unseen
            counts.restarts += unseen
            self.job.record("requeued by Slurm", times=unseen)

    # -- an attempt ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Leave nodes that another job of the sweep has found sick."""
        self._requeueing.avoid_sick_nodes()
        self._exclusions.left.clear()

    def start(self, task: Task, environment: dict[str, str], output: int) -> None:
        """Start the step."""
        self._task = task
        self._is_new_allocation = False
        self._allocation.begin_attempt()
        environment = environment | self._allocation.end_time(environment)
        number = self._step.number + 1
        self.job.set_backend(step=number, is_ending=None, **self._exclusions.to_json())
        self.job.write(State.running, self.job.state.because)
        self._step.start(task, environment, output)

    def has_ended(self) -> bool:
        """Whether srun has ended."""
        return self._step.has_ended()

    def ended_ranks(self) -> dict[int, bool]:
        """The ranks whose supervisor has reported their end."""
        self._step.look()
        return self._step.ended_ranks()

    def cancel(self, *, is_now: bool) -> None:
        """Stop the tasks by a signal; scancel would give them only KillWait to save."""
        self.stopped_by = Reason.cancelled
        self._is_killing |= is_now
        if not is_now:
            self._step.received.append(self._task.stop_signal(signal.SIGTERM))

    def receive(self, number: int) -> None:
        """Keep a signal to the batch script for the tasks, unless it is Slurm's."""
        self._allocation.receive(number)
        if number != signal.SIGCHLD:
            self._step.received.append(number)

    def tick(self) -> float:
        """Ask why the job ends, once it does; end srun if it outlives its tasks."""
        allocation, job = self._allocation, self.job
        allocation.look_at_limit()
        if allocation.has_news:
            allocation.ask()
            if allocation.why is not Why.unknown:
                self._step.received.clear()  # Slurm signals the tasks, too
            if allocation.is_ending:
                # In case the wrapper is killed before it can write the reason.
                job.set_backend(is_ending=True)
                job.write(State.running, job.state.because)
                self._step.allow(allocation.patience_s())
        if self._is_killing:  # until the step exists, and Slurm answers
            self._step.end()
        elif not allocation.is_ending:
            self._step.pass_on()
        wait_s = allocation.patience_s() if allocation.is_ending else patience_s(self._plan)
        self._step.tick(wait_s, is_last=allocation.is_ending)
        return _TICK_S

    # -- how it ended --------------------------------------------------------------------------

    def ending(self) -> Ending:
        """The end, from the rank that failed first and the controller's answer."""
        step, allocation = self._step, self._allocation
        step.look()
        if not all(step.reports) and not allocation.is_ending:
            step.end()  # srun is gone, but tasks can be running
            step.look()
        self._has_begun = any(step.reports) or allocation.is_by_hand
        ends = step.ends(self._task, has_begun=self._has_begun)
        ending = self._explain(self.first_end(self._task, ends))
        self._exclusions.note(self._sick_nodes(ending))
        return ending

    def _explain(self, found: Ending) -> Ending:
        """The end of the rank, with the controller's reason, if Slurm has ended the job."""
        # Slurm signals us and a command, which can exit with 0 before we see the signal.
        if found.has_finished_anyway:
            reason = None
        else:
            self._allocation.ask()
            reason = self._reason(found)
        why = self._allocation.why
        is_requeued = reason is Reason.preempted and why is Why.requeued
        can_be_lost = (reason is None or is_requeued) and not all(self._step.reports)
        if can_be_lost and self._allocation.has_lost_node():
            return found.imposed(Reason.node_failed)
        if reason is None:
            if found.code == _SRUN_FAILED and not self._has_begun:
                return found.imposed(Reason.crashed, "srun could not start the task")
            return found
        texts = {Why.cancelled: "cancelled", Why.script_killed: why.value}
        if why is Why.out_of_memory and (info := self._allocation.info) is not None:
            texts[why] = f"{why.value}: the job had {info.memory}"
        return found.imposed(reason, _BROUGHT_BACK if is_requeued else texts.get(why, ""))

    def _reason(self, found: Ending) -> Reason | None:
        """Why Slurm or a person has ended the tasks; None if they have ended by themselves."""
        code, why = found.code, self._allocation.why
        if why is Why.script_killed:
            return None if found.is_finished else Reason.crashed
        if found.reason in FINAL and why is not Why.cancelled:
            return None
        if why in IMPOSED:
            return IMPOSED[why]
        number = signal.Signals[f"SIG{self._plan.signal}"]
        if found.can_be_by(number) and self._allocation.is_limit_near():
            return Reason.time_limit
        was_told = self._allocation.is_by_hand and code < 0
        if was_told:
            self.job.say("a task was killed by a signal sent by hand, before it could save")
        is_told = code in (ExitCode.TERMINATED, 128 + number, 128 + signal.SIGHUP)
        if was_told or (is_told and not found.is_command):
            return Reason.signalled
        return found.reason if found.is_imposed else None

    def _sick_nodes(self, ending: Ending) -> list[NodeFault]:
        """The nodes that ranks report as sick; else the node of the first unhealthy rank."""
        found = list(node_fault.read_all(self.job.directory, self._slurm.ranks).values())
        if found or ending.reason is not Reason.unhealthy:
            return found
        reports = [one for one in self._step.reports if one and one.code == ExitCode.UNHEALTHY]
        first = min(reports, key=lambda one: one.time, default=None)
        return [NodeFault(first.node if first else "", "", ending.text, "refuse")]

    # -- starting again ------------------------------------------------------------------------

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has requeued the job already."""
        return self._allocation.why is Why.requeued and self.job.limits.enabled

    def is_cut_short(self) -> bool:
        """Also if the attempt had less than half of its time."""
        limit_s = self._plan.time_limit_s
        return super().is_cut_short() or (limit_s is not None and self.job.took_s < limit_s / 2)

    def refusal(self, ending: Ending) -> str:
        """Too few nodes are left for the job."""
        return self._requeueing.too_few_nodes(ending)

    def restart_elsewhere(self, ending: Ending, decision: Decision) -> int | None:
        """Requeue the job, unless the tasks can be restarted on the same nodes."""
        can_stay = ending.reason in _HERE and self._has_begun and self._allocation.lasts()
        if self._is_new_allocation or can_stay:
            return None
        return self._requeueing.requeue(ending, decision)


def wrapper_of(directory: Path, script: Path) -> Wrapper:
    """The wrapper of the job in a directory; `script` is the batch script."""
    plan, restarts = plan_file.read(directory), os.environ.get("SLURM_RESTART_COUNT") or "0"
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    job = job_of(directory, plan, job=client.own_job(os.environ), start=restarts, nodes=nodes)
    return Wrapper(plan, WrappedJob(job, plan, script))


@exit_on_error()
def main(arguments: list[str]) -> int:
    """`python -m forge.slurm.wrapper <bundle>`."""
    (path,), number = map(Path, arguments), int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    try:
        directory = submitted.unpack(path, number)
    except OSError as error:
        if is_disk_full(error):
            return requeueing.wait_for_room(submitted.read_plan(path, number), error)
        raise
    return wrapper_of(directory, path.with_suffix(".sh")).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
