"""A job on a cluster: `python -m forge.slurm.wrapper <bundle>`, in its batch script.

The batch script outlives the tasks, runs outside the container and has Slurm's commands. Its
wrapper starts the tasks as a step, asks the controller why they ended, and alone requeues the job:

    preempted, time limit, requested, unhealthy or lost node ─► requeued, within the limits
    another job of the sweep has excluded one of its nodes   ─► requeued before the tasks start
    crashed, killed, hung, forced exit, SIGTERM              ─► restarted on the same nodes
    cancelled                                                ─► not started again

If Slurm refuses the requeue, the wrapper resubmits the job. If the controller does not answer until
the allocation ends, the wrapper notes this in the job's state, and the launcher submits the job.
One module, since the decision needs all facts: from the tasks, from srun and from the controller.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.errors import (
    ExitCode,
    NoAnswer,
    NoSuchJob,
    NotRequeueable,
    Reason,
    SlurmError,
    SlurmRefused,
    is_disk_full,
)
from forge.filesystem.files import exit_on_error
from forge.job.requeue import Decision, Ending, decide_restart, signal_name, spread
from forge.job.wrapper import Job
from forge.jobdir import job_state, ledger, node_fault
from forge.jobdir.job_files import REPORT, read_json, suffix, write_atomically
from forge.jobdir.job_state import Counts, State
from forge.jobdir.node_fault import NodeFault
from forge.process import processes, time_limit
from forge.slurm import bundle, client, step, successor
from forge.slurm.exclusions import Choice, Exclusions
from forge.slurm.job_info import JobInfo, Why

_ASK_S = 10.0
"""Timeout for a question whose answer is not essential."""
_TICK_S = 1.0
_LEAD_SLACK_S = 90.0
"""Slurm sends the signal before the time limit up to a minute earlier than requested."""
_RESTART_S = 60.0
"""The tasks are not restarted if less time than this is left before the time limit's signal."""
_GRACE_S = 3600.0
"""Longer than any grace time of a preemption."""
_SRUN_FAILED = 1
"""Exit code of srun if it cannot start a step, for example since a node does not answer."""
_LOOK_S = (10.0, 600.0)
"""Seconds between two checks of the time limit, which an administrator can change."""
_END_S = 15.0
"""Seconds before the end of the allocation in which a silent controller is no longer asked."""
_SRUN_S = 15.0
"""Seconds for srun to end after its tasks have ended."""
_HERE = (
    *(Reason.signalled, Reason.crashed, Reason.out_of_memory),
    *(Reason.rank_lost, Reason.forced, Reason.failed, Reason.code_changed, Reason.hung),
)
"""Reasons to restart the tasks on the same nodes."""
_BROUGHT_BACK = "requeued by Slurm: preempted without a grace time, or `scontrol requeue` by hand"
"""The controller's answer is the same for both."""


