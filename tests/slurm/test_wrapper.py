"""The wrapper's decisions if information is missing: no controller, no report, no srun.

Each test runs wrappers as processes; only Slurm is simulated (`played_jobs.py`). One module, since
every case is one start of the same wrapper on the same simulated cluster.
"""

import signal
import time
from dataclasses import replace

import pytest
from played_jobs import KILLED, PREEMPTED, RUNS, report

from forge.config.schema import RequeueConfig
from forge.errors import NoSuchJob, NotRequeueable, Reason
from forge.job.requeue import Decision, spread
from forge.jobdir import cancel_request
from forge.jobdir.job_files import STATE, forge_dir, read_json
from forge.jobdir.node_fault import NodeFault
from forge.jobdir.plan import RequeueLimits
from forge.jobdir.verdict import Verdict
from forge.slurm.job_info import JobInfo

REQUEUED = [("requeue", "7")]


def both(code, **changes):
    return report(code, 0, **changes), report(code, 1, **changes)


def test_without_an_answer_the_clock_decides(played):
    """Without the controller's answer, a stop shortly before the time limit counts as the limit."""
    near = played().step(75, *both(75)).run(None, RUNS, left_s=40.0)
    assert near.reason == "time_limit"
    far = played().step(75, *both(75)).run(None, RUNS, left_s=4000.0)
    assert far.reason == "requested"
    assert "cannot ask the controller why" in far.said


@pytest.mark.parametrize(
    ("left_s", "is_held", "reason"),
    [(100.0, True, "time_limit"), (1000.0, True, "forced"), (100.0, False, "crashed")],
)
def test_a_task_killed_for_not_hearing_of_the_limit_was_ended_by_it(
    played, left_s, is_held, reason
):
    """The task could have been importing, so it is not at fault, unless others have killed it."""
    says = replace(RUNS, left_s=left_s)
    job = played().step(137, *both(KILLED, is_held=is_held))
    ended = job.run(says, says, left_s=left_s)
    assert next(one["reason"] for one in ended.events if one["kind"] == "end") == reason


@pytest.mark.parametrize(("left_s", "reason"), [(100.0, "time_limit"), (1000.0, "crashed")])
def test_a_task_that_dies_of_the_limit_s_announcement_was_ended_by_the_limit(
    played, left_s, reason
):
    """An interpreter that is shutting down has no signal handlers any more."""
    says = replace(RUNS, left_s=left_s)
    ended = played().step(140, *both(-signal.SIGUSR2)).run(says, says, left_s=left_s)
    assert next(one["reason"] for one in ended.events if one["kind"] == "end") == reason


def test_pauses_are_no_multiples_of_what_slurm_s_checks_take():
    """A start in phase with Slurm's checks would get its signal a minute early, after each pause.

    Jobs that were preempted together must not restart at the same moment either.
    """
    decision = Decision(starts_again=True, because="preempted", pause_s=60.0)
    pauses = [spread(decision, f"job {number}", 2).pause_s for number in range(8)]
    assert len(set(pauses)) == 8
    assert all(60 < one < 90 for one in pauses)
    assert pauses[0] == spread(decision, "job 0", 2).pause_s


def test_without_an_answer_nothing_is_requeued(played):
    """The job could have been cancelled; and without the controller a requeue would fail anyway."""
    ended = played().step(75, *both(75)).run(replace(PREEMPTED, left_s=10.0), None)
    assert (ended.code, ended.did) == (75, [])
    assert (ended.state["state"], ended.state["reason"]) == ("stopped", "unanswered")
    assert ended.state["because"] == "preempted; Slurm did not requeue the job: busy"


def test_a_controller_that_is_away_is_asked_until_the_allocation_ends(played):
    """A job with seven minutes left is not lost if the controller is away for two minutes."""
    ended = played().step(75, *both(75)).run(*[None] * 40, RUNS, left_s=430.0)
    assert (ended.code, ended.did) == (75, REQUEUED)


@pytest.mark.parametrize(("left_s", "asking_s"), [(430.0, 60), (55.0, 40), (20.0, 10)])
def test_a_question_leaves_the_end_what_it_needs(played, left_s, asking_s):
    """A request of a minute could outlast the allocation, so that no state would be written."""
    says = replace(PREEMPTED, left_s=left_s)
    ended = played().step(75, *both(75)).run(says, left_s=left_s)
    _, (_, at_the_end), *_ = ended.noted("show")
    assert at_the_end == pytest.approx(asking_s, abs=5)


