"""What the wrapper decides where the cluster says little: no controller, no report, no srun.

One module, since all of it asks one wrapper on one stand-in for the cluster.
"""

import os
import signal
import time
from dataclasses import replace

import pytest
from controllers import RUNS, exited, report, state_left

from forge.errors import NoSuchJob, NotRequeueable, Reason, SlurmRefused
from forge.job.requeue import Counts, Outcome
from forge.jobdir import sick, verdict
from forge.jobdir.job_files import RANK, STATE, read_json
from forge.jobdir.verdict import Verdict
from forge.slurm import client
from forge.slurm.client import JobInfo, Queued
from forge.slurm.wrapper import SlurmJob


def test_without_an_answer_the_clock_decides(wrapper, capfd):
    """Told to leave shortly before its limit, and nobody there to ask: it is the limit."""
    now = time.monotonic()
    near = wrapper(None, _end_time=now + 40)
    report(near, 0, 75)
    assert near._outcome(exited(75)).reason is Reason.time_limit
    far = wrapper(None, _end_time=now + 4000)
    assert far._outcome(exited(75)).reason is Reason.requested
    assert "does not say why" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("left_s", "is_held", "reason"),
    [
        (100.0, True, Reason.time_limit),
        (1000.0, True, Reason.forced),
        (100.0, False, Reason.crashed),
    ],
)
def test_a_task_killed_for_not_hearing_of_the_limit_was_ended_by_it(
    wrapper, left_s, is_held, reason
):
    """No failure of its own: it may just have been importing. One killed by others is."""
    job = wrapper(JobInfo("RUNNING", "None", 0, None, left_s=left_s))
    report(job, 0, -signal.SIGKILL, is_held=is_held)
    report(job, 1, -signal.SIGKILL, is_held=is_held)
    assert job._outcome(exited(137)).reason is reason


@pytest.mark.parametrize(
    ("left_s", "reason"), [(100.0, Reason.time_limit), (1000.0, Reason.crashed)]
)
def test_a_task_that_dies_of_the_limit_s_announcement_was_ended_by_the_limit(
    wrapper, left_s, reason
):
    """An interpreter that is just ending has no handlers any more."""
    job = wrapper(JobInfo("RUNNING", "None", 0, None, left_s=left_s))
    report(job, 0, -signal.SIGUSR2)
    report(job, 1, -signal.SIGUSR2)
    assert job._outcome(exited(140)).reason is reason


def test_pauses_are_no_multiples_of_what_slurm_s_checks_take(wrapper):
    """A start on their beat is told of its limit a minute early, after each pause.

    Jobs that one preemption has ended do not come back at one moment, either.
    """

    def pause_s(token):
        job = wrapper(counts=Counts(unfair=2))
        job.plan = replace(job.plan, token=token)
        return job._decide(Outcome(75, Reason.preempted)).pause_s

    pauses = [pause_s(f"job {number}") for number in range(8)]
    assert len(set(pauses)) == 8
    assert all(60 < one < 90 for one in pauses)
    assert pauses[0] == pause_s("job 0")


def test_without_an_answer_nothing_is_requeued(wrapper):
    """It may have been cancelled meanwhile; and what would requeue it does not answer either."""
    job = wrapper(None, _end_time=time.monotonic() + 10)
    assert job._move_on(Outcome(75, Reason.preempted), 0.0) == 75
    assert job.controller.did == []
    state = read_json(job.forge / STATE)
    assert (state["state"], state["reason"]) == ("stopped", "unanswered")
    assert state["unrequeued"] == "busy"
    assert state["because"] == "preempted; could not be requeued: busy"


def test_a_controller_that_is_away_is_asked_until_the_allocation_ends(wrapper):
    """Two minutes of its absence cost no job that has seven more of its own."""
    job = wrapper(*[None] * 40, RUNS, _end_time=time.monotonic() + 430)
    assert job._move_on(Outcome(75, Reason.preempted), 0.0) == 75
    assert job.controller.did == [("requeue", "7")]