class SlurmJob(Job):
    """The wrapper of a job that was submitted by `hydra/launcher=slurm`."""

    def __init__(self, directory: Path, script: Path) -> None:
        """`script` is the batch script."""
        super().__init__(directory)
        assert self.plan.slurm is not None, "planned for one machine"
        self.slurm = self.plan.slurm
        self._script = script
        self._job = client.own_job(os.environ)
        self._slurm_restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        self._is_ending = False
        """Whether Slurm has begun to end the job: the batch script has received a signal, too."""
        self._is_by_hand = False
        """Whether a person, not Slurm, has signalled the batch script to end."""
        self._pending_signals: list[int] = []
        """Signals to the batch script that the tasks have not received yet."""
        self._srun = 0
        self._step = -1
        """Number of the step, as Slurm counts them in each start of the job."""
        self._has_begun = True
        """Whether a task of the last attempt has begun."""
        sweep, hours = script.parents[2], self.slurm.exclude_h  # <sweep dir>/.forge/slurm/<script>
        self._exclusions = Exclusions(directory, sweep, hours, self._print)
        self._info: JobInfo | None = None
        self._why = Why.unknown
        self._end_time: float | None = None
        """The time limit, by the monotonic clock; None without a limit."""
        self._batch_shell = os.getppid()
        self._ancestors: list[str] = []
        """Numbers under which the job was submitted before, the oldest first."""
        self._is_ours = False
        """Whether the allocation is new, so that the job need not be requeued after the end of an
        attempt of an earlier start."""

    def _take_over(self) -> Ending | None:
        """Take over the requeue counts of this job's earlier starts.

        Returns:
            The end of the last attempt, if its wrapper was killed before it could count it.
        """
        self._end_strays()
        state = job_state.read(self.directory)  # the launcher has removed those of earlier sweeps
        if state is None:
            self.counts.best_step = self._saved_step()
            self.counts.restarts = self._slurm_restarts
            return None
        if state.state is State.finished:
            return Ending.of(ExitCode.FINISHED)
        before, more = int(state.start or 0), state.backend
        is_same_job = state.job == self._job
        is_same_start = is_same_job and before == self._slurm_restarts
        is_same_list = is_same_job or more.get("successor") == self._job
        self._exclusions.load(more, is_same_list=is_same_list)
        self._ancestors = list(more.get("ancestors", ()))
        self._ancestors += [] if is_same_job else [state.job]
        if is_same_start and "successor" in more:
            sys.exit(int(ExitCode.REQUEUE))
        has_ended = state.state.is_final
        if has_ended and is_same_start:  # it had ended, and then its wrapper was killed
            code = state.code or ExitCode.TERMINATED  # 0: a command that was asked to stop
            sys.exit(int(code) if code >= 0 else 128 - code)
        if has_ended and "unrequeued" not in more:
            self.counts.best_step = self._saved_step()
            return None  # requeued by hand: another chance
        self.counts = state.counts
        if is_same_start and successor.is_noted(self.forge, self._job, before):
            refusal = "forge's wrapper process was killed while it resubmitted the job"
            sys.exit(self._resubmit(state.because, int(ExitCode.REQUEUE), 0.0, refusal))
        self._step = int(more.get("step", -1)) if is_same_start else -1
        # Slurm starts a job that was resubmitted without a requeue.
        self._account(self._slurm_restarts - (before + 1 if is_same_job else 0))
        if state.state is not State.running:
            self._because = state.because
            return None
        progress = ledger.read_progress(self.directory)
        self._began = state.began
        self._took_s = max(progress.began - self._began, 0.0) if progress is not None else 0.0
        killed = Ending.of(-signal.SIGKILL)
        # The killed wrapper has perhaps not read the ranks' reports of sick nodes.
        self._exclusions.note(node_fault.read_all(self.directory, self.slurm.ranks).values())
        if is_same_start:  # our wrapper was killed, and the batch script has started another
            self._end_step()
            return killed
        # Slurm itself has requeued the job: the wrapper had no time to note it, or was killed.
        self._is_ours = True
        is_told = more.get("is_ending", False)
        if is_told:
            return killed.imposed(Reason.preempted, _BROUGHT_BACK)
        return killed.imposed(Reason.node_failed)

    def _account(self, unseen: int) -> None:
        """Count requeues by Slurm that no wrapper has seen."""
        if unseen > 0:
            self.counts.preemptions += unseen
            self.counts.restarts += unseen
            self._record("requeued by Slurm", times=unseen)

    def _is_cut_short(self, *, has_boundary: bool) -> bool:
        limit_s = self.plan.time_limit_s
        return not has_boundary or (limit_s is not None and self._took_s < limit_s / 2)

    def _write_state(self, state: State, because: str = "", **more: Any) -> None:
        own = {"ancestors": self._ancestors, "step": self._step, **self._exclusions.to_json()}
        if state is State.running and self._is_ending:
            own["is_ending"] = True
        own |= more.pop("backend", {})
        start = {"job": self._job, "start": str(self._slurm_restarts), "backend": own}
        super()._write_state(state, because, **start, **more)

    def _end_step(self) -> None:
        """End the last step, so that none of its processes is left when the next step begins."""
        try:
            client.end_step(self._job, self._step, _ASK_S)
        except NoAnswer as error:
            self._print(str(error))

    # -- an attempt ----------------------------------------------------------------------------

    def _start(self, output: int) -> int:
        """Start the step; srun is the child to wait for."""
        for path in self.forge.glob(f"{step.EARLY}*"):
            path.unlink()
        self._why, self._info, self._is_by_hand = Why.unknown, None, False
        self._pending_signals.clear()
        environment = self._environment()
        self._is_ours = False
        left_s = self._time_left()
        self._end_time = None if left_s is None else time.monotonic() + left_s
        (self.forge / time_limit.MOVED).unlink(missing_ok=True)
        environment |= self._end_time_env(environment)
        options = self.slurm
        command = client.srun(
            options.srun_args,
            str(self.directory / "output.log"),
            step.command(self.directory, options.start),
        )
        self._step += 1
        self._write_state(State.running, self._because)  # with the step's number
        # Popen does not wait for it: `processes.reap` collects every child. srun gets a session of
        # its own, since `scancel --full` signals our process group, and srun kills the tasks on
        # SIGTERM.
        self._popen = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        self._srun = self._popen.pid
        return self._srun

    def _end_time_env(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The end time for the tasks; the one that Slurm has set can be outdated."""
        others = {k: v for k, v in environment.items() if k != time_limit.SLURM_END_TIME}
        return time_limit.env_for_child(self._left_s(), self.plan, others)

    def _look_at_limit(self) -> None:
        """Check from time to time, more often near the end, whether the time limit was changed."""
        before = self._left_s()
        if before is None or time.monotonic() < self._next_look:
            return
        # A full disk must not end the job; the next check retries.
        with contextlib.suppress(SlurmError, OSError):
            info = client.show(self._job, _TICK_S)
            if info.left_s is not None and not info.has_ended and abs(info.left_s - before) > 5:
                self._end_time = time.monotonic() + info.left_s
                (end,) = self._end_time_env(os.environ).values()
                write_atomically(self.forge / time_limit.MOVED, end)
                self._record("time limit moved", left_s=info.left_s, before_s=round(before, 1))
        self._look_next()

    def _look_next(self) -> None:
        until_s = (self._left_s() or 0.0) - self.plan.warning_s
        self._next_look = time.monotonic() + min(max(until_s / 4, _LOOK_S[0]), _LOOK_S[1])

    def _time_left(self) -> float | None:
        """Seconds until the time limit; None without a limit."""
        try:
            return client.show(self._job, _ASK_S).left_s
        except SlurmError as error:
            self._print(
                f"{error}; so the time left is unknown, and forge assumes that the job's time limit"
                " begins now"
            )
            limit_s: float | None = self.plan.time_limit_s
            return limit_s

    def _wait(self, child: int, began: float) -> int:
        """Wait until the step has ended, or Slurm leaves no more time to wait."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        deadline, is_killed = math.inf, False
        self._look_next()
        while (status := processes.reap().get(child)) is None:
            poll.poll(_TICK_S * 1000)
            was_ending = self._is_ending
            self._look_at_limit()
            self._drain_signals()
            if self._is_ending and not was_ending:
                self._ask_controller(self._asking_s())
            if self._pending_signals and not self._is_ending:
                self._pass_on()
            if self._is_ending and not was_ending:
                # In case the wrapper is killed before it can write the reason.
                self._write_state(State.running, self._because)
                deadline = min(deadline, time.monotonic() + self._patience_s())
            reports = self._reports()
            ended = ((rank, report) for rank, report in enumerate(reports) if report is not None)
            self.hangs.look({rank: report["code"] != 0 for rank, report in ended})
            has_failed = any(report is not None and report["code"] != 0 for report in reports)
            if deadline == math.inf and has_failed and not all(reports):
                deadline = time.monotonic() + self._patience_s()
            if deadline == math.inf and all(reports):
                deadline = time.monotonic() + _SRUN_S
            if time.monotonic() > deadline:
                self._print("tasks have not exited in time: killing them")
                # srun kills its step on SIGTERM. Not scancel, which could now cancel a job that
                # Slurm has just requeued. If Slurm ends the job, it kills the step itself.
                is_last = self._is_ending or is_killed
                processes.send(child, signal.SIGKILL if is_last else signal.SIGTERM)
                deadline = time.monotonic() + self.slurm.kill_wait_s + _ASK_S
                is_killed = True
        self._drain_signals()
        self._srun = 0
        return status

    def _patience_s(self) -> float:
        """Seconds for tasks to exit, once a task has failed or Slurm ends the job."""
        if self._is_ending:  # after KillWait no process is left that could requeue
            kill_wait_s = self.slurm.kill_wait_s
            return float(max(kill_wait_s * 0.6, kill_wait_s - 5.0))
        return super()._patience_s()

    def _reports(self) -> list[dict[str, Any] | None]:
        """The report of each rank's supervisor; None for a rank without a report."""
        ranks = range(self.slurm.ranks)
        return [read_json(self.forge / f"{REPORT}{suffix(rank)}") for rank in ranks]

    def _drain_signals(self) -> None:
        for number in processes.drain(self._reader):
            self._is_ending |= number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
            if number != signal.SIGCHLD:
                self._pending_signals.append(number)

    def _pass_on(self) -> None:
        """Pass the signals on to the tasks that `scancel --full` has sent to the script alone."""
        while self._pending_signals:
            name = signal_name(self._pending_signals[0])
            try:
                if not client.signal_step(self._job, self._step, name, _ASK_S):
                    return  # the step does not exist yet
            except NoAnswer as error:
                return self._print(f"could not pass {name} on to the tasks yet: {error}")
            self._record("passed on", signal=name)
            del self._pending_signals[0]

    # -- how it ended --------------------------------------------------------------------------

    def _ending(self, status: int) -> Ending:
        """The end, from the rank that failed first and the controller's answer."""
        reports = self._reports()
        if not all(reports) and not self._is_ending:  # srun is gone, but tasks can be running
            self._end_step()
            reports = self._reports()
        self._has_begun = any(reports) or self._is_by_hand
        found = self._of_all([self._of_rank(*one, status) for one in enumerate(reports)])
        asked, text = None if self._has_finished(found) else self._reason(found), ""
        is_open = asked is None or (asked is Reason.preempted and self._why is Why.requeued)
        if is_open and not all(reports) and self._has_lost_node():
            asked = Reason.node_failed
        if asked is None and found.code == _SRUN_FAILED and not self._has_begun:
            asked, text = Reason.crashed, "srun could not start the task"
        if self._why is Why.script_killed and asked is Reason.crashed:
            text = self._why.value
        if asked is Reason.preempted and self._why is Why.requeued:
            text = _BROUGHT_BACK
        ending = found if asked is None else found.imposed(asked, text)
        self._exclusions.note(self._sick(ending, reports))
        return ending

    def _sick(self, ending: Ending, reports: list[dict[str, Any] | None]) -> list[NodeFault]:
        """The nodes that ranks report as sick; else the node of the first unhealthy rank."""
        found = list(node_fault.read_all(self.directory, self.slurm.ranks).values())
        if found or ending.reason is not Reason.unhealthy:
            return found
        codes = [report for report in reports if report and report["code"] == ExitCode.UNHEALTHY]
        first = min(codes, key=lambda report: float(report["time"]), default={"node": ""})
        return [NodeFault(first["node"], "", ending.text, "refuse")]

    def _has_finished(self, found: Ending) -> bool:
        """Whether the task has certainly finished; if not, the controller is asked."""
        # Slurm signals us and a command, which can exit with 0 before we see the signal.
        is_certain = self._command is None or self._command.is_zero_finished
        return found.is_finished and is_certain

    def _of_rank(
        self, rank: int, report: dict[str, Any] | None, status: int
    ) -> tuple[float, Ending]:
        """Time and end of a rank; without a report, from srun's wait status."""
        if report is not None:
            return report["time"], self._read_ending(report, rank)
        code = self._from_srun(status)
        is_stopped = code == ExitCode.REQUEUE or code > 128
        text = "its supervisor was killed" if code < 0 and not self._has_begun else ""
        ending = Ending.of(code, text=text, is_command=self._command is not None)
        is_asked = ending.is_command and is_stopped
        return math.inf, ending.imposed(Reason.signalled) if is_asked else ending

    def _from_srun(self, status: int) -> int:
        """The exit code of a rank without a report, from srun's wait status.

        A signal in the first instant of the task, before a handler was set, has the effect that
        the policy gives to this signal.
        """
        code = os.waitstatus_to_exitcode(status)
        if code > 128 and signal_name(code - 128).startswith("SIG"):
            action = self.plan.actions.get(signal_name(code - 128).removeprefix("SIG"))
            if action == "requeue":
                return int(ExitCode.REQUEUE)
            return code if action == "stop" else 128 - code
        return code if code > 0 else -signal.SIGKILL

    def _reason(self, found: Ending) -> Reason | None:
        """Why Slurm ends the job, or None; the controller is asked once for each stop."""
        code = found.code
        self._ask_controller(self._asking_s())
        if self._why is Why.cancelled:
            return Reason.cancelled
        if self._why is Why.script_killed:
            return None if found.is_finished else Reason.crashed
        if found.reason in (Reason.halted, Reason.bad_config, Reason.unhealthy):
            return None
        if self._why in (Why.preempted, Why.requeued):
            return Reason.preempted
        number = signal.Signals[f"SIG{self.plan.signal}"]
        signalled = 128 + number
        if self._why is Why.time_limit:
            return Reason.time_limit
        # A task that was importing, or about to exit, when the time limit's signal came.
        is_stopped = found.is_held or code in (
            *(ExitCode.REQUEUE, ExitCode.FORCED, signalled, -number),
        )
        if found.is_command:
            is_stopped = found.is_imposed
        if is_stopped and self._is_limit_near():
            return Reason.time_limit
        was_told = self._is_by_hand and code < 0
        if was_told:
            self._print("a task was killed by a signal sent by hand, before it could save")
        is_told = code in (ExitCode.TERMINATED, signalled, 128 + signal.SIGHUP)
        if was_told or (is_told and not found.is_command):
            return Reason.signalled
        return found.reason if found.is_imposed else None

    def _has_lost_node(self) -> bool:
        """Whether the controller reports a node of the job as down or not responding."""
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        with contextlib.suppress(NoAnswer):
            return bool(nodes and client.lost_nodes(nodes, self._asking_s()))
        return False

    def _is_limit_near(self) -> bool:
        left_s = self._left_s()
        return left_s is not None and left_s <= self.plan.warning_s + _LEAD_SLACK_S

    def _left_s(self) -> float | None:
        """Seconds until the time limit; None if there is none, or it is unknown."""
        if self._why is Why.requeued:
            return None  # the controller's answer is about the next start
        return None if self._end_time is None else self._end_time - time.monotonic()

    def _ask_controller(self, within_s: float) -> bool:
        """Ask why Slurm stops the job; False, with a message, if the controller does not answer."""
        try:
            self._learn(within_s)
        except NoAnswer as error:
            self._print(f"cannot ask the controller why the job is stopped: {error}")
            self._record("why", answer=self._why.name, left_s=self._left_s(), is_answered=False)
            return False
        return True

    def _learn(self, within_s: float) -> None:
        """Ask the controller why Slurm stops the job. Raises NoAnswer."""
        try:
            self._info = client.show(self._job, within_s)
            self._why = client.why(self._info, self._slurm_restarts, within_s)
        except NoSuchJob:
            self._why = Why.cancelled  # without a job there is nothing to requeue
        else:
            if self._why is Why.cancelled and os.getppid() != self._batch_shell:
                self._why = Why.script_killed
            if self._why in (Why.unknown, Why.preempted) and not self._info.has_ended:
                self._is_by_hand |= self._is_ending and self._why is Why.unknown
                self._is_ending = False
            if self._why is not Why.unknown:
                self._pending_signals.clear()  # Slurm signals the tasks, too
            left_s = self._info.left_s
            self._end_time = None if left_s is None else time.monotonic() + left_s
        self._record("why", answer=self._why.name, left_s=self._left_s(), is_answered=True)

    def _asking_s(self) -> float:
        """Timeout for a question now: the seconds that the end of the job needs are reserved."""
        if self._is_ending:
            return self._patience_s() / 2
        left_s = self._left_s()
        return 6 * _ASK_S if left_s is None else min(max(left_s - _END_S, _ASK_S), 6 * _ASK_S)

    def _end(self, ending: Ending, decision: Decision) -> int:
        if ending.reason is Reason.cancelled:
            decision = Decision(starts_again=False, because="cancelled")
        return super()._end(ending, decision)

    # -- starting again ------------------------------------------------------------------------

    def _move_on(self, ending: Ending, pause_s: float) -> int | None:
        """Requeue the job and return the exit code; None to restart on the same nodes."""
        if self._is_ours or (ending.reason in _HERE and self._can_stay()):
            return None
        code, choice = ending.exit_code, Choice()
        if self.plan.requeue.is_up_to_site:
            return self._leave_it_to_slurm()
        try:
            # Ask again: the job can have been cancelled while it was saving.
            self._insist(self._learn)
            if self._why is Why.cancelled:
                cancelled = ending.imposed(Reason.cancelled)
                return self._end(cancelled, Decision(starts_again=False, because="cancelled"))
            choice = self._choose()
            if self._why is not Why.requeued:
                self._insist(lambda within_s: client.requeue(self._job, within_s))
                self._record("requeued", job=self._job)
        except NotRequeueable as refusal:
            return self._resubmit(ending.text, code, pause_s, str(refusal), choice)
        except SlurmError as error:
            return self._leave_note(ending.text, code, str(error))
        try:
            self._exclude(choice)
            if pause_s:
                client.delay(self._job, pause_s, _ASK_S)
        except SlurmError as error:
            self._print(
                "the job is requeued, but forge could not exclude this node or delay the start,"
                f" so the job may start on it again: {error}"
            )
        return int(ExitCode.REQUEUE)

    # -- sick nodes ----------------------------------------------------------------------------

    def _decide(self, ending: Ending) -> Decision:
        """Also stop if the job could start only on a node that it has found sick."""
        before = replace(self.counts)
        decision = super()._decide(ending)
        if ending.reason is not Reason.unhealthy or not decision.starts_again:
            return decision
        nodes = ", ".join(self._choose().missing(self.directory))
        if not nodes:
            return decision
        self.counts = before
        because = (
            f"{ending.text}; the job is not started again, since too few nodes are left for it"
            f" without {nodes}. Have the node repaired, then run the sweep's command again"
        )
        return Decision(starts_again=False, because=because)

    def _choose(self) -> Choice:
        needed = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        return self._exclusions.choose(self._info, needed, min(self._asking_s() / 2, _ASK_S))

    def _exclude(self, choice: Choice) -> None:
        """Exclude the nodes for the job, which is pending again. Raises SlurmError."""
        if self._exclusions.apply(self._job, choice, _ASK_S):
            left_out = [one.node for one in choice.left_out]
            self._record("excluded", nodes=choice.names, left_out=left_out)
            self._write_state(State.queued, self._because)

    def _attempt(self) -> Ending:
        self._leave_sick_nodes()
        self._exclusions.left.clear()
        return super()._attempt()

    def _leave_sick_nodes(self) -> None:
        """Requeue the job if another job of the sweep has found one of its nodes sick.

        Such a requeue does not count, since nothing was started. But if Slurm allocates the node
        again, or too few other nodes are left, the job starts on it.
        """
        limits = self.plan.requeue
        if not limits.enabled or limits.is_up_to_site or not self._exclusions.standing():
            return
        try:
            nodes = client.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""), _ASK_S)
            found = [one for one in self._exclusions.standing() if one.node in nodes]
            if not found:
                return
            self._learn(_ASK_S)
            if self._why is not Why.unknown:
                return  # Slurm stops the job in any case
            choice = self._choose()
            left = self._exclusions.left
            going = [one for one in found if one in choice.kept and one.node not in left]
            if not going:
                nodes = [one.node for one in found]
                self._record("stays", nodes=nodes, because="Slurm gives it no others")
                what = ", ".join(map(str, found))
                return self._print(
                    f"starting on nodes that failed a health check, as Slurm has no others: {what}"
                )
            client.requeue(self._job, _ASK_S)
        except SlurmError as error:
            return self._print(
                "forge could not move the job away from nodes that failed a health check, so the"
                f" job starts on the nodes that it has: {error}"
            )
        left += [one.node for one in going]
        self._because = f"requeued before it began, to avoid {', '.join(map(str, going))}"
        self._print(self._because)
        self._record("requeued", job=self._job, because=self._because)
        try:
            self._exclude(choice)
        except SlurmError as error:
            self._print(
                f"forge could not exclude this node, so the job may start on it again: {error}"
            )
        self._write_state(State.queued, self._because)
        sys.exit(int(ExitCode.REQUEUE))

    # -- if Slurm does not requeue the job -----------------------------------------------------

    def _leave_it_to_slurm(self) -> int:
        """If requeues are left to the site: wait for Slurm to requeue the job.

        Slurm does not requeue a job that exits during the grace time, so the wrapper waits.
        """
        deadline = time.monotonic() + _GRACE_S
        while self._why is Why.preempted and time.monotonic() < deadline:
            select.select([self._reader], [], [], _TICK_S)
            processes.drain(self._reader)
        return int(ExitCode.REQUEUE)

    def _insist(self, ask: Callable[[float], None]) -> None:
        """Retry until there is an answer, or the allocation is about to end.

        Raises:
            NoAnswer: The error of the last try.
        """
        while True:
            try:
                return ask(self._asking_s())
            except NoAnswer as error:
                self._drain_signals()
                left_s = self._left_s()
                if self._is_ending or (left_s is not None and left_s < _END_S):
                    raise
                self._print(
                    f"Slurm's controller does not answer; forge asks again until the job's time"
                    f" limit: {error}"
                )

    def _leave_note(self, what: str, code: int, problem: str) -> int:
        """Note for the launcher, or a command that resumes the sweep, to resubmit the job."""
        because = f"{what}; could not be requeued: {problem}"
        self._print(
            f"{because}. If the sweep's command is still running, it resubmits the job; otherwise"
            " run that command again"
        )
        self._record("stopped", because=because)
        ended = {"code": code, "reason": Reason.unanswered, "backend": {"unrequeued": problem}}
        self._write_state(State.stopped, because, **ended)
        return code

    def _resubmit(
        self, what: str, code: int, pause_s: float, refusal: str, choice: Choice | None = None
    ) -> int:
        """Submit the same job again under a new number, since Slurm does not requeue it."""
        options = [f"--begin=now+{math.ceil(pause_s)}"] if pause_s else []
        if choice is not None and choice.names:
            options.append(f"--exclude={','.join(choice.names)}")
        try:
            job = successor.submit(
                self.forge, self._script, self._job, self._slurm_restarts, options
            )
        except (SlurmRefused, OSError) as error:
            return self._leave_note(what, code, f"{refusal}; {error}")
        if choice is not None:
            self._exclusions.take(choice)
        self._record("resubmitted", job=self._job, successor=job)
        self._print(
            f"Slurm does not requeue job {self._job} ({refusal}): resubmitted as {job}."
            f" Jobs that depend on {self._job} do not wait for {job}: change their dependency by"
            f" `scontrol update JobId=<their id> Dependency=<type>:{job}`."
        )
        self._write_state(State.queued, what, backend={"successor": job})
        return int(ExitCode.REQUEUE)

    def _can_stay(self) -> bool:
        """Whether the allocation lasts long enough for a restart."""
        if self._is_ending or self._why is not Why.unknown or not self._has_begun:
            return False
        left_s = self._left_s()
        return left_s is None or left_s > self.plan.warning_s + _LEAD_SLACK_S + _RESTART_S