ASKED_ONCE = "kill -TERM $PPID; until [ $(grep -c show $NOTES) -gt 1 ]; do sleep 0.05; done"
"""Shell code that signals the wrapper, and waits until it has queried the controller."""


def test_a_job_that_is_being_killed_asks_once(played):
    """After KillWait the wrapper is killed, and could not record why the job has ended."""
    ended = played().step(75, *both(75), first=ASKED_ONCE).run(None, left_s=430.0)
    assert ended.state["reason"] == "unanswered"
    assert len(ended.noted("show")) == 4  # the limit, at the signal, at the end, for the requeue


def test_a_job_that_is_gone_was_cancelled(played):
    """With a short MinJobAge Slurm forgets a cancelled job before the wrapper asks about it."""
    ended = played().step(143, report(143)).run(NoSuchJob("Invalid job id"))
    assert ended.reason == "cancelled"


def test_cancelled_between_the_two_questions(played):
    """The job is cancelled while it saves after a preemption."""
    gone = JobInfo("COMPLETING", "None", 0, "2026-01-01T00:00:00")
    ended = played().step(143, *both(143)).run(PREEMPTED, gone)
    assert (ended.code, ended.did, ended.state["reason"]) == (143, [], "cancelled")


def test_a_job_that_is_to_be_killed_is_killed_once_the_controller_answers(played):
    """`forge cancel --now` is asked once, and a training of a week would keep its GPUs."""
    job = played()
    content = '{"is_now": true, "by": "me"}'
    request = f"echo '{content}' >'{forge_dir(job.directory) / cancel_request.FILE}'"
    ends = "for i in $(seq 400); do grep -q end_step $NOTES && break; sleep 0.05; done"
    ended = job.step(137, *both(KILLED), first=f"{request}; {ends}").run(RUNS, is_step_kept=True)
    assert ended.noted("end_step") == [("end_step", 0)]
    assert (ended.reason, ended.state["because"]) == ("cancelled", "cancelled by me")


BACK = JobInfo("COMPLETING", "None", 1, None, left_s=3000.0)


@pytest.mark.parametrize(
    ("says", "lost", "reason"),
    [
        (RUNS, ["n2"], "node_failed"),
        (BACK, ["n2"], "node_failed"),
        (BACK, [], "preempted"),
        (RUNS, [], "forced"),
    ],
)
def test_a_rank_that_left_no_report_was_lost_with_its_node(played, says, lost, reason):
    """The job is not at fault, and cannot restart there; Slurm notices the loss minutes later."""
    gone = Verdict(Reason.rank_lost, "rank 1 is gone", 70)
    job = played().step(70, report(70), verdict=gone)
    ended = job.run(says, says, lost=lost, on="n[1-2]")
    assert next(one["reason"] for one in ended.events if one["kind"] == "end") == reason
    assert ended.code == (0 if reason == "forced" else 75)
    assert ended.did == (REQUEUED if lost and says is RUNS else [])


def test_what_slurm_has_requeued_is_not_requeued_again(played):
    """The time limit in Slurm's answer is then that of the next start."""
    done = JobInfo("PENDING", "BeginTime", 1, None, left_s=-1.8e9)
    ended = played().step(75, *both(75)).run(done)
    assert (ended.code, ended.reason, ended.did) == (75, "preempted", [])
    (because,) = [one["because"] for one in ended.events if one["kind"] == "requeue"]
    assert because.endswith("or `scontrol requeue` by hand")  # Slurm does not record which
    asked = [one for one in ended.events if one["kind"] == "why"]
    assert {one["left_s"] for one in asked} == {None}


