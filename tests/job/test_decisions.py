"""The same end on each backend: one table of what happened, and of what becomes of the job."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import NamedTuple

import forked
import pytest
from plans import planned
from played_jobs import KILLED, PREEMPTED, RUNS, report

from forge.config.schema import Policy, RequeueRule
from forge.errors import NoAnswer, Reason
from forge.job.backend import Backend
from forge.job.ending import Ending
from forge.job.job import Job, Trainings
from forge.jobdir import job_state
from forge.jobdir.job_files import RESULT, forge_dir, job_ledger
from forge.jobdir.job_state import Counts, JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.slurm import client
from forge.slurm.batch_job import BatchJob, Work
from forge.slurm.job_info import JobInfo
from forge.submitit import backends

NEAR = replace(RUNS, left_s=100.0)
BACK = JobInfo("PENDING", "BeginTime", 1, None, left_s=3000.0)
CANCELLED = JobInfo("COMPLETING", "None", 0, None)
LIMIT = JobInfo("COMPLETING", "TimeLimit", 0, None)
SILENT = None

QUEUED, HERE, IS_BACK = "requeued", "restarted in its allocation", "left in the queue"
ENDS, NOTED = "ends", "ends, since Slurm does not answer"


class Row(NamedTuple):
    """An end, and the decision of each backend with the budget that counts it."""

    what: str
    code: int
    """The exit code of the task, or of the training that acts last; -N for signal N."""
    says: JobInfo | None
    """The controller's answer."""
    launcher: tuple[str, str]
    """Below `hydra/launcher=slurm`."""
    script: tuple[str, str] | None
    """In a batch script of the user's own; None: its process has not lived to decide."""
    submitit: tuple[str, str] | None
    """Under plain submitit, on Slurm."""


PREEMPTIONS, TIMEOUTS, FAILURES = "preemptions", "timeouts", "failures"
OVER = (ENDS, "")
ROWS = [
    Row("preempted", 143, PREEMPTED, *[(QUEUED, PREEMPTIONS)] * 3),
    Row("preempted, and stopped by SIGUSR1", 75, PREEMPTED, *[(QUEUED, PREEMPTIONS)] * 3),
    Row("preempted without grace time", 143, BACK, *[(IS_BACK, PREEMPTIONS)] * 3),
    Row(
        *("preempted, and too slow to save", 70, PREEMPTED),
        *((QUEUED, PREEMPTIONS), (QUEUED, FAILURES), (QUEUED, FAILURES)),
    ),
    Row("preempted with a full disk", 71, PREEMPTED, *[(QUEUED, PREEMPTIONS)] * 3),
    Row("preempted after Ctrl+C", 130, PREEMPTED, (QUEUED, PREEMPTIONS), OVER, OVER),
    Row("preempted after a NaN", 65, PREEMPTED, *[OVER] * 3),
    Row("preempted, its directory in use", 73, PREEMPTED, *[OVER] * 3),
    Row("cancelled", 143, CANCELLED, *[OVER] * 3),
    Row("cancelled, and too slow to save", 70, CANCELLED, *[OVER] * 3),
    Row("signal before the time limit", 75, NEAR, *[(QUEUED, TIMEOUTS)] * 3),
    Row(
        *("too slow before the time limit", 70, NEAR),
        *((QUEUED, TIMEOUTS), (QUEUED, FAILURES), (QUEUED, FAILURES)),
    ),
    Row("the time limit itself", 143, LIMIT, *[(QUEUED, TIMEOUTS)] * 3),
    Row("SIGUSR1 by hand", 75, RUNS, *[(QUEUED, PREEMPTIONS)] * 3),
    Row("SIGTERM by hand", 143, RUNS, (HERE, PREEMPTIONS), OVER, OVER),
    Row("Ctrl+C", 130, RUNS, *[OVER] * 3),
    Row("forced exit", 70, RUNS, (HERE, FAILURES), OVER, (QUEUED, FAILURES)),
    Row("full disk", 71, RUNS, (QUEUED, FAILURES), OVER, (QUEUED, FAILURES)),
    Row("an error", 1, RUNS, *[OVER] * 3),
    Row("killed", KILLED, RUNS, (HERE, FAILURES), None, None),
    Row("no answer of the controller", 75, SILENT, (NOTED, TIMEOUTS), OVER, OVER),
]
LOCAL = {
    "SIGUSR1 by hand": ("exit 75", HERE, PREEMPTIONS),
    "SIGTERM by hand": ("exit 143", ENDS, ""),
    "Ctrl+C": ("exit 130", ENDS, ""),
    "forced exit": ("exit 70", HERE, FAILURES),
    "an error": ("exit 1", ENDS, ""),
    "a NaN": ("exit 65", ENDS, ""),
    "killed": ("kill -9 $$", HERE, FAILURES),
}
"""On one machine: what happened -> its shell command, the decision, the budget."""