@pytest.mark.parametrize(("left_s", "asking_s"), [(430, 60), (55, 40), (20, 10)])
def test_a_question_leaves_the_end_what_it_needs(wrapper, left_s, asking_s):
    """One that was asked for a minute could outlast the allocation, and leave no note."""
    job = wrapper(_end_time=time.monotonic() + left_s)
    assert job._asking_s() == pytest.approx(asking_s, abs=5)


def test_a_job_that_is_being_killed_asks_once(wrapper):
    """Nobody is left after KillWait to write down why the job is gone."""
    job = wrapper(None, _end_time=time.monotonic() + 430, _is_ending=True)
    assert job._move_on(Outcome(75, Reason.preempted), 0.0) == 75
    assert read_json(job.forge / STATE)["unrequeued"] == "busy"


def test_a_job_that_is_gone_was_cancelled(wrapper):
    """Where MinJobAge is short."""
    job = wrapper(NoSuchJob("Invalid job id"))
    report(job, 0, 143)
    assert job._outcome(exited(143)).reason is Reason.cancelled


def test_cancelled_between_the_two_questions(wrapper):
    """While it was saving."""
    job = wrapper(JobInfo("COMPLETING", "None", 0, "2026-01-01T00:00:00"))
    assert job._move_on(Outcome(143, Reason.preempted), 0.0) == 143
    assert job.controller.did == []
    assert read_json(job.forge / STATE)["reason"] == "cancelled"


BACK = JobInfo("COMPLETING", "None", 1, None, left_s=3000.0)


@pytest.mark.parametrize(
    ("says", "lost", "reason"),
    [
        (RUNS, ["n2"], Reason.node_failed),
        (BACK, ["n2"], Reason.node_failed),
        (BACK, [], Reason.preempted),
        (RUNS, [], Reason.forced),
    ],
)
def test_a_rank_that_left_no_report_was_lost_with_its_node(
    wrapper, says, lost, reason, monkeypatch
):
    """No failure of the job, and no place to start it again; Slurm notices it minutes later."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    job = wrapper(says, says, _step=0)
    monkeypatch.setattr(client, "lost_nodes", lambda nodes, within_s: lost)
    report(job, 0, 70)
    verdict.write(job.directory, Verdict(Reason.rank_lost, "rank 1 is gone", 70))
    outcome = job._outcome(exited(70))
    assert outcome.reason is reason
    assert job._move_on(outcome, 0.0) == (None if reason is Reason.forced else 75)
    assert job.controller.did == ([("requeue", "7")] if lost and says is RUNS else [])


def test_what_slurm_has_requeued_is_not_requeued_again(wrapper):
    """And the limit that it shows is the next start's."""
    done = JobInfo("PENDING", "BeginTime", 1, None, left_s=-1.8e9)
    job = wrapper(done, done)
    report(job, 0, 75)
    outcome = job._outcome(exited(75))
    assert outcome.reason is Reason.preempted
    assert job._left_s() is None
    assert job._move_on(outcome, 0.0) == 75
    assert job.controller.did == []


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        (exited(128 + signal.SIGUSR2), Reason.requested, 75),
        (exited(128 + signal.SIGTERM), Reason.signalled, 143),
        (exited(128 + signal.SIGHUP), Reason.crashed, -signal.SIGHUP),
        (exited(128 + signal.SIGKILL), Reason.crashed, -signal.SIGKILL),
        (signal.SIGKILL, Reason.crashed, -signal.SIGKILL),
    ],
)
def test_a_task_that_a_signal_killed_in_its_first_instant(wrapper, status, reason, code):
    """Before anybody could keep it; srun's own code is all there is."""
    outcome = wrapper(RUNS)._outcome(status)
    assert (outcome.reason, outcome.code) == (reason, code)


def test_srun_that_cannot_start_the_task_is_no_failure_of_the_task(wrapper):
    """A node that does not answer: elsewhere, later, it may work."""
    job = wrapper(RUNS, RUNS)
    outcome = job._outcome(exited(1))
    assert outcome.reason is Reason.crashed
    assert str(outcome) == "the task could not be started by srun"
    assert job._move_on(outcome, 0.0) == 75
    assert job.controller.did == [("requeue", "7")]