def test_a_job_that_slurm_has_requeued_beyond_its_budget_ends_at_its_next_start(played):
    """Slurm requeues a job that it preempts without a grace time, whatever the wrapper decides.

    Regression test: the next start counted as one by hand, with new budgets, so that the budget of
    preemptions never ended such a job.
    """
    none = replace(RequeueLimits.of(RequeueConfig()), max_preemptions=0)
    job = played(requeue=none)
    done = JobInfo("PENDING", "BeginTime", 1, None, left_s=-1.8e9)
    ended = job.step(143, *both(143)).run(done)
    assert (ended.code, ended.did, ended.state["state"]) == (143, [], "failed")
    again = job.run(RUNS, left_s=None, restarts=1)
    assert (again.code, again.num_attempts, again.state["state"]) == (143, 1, "failed")
    assert again.state["because"] == ended.state["because"]
    assert "max_preemptions=0" in again.said
    by_hand = job.run(RUNS, restarts=2)
    assert (by_hand.code, by_hand.num_attempts) == (0, 2)


def test_sigint_by_hand_ends_the_job_as_ctrl_c_does(played):
    """After `scancel --signal=INT` the job saves, and is not requeued."""
    ended = played().step(130, *both(130)).run(RUNS)
    assert (ended.code, ended.reason, ended.did) == (130, "interrupted", [])


@pytest.mark.parametrize(
    ("exit_code", "reason", "code"),
    [
        (128 + signal.SIGUSR2, "requested", 75),
        (128 + signal.SIGTERM, "signalled", 143),
        (128 + signal.SIGHUP, "crashed", -signal.SIGHUP),
        (128 + signal.SIGKILL, "crashed", KILLED),
        (KILLED, "crashed", KILLED),
    ],
)
def test_a_task_that_a_signal_killed_in_its_first_instant(played, exit_code, reason, code):
    """No supervisor has reported the end, so srun's exit code is the only source."""
    ended = played().step(exit_code).run(RUNS)
    first = next(one for one in ended.events if one["kind"] == "end")
    assert (first["reason"], first["code"]) == (reason, code)


def test_srun_that_cannot_start_the_task_is_no_failure_of_the_task(played):
    """If a node does not respond, a later start on another node can work."""
    ended = played().step(1).run(RUNS)
    assert (ended.reason, ended.text) == ("crashed", "srun could not start the task")
    assert (ended.code, ended.did) == (75, REQUEUED)


def test_a_program_that_is_not_there_is_a_failure(played):
    """The program of `hydra.launcher.python` would be missing at the next start, too."""
    ended = played().step(127).run(RUNS)
    assert (ended.reason, ended.text, ended.num_attempts) == ("failed", "exit code 127", 1)


def test_the_rank_that_failed_first_says_why(played):
    """The other ranks fail because of it, or are killed."""
    ranks = report(KILLED, time=9.0), report(65, 1, time=5.0, node="n2")
    ended = played().step(137, *ranks).run(RUNS, on="n[1-2]")
    assert (ended.reason, ended.code) == ("halted", 65)
    began, end = (one for one in ended.events if one["kind"] in ("attempt", "end"))
    assert (began["attempt"], began["job"], began["nodes"]) == (1, "7", "n[1-2]")
    assert (end["attempt"], end["rank"], end["node"]) == (1, 1, "n2")


def test_the_rank_whose_check_failed_says_why(played):
    """Other ranks exit with the same code, possibly earlier, so the node file decides."""
    ranks = report(69, 0, time=5.0, node="n1"), report(69, 1, time=9.0, node="n2")
    leaves = Verdict(Reason.unhealthy, "rank 1 leaves", 69)
    found = NodeFault("n2", "ecc", "ecc on n2", "halt")
    ended = played().step(69, *ranks, verdict=leaves, sick={1: found}).run(RUNS)
    assert (ended.reason, ended.text) == ("halted", "ecc on n2")


def test_the_sick_node_is_excluded_beside_those_that_were(played):
    """Without a node file, the node of the first rank that exits with 69 is excluded."""
    ranks = report(69, 0, node="n1"), report(69, 1, time=2.0, node="n2")
    limits = RequeueLimits.of(RequeueConfig())
    limits = replace(limits, has_other_nodes=True, max_excluded_nodes=3)
    ended = played(requeue=limits).step(69, *ranks).run(replace(RUNS, excluded="n7"))
    assert (ended.code, ended.reason) == (75, "unhealthy")
    assert ended.did == [*REQUEUED, ("exclude", ["n7", "n1"])]


