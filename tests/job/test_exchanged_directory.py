"""A job's directory that another one takes the place of: nothing is made there."""

import json
import os

import forked
import pytest
from harness import until
from plans import planned
from ranked import RankedJob

from forge.filesystem import foreign
from forge.jobdir.plan import RequeueLimits

LIMITS = RequeueLimits(enabled=True, max_failures=3, max_no_progress=9)
KILL = "kill -9 $$"


def run(job, script):
    """A job whose first attempt does this, and is restarted."""
    plan = planned(
        command=["/bin/sh", "-c", script],
        token=f"exchanged-{os.getpid()}-{job.name}",
        actions={},
        time_limit_s=None,
        requeue=LIMITS,
        slurm=None,
    )
    (job / ".forge").mkdir(parents=True)
    (job / ".forge" / "plan.json").write_text(json.dumps(plan.to_json()))
    return forked.completed(["-m", "forge.job.local", str(job)], job.parent)


@pytest.fixture
def private(tmp_path):
    found = tmp_path / "private"
    found.mkdir()
    return found


def test_an_attempt_does_not_begin_where_a_link_leads_to(private, tmp_path):
    """A colleague who can write above the job's directory puts it there."""
    job = tmp_path / "job"
    swap = f"test -e {job}.aside || {{ mv {job} {job}.aside; ln -s {private} {job}; }}"
    found = run(job, f"{swap}; {KILL}")
    assert found.returncode == 78, found.stdout
    assert list(private.iterdir()) == []
    said = (tmp_path / "job.aside" / "output.log").read_text()
    assert f"{job} was replaced by another directory while this job was running" in said
    assert f"a link to {private}" in said


def test_an_attempt_does_not_write_into_the_files_of_another_job(private, tmp_path):
    """Where the link leads to another job, its ledger and its state would be written to."""
    job = tmp_path / "job"
    (private / ".forge" / "ledger").mkdir(parents=True)
    swap = f"test -e {job}.aside || {{ mv {job} {job}.aside; ln -s {private} {job}; }}"
    assert run(job, f"{swap}; {KILL}").returncode == 78
    assert [str(one.relative_to(private)) for one in private.rglob("*")] == [
        ".forge",
        ".forge/ledger",
    ]


def test_a_directory_that_was_moved_and_linked_back_is_the_same(tmp_path):
    """As people do where a disk gets full, while the job runs."""
    job = tmp_path / "job"
    move = f"test -e {job}.moved || {{ mv {job} {job}.moved; ln -s {job}.moved {job}; {KILL}; }}"
    assert run(job, f"{move}; exit 0").returncode != 78
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "job.moved/.forge/ledger/job.jsonl").read_text().splitlines()
        if line
    ]
    assert kinds.count("attempt") > 1


def test_a_training_makes_nothing_where_a_link_leads_to(private, tmp_path):
    """It has no wrapper, which would look before each attempt."""
    job = RankedJob(tmp_path / "all", 1, "attacked.py")
    (process,) = job.start()
    until((tmp_path / "all" / "here_0").exists, "step")
    job.checkpoints.rename(tmp_path / "aside")
    job.checkpoints.symlink_to(private)
    os.kill(process.popen.pid, 10)  # SIGUSR1
    (tmp_path / "all" / "go").touch()
    process.wait(100)
    assert list(private.iterdir()) == [], job.output


def test_a_forked_child_closes_no_file_of_its_own(tmp_path):
    """It has closed what it inherited, and the number is that of another file."""
    foreign.note_claim(tmp_path)
    (_, inherited), _ = foreign._claimed[str(tmp_path)]
    try:
        pid = os.fork()
        if not pid:
            os.dup2(2, inherited)
            foreign.note_claim(tmp_path)
            os._exit(not os.path.sameopenfile(2, inherited))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        foreign.forget_claim(tmp_path)