def _wait_for_room(path: Path, number: int, error: OSError) -> int:
    """The disk is full at the first start: requeue the job for later, within its limits."""
    job, limits = client.own_job(os.environ), bundle.read_plan(path, number).requeue
    # All restarts so far had this cause: once unpacked, a job has a state of its own.
    counts = Counts(failures=int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    decision = decide_restart(Ending.of(ExitCode.DISK_FULL), counts, limits, -1, has_run=False)
    decision = spread(decision, job, counts.failures)
    text = f"{decision.because} ({error})"
    try:
        if decision.starts_again:
            client.requeue(job, 6 * _ASK_S)
            client.delay(job, decision.pause_s, _ASK_S)
    except SlurmError as refusal:
        text += f"; could not be requeued: {refusal}"
    with contextlib.suppress(OSError):  # stderr can be on the same disk
        os.write(2, f"forge: {text}\n".encode())
    return int(ExitCode.DISK_FULL)


@exit_on_error()
def main(arguments: list[str]) -> int:
    """`python -m forge.slurm.wrapper <bundle>`."""
    (path,) = arguments
    number = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    try:
        directory = bundle.unpack(Path(path), number)
    except OSError as error:
        if is_disk_full(error):
            return _wait_for_room(Path(path), number, error)
        raise
    return SlurmJob(directory, Path(path).with_suffix(".sh")).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