def test_a_killed_task_stays_on_its_nodes_unless_the_limit_is_near(played):
    """Loading everything again is not worth it for a minute of training."""
    ended = played().step(137, *both(KILLED)).run(RUNS)
    assert (ended.code, ended.did, ended.num_attempts) == (0, [], 2)
    late = replace(RUNS, left_s=100.0)
    ended = played().step(137, *both(KILLED)).run(late, left_s=100.0)
    assert (ended.code, ended.did, ended.num_attempts) == (75, REQUEUED, 1)


LOOKS = "until [ $(grep -c show $NOTES) -gt 1 ]; do sleep 0.1; done"
"""Shell code that waits until the wrapper has read the time limit; the clock is sped up."""


@pytest.mark.parametrize("left_s", [30000.0, 20.0])
def test_a_time_limit_that_was_moved_is_written_down_for_the_task(played, left_s):
    """The time for the task is shorter by the seconds that its supervisor needs to end it."""
    job = played()
    end_time = forge_dir(job.directory) / "end_time"
    first = f"{LOOKS}; until [ -e '{end_time}' ]; do sleep 0.1; done"
    job.step(75, *both(75), first=first)
    before = time.time()
    ended = job.run(replace(RUNS, left_s=left_s), left_s=90000.0, hours_a_second=0.05)
    (moved,) = [one for one in ended.events if one["kind"] == "time limit moved"][:1]
    assert moved["left_s"] == left_s
    assert float(end_time.read_text()) == pytest.approx(before + left_s - 20, abs=60)


@pytest.mark.parametrize("answer", [None, NoSuchJob("gone"), replace(RUNS, left_s=5.0)])
def test_a_look_at_the_time_limit_ends_no_job(played, answer):
    """The controller can be silent, or the file cannot be written."""
    job = played()
    in_the_way = forge_dir(job.directory) / "end_time" / "in the way"
    first = f"mkdir -p '{in_the_way}'; {LOOKS}"
    job.step(0, *both(0), first=f"touch '{forge_dir(job.directory)}'/result.pkl; {first}")
    ended = job.run(answer, left_s=90000.0, hours_a_second=0.05)
    assert ended.num_attempts >= 1
    assert not [one for one in ended.events if one["kind"] == "time limit moved"]


# -- the state of an earlier wrapper ---------------------------------------------------------------


def test_a_wrapper_killed_in_this_very_start_leaves_a_crash(played):
    """The batch script has started another wrapper in the same allocation."""
    ended = played().left("running", restarts=0).run(RUNS)
    assert ended.noted("end_step") == [("end_step", 4)]
    assert (ended.code, ended.did, ended.num_attempts) == (0, [], 1)
    assert ended.state["counts"]["preemptions"] == 2
    (again,) = [one["because"] for one in ended.events if one["kind"] == "requeue"]
    assert "SIGKILL" in again


def test_a_wrapper_killed_after_the_end_ends_as_before(played):
    """The job has ended, so the wrapper exits with the same code without an attempt."""
    ended = played().left("failed", restarts=0).run(RUNS)
    assert (ended.code, ended.num_attempts) == (7, 0)


def test_a_job_requeued_by_hand_after_its_end_has_another_chance(played):
    """After `scontrol requeue` by hand the job runs again, and its budgets are reset."""
    ended = played().left("failed", restarts=0).run(RUNS, restarts=1)
    assert (ended.code, ended.num_attempts) == (0, 1)
    assert ended.state["counts"]["preemptions"] == 0


@pytest.mark.parametrize(
    ("state", "now", "because", "preemptions"),
    [
        ("starting", 1, [], 2),  # requeued by forge, and counted already
        ("starting", 3, [], 4),  # requeued by Slurm two more times before a wrapper began
        ("running", 1, ["node failed"], 3),  # the lost node counts as well
        ("running", 2, ["node failed"], 4),
    ],
)
def test_slurm_s_own_count_of_restarts_is_held_against_ours(
    state, now, because, preemptions, played
):
    """Restarts that no wrapper has seen count as well, or a budget would never end."""
    ended = played().left(state, restarts=0).run(RUNS, restarts=now)
    assert [one["because"] for one in ended.events if one["kind"] == "requeue"] == because
    assert ended.state["counts"]["preemptions"] == preemptions


