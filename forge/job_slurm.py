"""A job on a cluster: `python -m forge.job_slurm <bundle>`, in its batch script.

The batch script is the one place of a job that outlives its tasks, stands outside the container
and has Slurm's commands. From there the tasks are started, as a step; why they ended is asked of
the controller; and this is the only place that requeues the job:

    preempted, time limit, asked to, unhealthy node ─► requeued, within its budget
    crashed, killed, forced exit, SIGTERM by hand   ─► started again right here, the nodes are ours
    cancelled                                       ─► never again
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forge import bundle, processes, slurm, step, time_limit
from forge.errors import ExitCode
from forge.files import refusals
from forge.job import Job
from forge.job_files import STATE, WATCH, read_json, suffix
from forge.requeue import Counts, Decision, Outcome, Reason, signal_name
from forge.slurm import JobInfo, Why
from forge.watch import MARGIN_S, ORPHANED_S

_ASK_S = 10.0
"""Seconds for a question whose answer can be done without."""
_TICK_S = 1.0
_LEAD_SLACK_S = 90.0
"""Slurm announces the time limit up to a minute earlier than it was asked to."""
_RESTART_S = 60.0
"""A task is not started again where less than this is left before the limit is announced."""
_GRACE_S = 3600.0
"""Longer than any grace time of a preemption."""
_SRUN_FAILED = 1
"""Exit code of srun where there is no step: its nodes do not answer, say."""
_HERE = (Reason.signalled, Reason.crashed, Reason.forced, Reason.failed)
"""Reasons to start the task again on the same nodes."""


class SlurmJob(Job):
    """The wrapper of a job that was submitted by `hydra/launcher=slurm`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._job = slurm.own_job(os.environ)
        self._slurm_restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._is_ending = False
        """Whether Slurm has begun to end the job: it told the batch script, too."""
        self._srun = 0
        self._step = -1
        """Number of the step, as Slurm counts them in each start of the job."""
        self._reported: set[str] = set()
        """Names of the reports of ranks that ended without an error."""
        self._has_begun = True
        """Whether a task of the last attempt has begun."""
        self._sick: list[str] = []
        self._info: JobInfo | None = None
        self._why = Why.unknown
        self._end_time: float | None = None
        """When the time limit is, by the monotonic clock; None where there is none."""

    def _take_over(self) -> Outcome | None:
        """Go on with the budgets of this job's earlier starts.

        Returns:
            How the attempt ended that nobody could account for, since its wrapper was killed as
            well; None where there is none.
        """
        self._end_strays()
        state = read_json(self.forge / STATE)  # the launcher has removed that of earlier sweeps
        if state is None:
            self.counts.best_step = self._saved_step()
            self.counts.restarts = self._slurm_restarts
            return None
        if state["state"] == "finished":
            return Outcome(ExitCode.FINISHED)
        before = int(state.get("slurm_restarts", 0))
        is_same_start = state.get("slurm_job") == self._job and before == self._slurm_restarts
        if state["state"] in ("failed", "stopped"):
            if is_same_start:  # it had ended, and then its wrapper was killed
                sys.exit(state["code"] if state["code"] >= 0 else 128 - state["code"])
            self.counts.best_step = self._saved_step()
            return None  # requeued by hand: another chance
        self.counts = Counts(**state["counts"])
        self._step = int(state.get("step", -1)) if is_same_start else -1
        if state["state"] == "starting":
            self._because = state["because"]
            self._account(self._slurm_restarts - before - 1)
            return None
        if is_same_start:  # our wrapper was killed, and the batch script has started another
            self._end_step()
            return Outcome(-signal.SIGKILL)
        # Slurm's own requeue (no grace time, a node that failed) left nobody to say so.
        self._account(self._slurm_restarts - before - 1)
        return Outcome(-signal.SIGKILL, Reason.preempted)

    def _account(self, unseen: int) -> None:
        """Requeues by Slurm of which no wrapper has seen anything."""
        if unseen > 0:
            self.counts.preemptions += unseen
            self.counts.restarts += unseen
            self._tell("requeued by Slurm", times=unseen)

    def _write_state(self, state: str, because: str = "", **more: Any) -> None:
        start = {"slurm_job": self._job, "slurm_restarts": self._slurm_restarts}
        super()._write_state(state, because, **start, step=self._step, **more)

    def _end_step(self) -> None:
        """Nothing of the last step may live when the next begins."""
        try:
            slurm.end_step(self._job, self._step, _ASK_S)
        except slurm.NoAnswer as error:
            self._print(str(error))

    # -- an attempt ----------------------------------------------------------------------------

    def _start(self, output: int) -> int:
        """Start the step; srun is the child to wait for."""
        for path in self.forge.glob(f"{step.EARLY}*"):
            path.unlink()
        self._why, self._info = Why.unknown, None
        self._reported.clear()
        environment = self._environment()
        left_s = self._time_left()
        self._end_time = None if left_s is None else time.monotonic() + left_s
        environment |= time_limit.handed_on(left_s, self.plan, environment)
        options = self.plan["slurm"]
        command = slurm.srun(
            options["srun_args"],
            str(self.directory / "output.log"),
            step.command(self.directory, options["start"]),
        )
        self._step += 1
        self._write_state("running", self._because)  # with the step's number
        # Not waited for by Popen: `processes.reap` collects every child.
        self._popen = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._srun = self._popen.pid
        return self._srun

    def _time_left(self) -> float | None:
        """Seconds until the time limit; None where there is none."""
        try:
            return slurm.show(self._job, _ASK_S).left_s
        except (slurm.NoAnswer, slurm.NoSuchJob) as error:
            self._print(f"{error}; the time limit is counted from now on")
            limit_s: float | None = self.plan["time_limit_s"]
            return limit_s

    def _wait(self, child: int, began: float) -> int:
        """Until the step has ended, or Slurm leaves no more time to wait for that."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        deadline, is_killed = math.inf, False
        while (status := processes.reap(child)) is None:
            poll.poll(_TICK_S * 1000)
            was_ending = self._is_ending
            self._take_in()
            is_urgent = self._is_ending and not was_ending
            if is_urgent or (deadline == math.inf and self._has_failed_rank()):
                deadline = min(deadline, time.monotonic() + self._patience_s())
            if time.monotonic() > deadline:
                self._print("tasks are still there: killing them")
                # By a SIGTERM srun kills its step. Not by scancel, which at this moment may hit a
                # job that Slurm has requeued. Where Slurm ends the job it kills the step itself.
                is_last = self._is_ending or is_killed
                processes.send(child, signal.SIGKILL if is_last else signal.SIGTERM)
                deadline = time.monotonic() + self.plan["slurm"]["kill_wait_s"] + _ASK_S
                is_killed = True
        self._take_in()
        self._srun = 0
        return status

    def _patience_s(self) -> float:
        """Seconds for tasks to leave, once one of them has failed or Slurm ends the job."""
        if self._is_ending:  # after KillWait nobody is left who could requeue
            kill_wait_s = self.plan["slurm"]["kill_wait_s"]
            return float(max(kill_wait_s * 0.6, kill_wait_s - 5.0))
        return float((self.plan["timeout_s"] or ORPHANED_S) + 2 * MARGIN_S)

    def _has_failed_rank(self) -> bool:
        """Whether a rank has ended with an error while others run."""
        if self.plan["slurm"]["ranks"] == 1:
            return False
        names = {name for name in os.listdir(self.forge) if name.startswith(WATCH)}
        for name in names - self._reported:
            report = read_json(self.forge / name)
            if report is None:
                continue  # a network disk that shows the name before the content
            if report["code"] != 0:
                return True
            self._reported.add(name)
        return False

    def _reports(self) -> list[dict[str, Any] | None]:
        """What the watch of each rank says; None where it has not said anything."""
        ranks = range(self.plan["slurm"]["ranks"])
        return [read_json(self.forge / f"{WATCH}{suffix(rank)}") for rank in ranks]

    def _take_in(self) -> None:
        for number in processes.heard(self._reader):
            # USR1, USR2 and INT come with `scancel --full`, which sends them to the tasks, too.
            if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                self._is_ending = True

    # -- how it ended --------------------------------------------------------------------------

    def _outcome(self, status: int) -> Outcome:
        """By the rank that ended first with an error, and by what the controller says."""
        reports = self._reports()
        if not all(reports) and not self._is_ending:  # srun is gone, and perhaps the step is not
            self._end_step()
            reports = self._reports()
        self._has_begun = any(reports)
        ended = []
        for rank, report in enumerate(reports):
            if report is None:
                ended.append((math.inf, self._from_srun(status), "", False, ""))
                continue
            code, said = self._as_said(report, suffix(rank))
            ended.append((report["time"], code, said, report["is_held"], report["node"]))
        bad = [one for one in ended if one[1] != ExitCode.FINISHED]
        _, code, said, is_held, _ = min(bad or ended)
        self._sick = sorted({one[4] for one in ended if one[1] == ExitCode.UNHEALTHY and one[4]})
        asked = self._reason(code, is_held) if code != ExitCode.FINISHED else None
        if asked is None and code == _SRUN_FAILED and not self._has_begun:
            asked, said = Reason.crashed, "the task could not be started by srun"
        is_lost = code < 0 and not self._has_begun
        return Outcome(code, asked, is_held, is_watch_lost=is_lost, verdict=said)

    def _from_srun(self, status: int) -> int:
        """The code of a rank that left no report, from srun's wait status: at best a signal.

        One that came in the first instant of the task, before anybody could keep it, ends the
        task as the policy says of this signal.
        """
        code = os.waitstatus_to_exitcode(status)
        if code > 128 and signal_name(code - 128).startswith("SIG"):
            action = self.plan["actions"].get(signal_name(code - 128).removeprefix("SIG"))
            if action == "requeue":
                return int(ExitCode.REQUEUE)
            return code if action == "stop" else 128 - code
        return code if code > 0 else -signal.SIGKILL

    def _reason(self, code: int, is_held: bool) -> Reason | None:
        """Why Slurm ends the job, if it does; asked once for each stop."""
        self._ask_controller()
        if self._why is Why.cancelled:
            return Reason.cancelled
        if code in (ExitCode.HALTED, ExitCode.BAD_CONFIG, ExitCode.UNHEALTHY):
            return None
        if self._why in (Why.preempted, Why.requeued):
            return Reason.preempted
        signalled = 128 + signal.Signals[f"SIG{self.plan['signal']}"]
        if self._why is Why.time_limit:
            return Reason.time_limit
        # One that was still importing, say, when the limit was announced, and was killed for it.
        is_stopped = is_held or code in (ExitCode.REQUEUE, ExitCode.FORCED, signalled)
        if is_stopped and self._is_limit_near():
            return Reason.time_limit
        if code in (ExitCode.TERMINATED, signalled, 128 + signal.SIGHUP):
            return Reason.signalled
        return None

    def _is_limit_near(self) -> bool:
        left_s = self._left_s()
        return left_s is not None and left_s <= self.plan["lead_s"] + _LEAD_SLACK_S

    def _left_s(self) -> float | None:
        """Seconds until the time limit: as the controller said, or by our own clock."""
        if self._why is Why.requeued:
            return None  # what the controller says is the next start's
        if self._info is not None:
            return self._info.left_s
        return None if self._end_time is None else self._end_time - time.monotonic()

    def _ask_controller(self) -> bool:
        """Learn why; False where nobody answers: what is known stays, and is said."""
        is_answered = True
        try:
            self._info = slurm.show(self._job, self._asking_s())
            self._why = slurm.why(self._info, self._slurm_restarts)
        except slurm.NoSuchJob:
            self._why = Why.cancelled  # it is gone: there is nothing to requeue
        except slurm.NoAnswer as error:
            is_answered = False
            self._print(f"the controller does not say why the job is stopped: {error}")
        self._tell("why", answer=self._why.name, left_s=self._left_s(), is_answered=is_answered)
        return is_answered

    def _asking_s(self) -> float:
        """Seconds that a question may take now."""
        return self._patience_s() / 2 if self._is_ending else 6 * _ASK_S

    def _end(self, outcome: Outcome, decision: Decision) -> int:
        if outcome.reason is Reason.cancelled:
            decision = Decision(False, "cancelled")
        if outcome.code == ExitCode.BAD_CONFIG and self.plan["slurm"]["ranks"] > 1:
            said = f"{decision.because}: see `hydra.launcher.tasks_per_node` in its output"
            decision = Decision(False, said)
        return super()._end(outcome, decision)

    # -- starting again ------------------------------------------------------------------------

    def _move_on(self, outcome: Outcome) -> int | None:
        """Requeue the job and leave; None where its nodes are still ours and it stays."""
        if outcome.reason in _HERE and self._can_stay():
            return None
        code = outcome.code if outcome.code > 0 else 128 - outcome.code
        if self.plan["requeue"].get("as_site"):
            return self._leave_it_to_slurm()
        excluded = "" if self._info is None else self._info.excluded
        # Once more: it may have been cancelled while it was saving.
        if not self._ask_controller():
            return self._give_up(outcome, code, "the controller does not answer")
        if self._why is Why.cancelled:
            self._tell("stopped", because="cancelled")
            self._write_state("stopped", "cancelled", code=code, reason=Reason.cancelled.name)
            return code
        try:
            if self._why is not Why.requeued:
                slurm.requeue(self._job, self._asking_s())
                self._tell("requeued", job=self._job)
        except (slurm.NoAnswer, slurm.NoSuchJob) as error:
            return self._give_up(outcome, code, str(error))
        if outcome.reason is Reason.unhealthy and self._sick:
            try:
                slurm.exclude(self._job, self._sick, excluded, _ASK_S)
                self._tell("excluded", nodes=self._sick)
            except (slurm.NoAnswer, slurm.NoSuchJob) as error:
                self._print(f"the job may come back to this node: {error}")
        return int(ExitCode.REQUEUE)

    def _leave_it_to_slurm(self) -> int:
        """Without a policy: whether the job comes back is the site's to say.

        Whoever ends in the grace time has ended for Slurm, and is not brought back: so we stay.
        """
        deadline = time.monotonic() + _GRACE_S
        while self._why is Why.preempted and time.monotonic() < deadline:
            select.select([self._reader], [], [], _TICK_S)
            processes.heard(self._reader)
        return int(ExitCode.REQUEUE)

    def _give_up(self, outcome: Outcome, code: int, problem: str) -> int:
        """The job cannot be requeued."""
        because = f"{outcome}; could not be requeued: {problem}"
        self._print(because)
        self._tell("failed", because=because)
        self._write_state("failed", because, code=code, reason=outcome.reason.name)
        return code

    def _can_stay(self) -> bool:
        """Whether the nodes are ours for long enough."""
        if self._is_ending or self._why is not Why.unknown or not self._has_begun:
            return False
        left_s = self._left_s()
        return left_s is None or left_s > self.plan["lead_s"] + _LEAD_SLACK_S + _RESTART_S


@refusals()
def main(arguments: list[str]) -> int:
    """`python -m forge.job_slurm <bundle>`."""
    (path,) = arguments
    number = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    return SlurmJob(bundle.unpack(Path(path), number)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
