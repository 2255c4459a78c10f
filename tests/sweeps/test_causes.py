"""`forge why`: the causes that it names, without processes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import readme
from forked import completed

import forge
from forge.errors import Reason
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State
from forge.sweeps import output
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.why import answers, ends
from forge.sweeps.why.evidence import Cause, Evidence

PAGE = readme.DOCS / "how-to/watch-a-sweep.md"
ERROR = """\
[2026-01-31 12:00:00,000][forge][INFO] - Training starts
[2026-01-31 12:00:01,000][forge][ERROR] - No checkpoint in /x can be used:
  - step_10: damaged
forge: failed: checkpoints cannot be written or read
"""


class Known(Evidence):
    """The facts about a job, without its directory."""

    def __init__(self, sweep, job, attempt, said="", **plan):
        super().__init__(sweep, job)
        self.attempts = [attempt]
        self.output = said
        self.files = replace(self.files, plan=plan, verdict={})


@pytest.fixture
def known(swept):
    """Returns a function that makes the facts about an attempt that ended for a reason."""
    sweep = forge.sweep(swept)

    def make(reason, events=(), is_command=False, said="", code=1, rank=0, **plan):
        job = replace(sweep.jobs[1], state=State.failed, is_command=is_command, rank=rank)
        found = [{"t": 1.0, **event} for event in events]
        attempt = AttemptRecord(1, 0.0, 9.0, reason.name, "a text", code, events=found)
        return Known(sweep, job, attempt, said, **plan)

    return make


def causes(known):
    return [one.cause for one in answers.of_job(known)]


def test_the_page_has_a_line_about_each_cause():
    """A person who reads a cause in the output of `--json` looks for it there."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == [one.value for one in Cause]


@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.finished])
def test_each_reason_of_an_end_has_a_rule(known, reason):
    """Also without the events and the plan that an earlier version of forge did not write."""
    found = known(reason)
    answer = ends.of_attempt(found, found.attempts[0])
    assert answer.cause is not Cause.unknown
    json.dumps([answer.cause.value, answer.text, answer.evidence, answer.remedy])


def test_a_number_is_not_taken_for_a_slurm_id(swept):
    """On a young cluster job 0 is Slurm's job 1: `forge cancel 1` must end job 1."""
    sweep = forge.sweep(swept)
    ids = [replace(job, slurm_id=str(job.number + 1)) for job in sweep.jobs]
    sweep = replace(sweep, jobs=tuple(ids))
    assert [sweep.find(str(n)).number for n in range(4)] == [0, 1, 2, 3]
    assert sweep.find("4").number == 3


def test_a_command_that_did_not_exit_at_its_time_limit_has_missed_the_signal(known):
    """A shell above the training swallows the signal, as in a container."""
    killed = known(Reason.time_limit, is_command=True, code=-9, signal="TERM", timeout_s=2.0)
    (answer,) = answers.of_job(killed)[:1]
    assert answer.cause is Cause.signal_missed
    assert "had not exited 2 s after SIGTERM" in answer.text
    assert causes(known(Reason.time_limit, is_command=True, code=75))[0] is Cause.time_limit


def test_a_sick_node_is_not_taken_for_a_nan(known):
    """With `action=halt` the job halts for a failed check, too; no learning rate helps."""
    sick = known(Reason.halted, [{"kind": "health", "check": "disk"}])
    assert causes(sick)[0] is Cause.unhealthy
    assert causes(known(Reason.halted))[0] is Cause.halted


HALTS = """
import forge, torch
model = torch.nn.Linear(1, 1)
nan = {"action": ACTION, "max_consecutive": 2, "rollback": {"max_rollbacks": 1}}
with forge.Run({"checkpoint": {"dir": "ck"}, "nan": nan}, model=model) as run:
    for step in run.steps(9):
        run.should_step(float("nan") if step > 2 else 0.0)
"""


@pytest.mark.parametrize(
    ("action", "advised"),
    [("skip", "`rollback`"), ("rollback", "`skip`"), ("halt", "`skip` or `rollback`")],
)
def test_the_action_that_has_halted_a_job_is_not_advised(action, advised, tmp_path):
    """After `skip` had halted a job, the advice was to set `skip`."""
    (tmp_path / "halts.py").write_text(HALTS.replace("ACTION", repr(action)))
    assert completed(["halts.py"], tmp_path).returncode == 65
    forge_ = str(Path(sys.executable).with_name("forge"))
    why = subprocess.run([forge_, "why", "ck"], cwd=tmp_path, capture_output=True, text=True)
    assert f"set `resilience.nan.action` to {advised} (docs" in " ".join(why.stdout.split())


@pytest.mark.parametrize("reason", [Reason.io_error, Reason.in_use, Reason.bad_config])
def test_the_error_of_a_job_that_could_not_start_is_in_the_evidence(known, reason):
    """Which checkpoint is damaged, who uses the directory, which key is wrong."""
    found = known(reason, said=ERROR)
    evidence = answers.of_job(found)[0].evidence
    assert "No checkpoint in /x can be used:\n  - step_10: damaged" in evidence
    assert output.last_error("no error") == ""


def test_the_rank_that_was_killed_is_named(known):
    """Of eight ranks one was killed, and the others ended since it did."""
    assert "process (rank 3) was a text" in answers.of_job(known(Reason.crashed, rank=3))[0].text


def test_an_exit_without_an_exception_is_not_given_a_code_that_it_had_not(known):
    """`os._exit(0)` before main has returned is a failure, recorded as code 1."""
    assert "of main: a text" in answers.of_job(known(Reason.failed))[0].text


def test_a_save_that_failed_is_said_once(swept):
    """Neither as a save that is due, nor in addition to a full disk."""
    sweep = forge.sweep(swept)
    job = replace(sweep.jobs[0], state=State.running, checkpoint=None)
    found = Evidence(sweep, job)
    tail = replace(found.files.ledger, problem={"step": 10, "error": "no answer"})
    found.files = replace(found.files, ledger=tail)
    found.attempts = []
    assert causes(found) == [Cause.save_failed]
    found.job = replace(job, state=State.failed)
    found.attempts = [AttemptRecord(1, 0.0, 9.0, Reason.disk_full.name)]
    assert Cause.save_failed not in causes(found)


def test_a_lost_run_is_continued_by_its_script(swept):
    """`forge resume` starts the jobs of a sweep, and refuses a single run."""
    run = forge.sweep(swept / "1")
    (job,) = run.jobs
    found = Evidence(run, replace(job, state=State.lost))
    assert f"`sh {swept}/1/.forge/resume.sh` continues it" in answers.of_job(found)[0].remedy[0]


def test_a_lost_node_is_known_from_the_next_start_of_the_job(tmp_path):
    """The wrapper of the first attempt was lost with its node, and could not record an end."""
    start = {"kind": "attempt", "attempt": 1, "nodes": "n4", "t": 1.0}
    again = {"kind": "requeue", "because": "node failed", "reason": "node_failed", "t": 50.0}
    events = [start, again, {**start, "attempt": 2, "nodes": "n2", "t": 51.0}]
    path = job_ledger(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in events))
    (tmp_path / ".forge" / "plan.json").write_text("{}")
    (job,) = forge.sweep(tmp_path).jobs
    assert job.ends == {"node_failed": 1}
    first, second = job.history()
    assert (first.node, first.reason, first.ended) == ("n4", "node_failed", 50.0)
    assert (second.node, second.ended) == ("n2", None)
    answer = answers.of_job(Evidence(forge.sweep(tmp_path), job))[-1]
    assert (answer.cause, "failed on n4" in answer.text) == (Cause.node_failed, True)