def test_a_job_begins_at_once_where_slurm_has_brought_it_back(played):
    """The job has its allocation; another requeue would mean another wait in the queue."""
    ended = played().left("running", restarts=0).run(RUNS, restarts=1)
    assert (ended.code, ended.did, ended.num_attempts) == (0, [], 1)


def test_a_wrapper_that_slurm_had_told_to_end_was_preempted(played):
    """A wrapper without the time to requeue must not count as a lost node."""
    ended = played().left("running", restarts=0, is_ending=True).run(RUNS, restarts=1)
    (because,) = [one["because"] for one in ended.events if one["kind"] == "requeue"]
    assert because.startswith("requeued by Slurm: preempted without a grace time, or `scontrol")


def test_a_wrapper_that_slurm_tells_to_end_writes_it_into_its_state(played, tmp_path):
    """The next wrapper reads it if this one is killed before it can record the attempt's end."""
    job, seen = played(), tmp_path / "seen"
    state = forge_dir(job.directory) / STATE
    wait = f"until grep -q is_ending '{state}'; do sleep 0.05; done; cp '{state}' '{seen}'"
    job.step(143, *both(143), first=f"kill -TERM $PPID; {wait}").run(KILLED_BY_PREEMPTION)
    content = read_json(seen)
    assert (content["state"], content["is_ending"]) == ("running", True)


# -- if Slurm does not requeue the job -------------------------------------------------------------

KILLED_BY_PREEMPTION = JobInfo(
    *("COMPLETING", "None", 0, "2026-01-01T00:00:07"),
    end_time="2026-01-01T00:00:07",
    is_requeueable=False,
)
DISABLED = NotRequeueable("Requested operation is presently disabled")


def test_a_job_that_slurm_does_not_requeue_ends_and_says_so(played):
    """The sweep's command submits it again, with its checkpoints."""
    ended = played().step(143, *both(143)).run(KILLED_BY_PREEMPTION, refuses=DISABLED)
    assert (ended.code, ended.did) == (143, [])
    assert (ended.state["state"], ended.state["reason"]) == ("stopped", "unanswered")
    assert "Slurm did not requeue the job: Requested operation is presently disabled" in ended.said
    assert "Run the sweep's command again" in ended.said


# -- signals that are not Slurm's ------------------------------------------------------------------


def test_a_signal_by_hand_to_the_batch_script_does_not_end_the_job(played):
    """After `scancel --full` Slurm still shows the job as running, and not as preempted."""
    job = played().step(137, *both(KILLED), first=ASKED_ONCE)
    ended = job.run(RUNS, True, RUNS)  # the tasks are killed before they have saved
    assert next(one for one in ended.events if one["kind"] == "end")["reason"] == "signalled"
    assert "before it could save" in ended.said
    assert (ended.code, ended.noted("requeue"), ended.num_attempts) == (0, [], 2)


def test_a_signal_by_hand_to_the_batch_script_is_passed_on_to_the_tasks_once(played):
    """The wrapper retries if there are no tasks yet, or the controller is busy."""
    first = "kill -TERM $PPID; until grep -q signal $NOTES; do sleep 0.05; done"
    job = played().step(143, *both(143), first=first)
    ended = job.run(RUNS, False, None, True, RUNS)
    assert ended.noted("signal") == [("signal", "SIGTERM", 0)]
    assert [one["signal"] for one in ended.events if one["kind"] == "passed on"] == ["SIGTERM"]


def test_a_signal_of_slurm_is_not_passed_on_to_the_tasks(played):
    """Slurm signals the tasks itself; a second signal can mean an immediate exit."""
    ended = played().step(75, *both(75), first=ASKED_ONCE).run(PREEMPTED)
    assert (ended.code, ended.did) == (75, REQUEUED)


def test_a_batch_script_that_was_killed_is_no_cancel(played):
    """The state is COMPLETING in both cases, but here the wrapper has lost its parent."""
    cancelled = JobInfo("COMPLETING", "JobLaunchFailure", 0, None, end_time="2026-01-01T00:00:07")
    ended = played().step(143, *both(143)).run(cancelled, is_orphaned=True)
    assert (ended.reason, ended.text) == ("crashed", "its batch script was killed")
    assert (ended.code, ended.did) == (75, REQUEUED)