def test_a_program_that_is_not_there_is_a_failure(wrapper):
    """`hydra.launcher.python` names it; it will not be there the next time."""
    outcome = wrapper(RUNS)._outcome(exited(127))
    assert (outcome.reason, str(outcome)) == (Reason.failed, "exit code 127")


def test_the_rank_that_failed_first_says_why(wrapper):
    """The others die of it, or are killed."""
    job = wrapper(RUNS)
    report(job, 0, -signal.SIGKILL, time=9.0)
    report(job, 1, 65, time=5.0)
    assert job._outcome(exited(137)).reason is Reason.halted


def test_the_rank_whose_check_failed_says_why(wrapper, monkeypatch):
    """The others leave with its exit code, and may be faster; at the start there is no verdict."""
    job = wrapper(RUNS)
    report(job, 0, 69, time=5.0, node="n1")
    verdict.write(job.directory, Verdict(Reason.unhealthy, "rank 1 leaves", 69))
    report(job, 1, 69, time=9.0, node="n2")
    monkeypatch.setenv(RANK, "1")
    sick.write(job.directory, sick.Sick("n2", "ecc", "ecc on n2", "halt"))
    monkeypatch.delenv(RANK)
    outcome = job._outcome(exited(69))
    assert (outcome.reason, str(outcome)) == (Reason.halted, "ecc on n2")


def test_the_sick_node_is_excluded_beside_those_that_were(wrapper):
    """By the code alone it is that of the rank which ended first: the others leave with it."""
    info = JobInfo("RUNNING", "None", 0, None, left_s=3000.0, excluded="n7")
    job = wrapper(info, info)
    report(job, 0, 69, node="n1")
    report(job, 1, 69, time=2.0, node="n2")
    outcome = job._outcome(exited(69))
    assert outcome.reason is Reason.unhealthy
    assert job._move_on(outcome, 0.0) == 75
    assert job.controller.did == [("requeue", "7"), ("exclude", ["n7", "n1"])]


def test_a_killed_task_stays_on_its_nodes_unless_the_limit_is_near(wrapper):
    """To load everything again for a minute's training is not worth it."""
    job = wrapper(RUNS)
    report(job, 0, -signal.SIGKILL)
    report(job, 1, -signal.SIGKILL)
    outcome = job._outcome(exited(137))
    assert job._move_on(outcome, 0.0) is None
    late = JobInfo("RUNNING", "None", 0, None, left_s=100.0)
    job = wrapper(late, late)
    assert job._move_on(job._outcome(exited(137)), 0.0) == 75
    assert job.controller.did == [("requeue", "7")]


@pytest.mark.parametrize("left_s", [3000.0, 20.0])
def test_a_time_limit_that_was_moved_is_written_down_for_the_task(wrapper, left_s):
    """Less what its supervisor needs to end it."""
    job = wrapper(JobInfo("RUNNING", "None", 0, None, left_s=left_s), _next_look=0.0)
    job._end_time = time.monotonic() + 400
    job._look_at_limit()
    end = float((job.forge / "end_time").read_text())
    assert end == pytest.approx(time.time() + left_s - 20, abs=5)
    assert job._left_s() == pytest.approx(left_s, abs=5)
    job._look_at_limit()  # not at once again: there is no other answer


@pytest.mark.parametrize("answer", [None, NoSuchJob("gone"), RUNS])
def test_a_look_at_the_time_limit_ends_no_job(wrapper, answer):
    """Nobody answers, or the disk is full."""
    job = wrapper(answer, _end_time=time.monotonic() + 400, _next_look=0.0)
    (job.forge / "end_time").mkdir()
    job._look_at_limit()
    assert job._next_look > time.monotonic()


# -- what an earlier wrapper has left --------------------------------------------------------------


def test_a_wrapper_killed_in_this_very_start_leaves_a_crash(wrapper):
    """The batch script has started another; the allocation was never lost."""
    job = wrapper()
    state_left(job, "running", restarts=0)
    assert job._take_over() == Outcome(-9)
    assert job.counts.preemptions == 2
    assert job.controller.ended == [4]