def budget(counts):
    """The budget that has counted the end; empty if none has."""
    names = (PREEMPTIONS, TIMEOUTS, FAILURES, "hangs", "excluded")
    return ", ".join(name for name in names if counts[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_below_the_launcher_s_wrapper(row, played):
    """The wrapper is a process; the controller is simulated."""
    job = played().step(row.code % 256, report(row.code), report(row.code, 1))
    left_s = 10.0 if row.says is SILENT else row.says.left_s or 3000.0
    ended = job.run(row.says, *[row.says] * (row.says is not SILENT), left_s=left_s)
    decisions = {
        QUEUED: any(kind == "requeue" for kind, *_ in ended.did),
        HERE: ended.num_attempts == 2,
        IS_BACK: ended.code == 75 and row.says is BACK,
        NOTED: ended.state["reason"] == "unanswered",
    }
    decision = next((name for name, is_it in decisions.items() if is_it), ENDS)
    assert (decision, budget(ended.state["counts"])) == row.launcher


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Returns a function that sets the controller's answer; it has a list of requeued jobs."""
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    requeued = []

    def set_answer(says):
        def show(job, within_s):
            if says is SILENT:
                raise NoAnswer("busy")
            return says

        monkeypatch.setattr(client, "show", show)
        return requeued

    monkeypatch.setattr(client, "requeue", lambda job, within_s: requeued.append(job))
    monkeypatch.setattr(client, "delay", lambda *_: None)
    monkeypatch.setattr(client, "steps", lambda *_: [])
    return set_answer


def decided(backend, row, requeued):
    """What the backend's last act decides, and the budget that has counted the end."""
    code = backend.requeue(row.code, Reason.of_code(row.code))
    assert code == (75 if backend.starts_again else row.code)
    state = job_state.read(backend.job.directory)
    assert (state.state is State.queued) == backend.starts_again
    decision = (QUEUED if requeued else IS_BACK) if backend.starts_again else ENDS
    return decision, budget(asdict(state.counts))


@pytest.mark.parametrize("row", [row for row in ROWS if row.script], ids=lambda row: row.what)
def test_in_a_batch_script_of_the_user_s_own(row, slurm, tmp_path):
    """Slurm has to have ended the job: no other process restarts a training that failed."""
    requeued = slurm(row.says)
    work = Work(RequeueLimits.of(Policy().requeue), 30.0, Trainings([tmp_path], "checkpoints"))
    assert decided(BatchJob(tmp_path, work), row, requeued) == row.script


def test_a_batch_script_s_starts_and_ends_are_in_its_ledger(slurm, tmp_path, monkeypatch):
    """It says on which nodes each attempt ran and why it ended; two Runs are one attempt."""
    slurm(replace(PREEMPTED, is_batch=True))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    work = Work(RequeueLimits.of(Policy().requeue), 30.0, Trainings([tmp_path], "checkpoints"))
    for restarts in "01":
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        first, second = BatchJob(tmp_path, work), BatchJob(tmp_path, work)
        assert first.start_up()
        assert second.start_up()
        second.requeue(143, Reason.of_code(143))
    events = [json.loads(line) for line in job_ledger(tmp_path).read_text().splitlines()]
    kinds = ["attempt", "end", "requeue"]
    assert [one["kind"] for one in events] == kinds * 2
    assert [one["attempt"] for one in events if "attempt" in one] == [1, 1, 2, 2]
    assert [events[0]["nodes"], events[1]["reason"]] == ["n[1-2]", "preempted"]
    assert [one.get("restarts") for one in events] == [0, None, 1, 1, None, 2]


@pytest.mark.parametrize("row", [row for row in ROWS if row.submitit], ids=lambda row: row.what)
def test_under_plain_submitit(row, slurm, tmp_path):
    """The submitter waits for the result, so failures are restarted as well."""
    requeued = slurm(row.says)
    task = SimpleNamespace(is_on_slurm=True)
    assert decided(backends.backend_of(task, tmp_path, Policy()), row, requeued) == row.submitit


class Refuses(Backend):
    """A backend that cannot start the job again."""

    def refusal(self, ending):
        return "no nodes"


def test_a_restart_that_the_backend_refuses_counts_in_no_budget(tmp_path):
    """The user can start the job again when the backend is able to."""
    rules = [RequeueRule([7], max_restarts=2)]
    limits = RequeueLimits.of(Policy().requeue, rules=rules)
    job = Job(tmp_path, limits, Trainings([tmp_path], "checkpoints"), JobState(state=State.running))
    decision = Refuses(job).decide(Ending.of(7))
    assert (decision.starts_again, decision.because) == (False, "exit code 7; no nodes")
    assert job.counts == Counts()


@pytest.mark.parametrize(("command", "decision", "counter"), LOCAL.values(), ids=LOCAL)
def test_on_one_machine(command, decision, counter, tmp_path):
    """Real processes; the second attempt finishes."""
    result = forge_dir(tmp_path) / RESULT
    script = f"test -e began || {{ touch began; {command}; }}; touch '{result}'"
    job = {"token": str(tmp_path), "actions": {}, "time_limit_s": None, "slurm": None}
    plan = planned(command=["/bin/sh", "-c", script], cwd=str(tmp_path), **job)
    forge_dir(tmp_path).mkdir()
    plan.write(tmp_path)
    forked.completed(["-m", "forge.job.local", str(tmp_path)], tmp_path)
    state = job_state.read(tmp_path)
    num_attempts = job_ledger(tmp_path).read_text().count('"kind": "attempt"')
    assert (num_attempts == 2, budget(asdict(state.counts))) == (decision is HERE, counter)
    assert (state.state is State.finished) == (decision is HERE)