def test_a_wrapper_killed_after_the_end_ends_as_before(wrapper):
    """The job is over: neither a new chance nor another code."""
    job = wrapper()
    state_left(job, "failed", restarts=0)
    with pytest.raises(SystemExit) as ended:
        job._take_over()
    assert ended.value.code == 7


def test_a_job_requeued_by_hand_after_its_end_has_another_chance(wrapper, monkeypatch):
    """Whoever types `scontrol requeue` wants it to run, with budgets as at the first start."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job = wrapper()
    state_left(job, "failed", restarts=0)
    assert job._take_over() is None
    assert job.counts.preemptions == 0


@pytest.mark.parametrize(
    ("state", "now", "outcome", "preemptions"),
    [
        ("starting", 1, None, 2),  # we requeued it, and have accounted for it
        ("starting", 3, None, 4),  # Slurm did it twice more before a wrapper began
        ("running", 1, Outcome(-9, Reason.node_failed), 2),  # accounted for by the decision
        ("running", 2, Outcome(-9, Reason.node_failed), 3),
    ],
)
def test_slurm_s_own_count_of_restarts_is_held_against_ours(
    state, now, outcome, preemptions, wrapper, monkeypatch
):
    """What no wrapper has seen counts as well, or a budget would never end."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(now))
    job = wrapper()
    state_left(job, state, restarts=0)
    assert job._take_over() == outcome
    assert job.counts.preemptions == preemptions


def test_a_job_begins_at_once_where_slurm_has_brought_it_back(wrapper, monkeypatch):
    """The allocation is its own already: to requeue it again is a second wait in a full queue."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job = wrapper()
    state_left(job, "running", restarts=0)
    assert job._move_on(job._take_over(), 30.0) is None
    assert job.controller.did == []


def test_a_wrapper_that_slurm_had_told_to_end_was_preempted(wrapper, monkeypatch):
    """No time to requeue is no lost node."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job = wrapper()
    state_left(job, "running", restarts=0, is_ending=True)
    assert job._take_over() == Outcome(-9, Reason.preempted)


# -- where Slurm does not bring it back ------------------------------------------------------------

KILLED_BY_PREEMPTION = JobInfo(
    *("COMPLETING", "None", 0, "2026-01-01T00:00:07"),
    end_time="2026-01-01T00:00:07",
    is_requeueable=False,
)


@pytest.fixture
def sbatch(wrapper, monkeypatch):
    """A wrapper whose controller refuses to requeue, with what sbatch was asked for."""
    asked, in_queue = [], {}

    def refuse(job, within_s):
        raise NotRequeueable("Requested operation is presently disabled")

    def submit(script, *options):
        asked.append((script.name, *options))
        return "99"

    job = wrapper(KILLED_BY_PREEMPTION, KILLED_BY_PREEMPTION)
    monkeypatch.setattr(client, "requeue", refuse)
    monkeypatch.setattr(client, "submit", submit)
    monkeypatch.setattr(client, "queue", lambda: in_queue)
    job.asked, job.in_queue = asked, in_queue
    return job


def test_it_is_submitted_anew_with_its_number_in_the_array(sbatch):
    sbatch._job = "7_3"
    assert sbatch._move_on(Outcome(143, Reason.preempted), 30.0) == 75
    assert sbatch.asked == [("script.sh", "--begin=now+30", "--array=3")]
    state = read_json(sbatch.forge / STATE)
    assert (state["state"], state["successor"]) == ("starting", "99_3")


@pytest.mark.parametrize("was_submitted", [True, False])
def test_a_kill_between_sbatch_and_the_note_gives_one_successor(sbatch, was_submitted, monkeypatch):
    """The intent is on disk before sbatch; the queue says whether it came so far."""
    submit = client.submit

    def killed(script, *options):
        if was_submitted:
            sbatch.in_queue[submit(script, *options)] = Queued("PENDING", "None", str(script))
        raise KeyboardInterrupt

    sbatch.in_queue["7"] = Queued("RUNNING", "None", str(sbatch.directory / "script.sh"))
    monkeypatch.setattr(client, "submit", killed)
    with pytest.raises(KeyboardInterrupt):
        sbatch._move_on(Outcome(143, Reason.preempted), 0.0)
    monkeypatch.setattr(client, "submit", submit)
    state_left(sbatch, "starting", restarts=0)
    with pytest.raises(SystemExit) as ended:
        sbatch._take_over()
    assert ended.value.code == 75
    assert len(sbatch.asked) == 1
    state = read_json(sbatch.forge / STATE)
    assert (state["successor"], state["counts"]["preemptions"]) == ("99", 2)


def test_a_wrapper_that_has_submitted_its_job_anew_does_not_run_it(sbatch):
    """The batch script starts a killed wrapper again, until Slurm ends it as well."""
    sbatch._move_on(Outcome(143, Reason.preempted), 0.0)
    with pytest.raises(SystemExit) as ended:
        sbatch._take_over()
    assert ended.value.code == 75


def test_the_successor_has_the_budgets_of_its_predecessor(sbatch, monkeypatch):
    """Another number is not another job."""
    sbatch.counts.preemptions = 5
    sbatch._move_on(Outcome(143, Reason.preempted), 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    job = SlurmJob(sbatch.directory, sbatch.directory / "script.sh")
    assert job._take_over() is None
    assert (job.counts.preemptions, job._because) == (5, "preempted")
    assert job._ancestors == ["7"]


def test_what_sbatch_refuses_is_left_to_the_launcher(sbatch, monkeypatch):
    """Sites that do not allow it on their compute nodes."""

    def refuse(script, *options):
        raise SlurmRefused("sbatch: Access/permission denied")

    monkeypatch.setattr(client, "submit", refuse)
    sbatch._move_on(Outcome(143, Reason.preempted), 0.0)
    said = read_json(sbatch.forge / STATE)["unrequeued"]
    assert "presently disabled" in said
    assert "permission denied" in said


# -- signals that are not Slurm's ------------------------------------------------------------------


def test_a_signal_by_hand_to_the_batch_script_does_not_end_the_job(wrapper, capfd):
    """`scancel --full`: Slurm says that the job runs, and nobody preempts it."""
    job = wrapper(RUNS, RUNS, _is_ending=True)
    job._ask_controller(1.0)
    assert not job._is_ending
    outcome = job._outcome(exited(137))  # somebody has killed the tasks before they had saved
    assert outcome.reason is Reason.signalled
    assert "killed before it had saved" in capfd.readouterr().err
    assert job._move_on(outcome, 0.0) is None


def test_a_signal_by_hand_to_the_batch_script_is_passed_on_to_the_tasks_once(wrapper, silence):
    """Also where there are none yet, or where the controller is busy."""
    job = wrapper(RUNS, False, None, True, True, _step=2)
    os.write(silence[1], bytes([signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1]))
    job._drain_signals()
    job._ask_controller(1.0)
    for _ in range(4):
        job._pass_on()
    assert job.controller.did == [("SIGTERM", 2), ("SIGUSR1", 2)]
    assert job.controller.answers == []


def test_a_signal_of_slurm_is_not_passed_on_to_the_tasks(wrapper, silence):
    """Slurm tells them as well; a second one may mean more to them."""
    job = wrapper(JobInfo("RUNNING", "None", 0, "2026-01-01T00:00:07"))
    os.write(silence[1], bytes([signal.SIGTERM]))
    job._drain_signals()
    job._ask_controller(1.0)
    job._pass_on()
    assert job.controller.did == []


def test_a_batch_script_that_was_killed_is_no_cancel(wrapper):
    """COMPLETING in both cases; but its wrapper has lost its parent."""
    cancelled = JobInfo("COMPLETING", "JobLaunchFailure", 0, None, end_time="2026-01-01T00:00:07")
    job = wrapper(cancelled, cancelled, _batch_shell=-1, _is_ending=True)
    report(job, 0, 143)
    report(job, 1, 143)
    outcome = job._outcome(exited(143))
    assert (outcome.reason, str(outcome)) == (Reason.crashed, "its batch script was killed")
    assert job._move_on(outcome, 0.0) == 75
    assert job.controller.did == [("requeue", "7")]
