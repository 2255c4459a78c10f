"""Others reach the ports of a job, and can write into its store: nothing of that is acted on."""

import os
import signal

import pytest
from harness import until
from ranked import RankedJob
from rows import few
from store_attack import ATTACKS, listeners_of, store_at

WILDCARDS = ("0" * 8, "0" * 32)


@pytest.fixture
def job(tmp_path):
    """Two ranks, which hold still in a step."""
    found = RankedJob(tmp_path, 2, "attacked.py")
    found.processes = found.start()
    try:
        until(lambda: all((tmp_path / f"here_{r}").exists() for r in (0, 1)), "both in the step")
        yield found
    finally:
        for one in found.processes:
            one.popen.kill()


def pids(job):
    return [one.popen.pid for one in job.processes]


@pytest.mark.parametrize("name", few(2, [*ATTACKS]))
def test_what_no_rank_has_written_ends_the_attempt_and_is_not_acted_on(name, job, tmp_path):
    """One message would end it as finished, keep it from stopping, or end it with a code of 0."""
    attack, is_suspended = ATTACKS[name]
    store = store_at([port for _, port in listeners_of(pids(job))])
    if is_suspended:
        os.kill(pids(job)[1], signal.SIGSTOP)
    if name == "limit":
        os.kill(pids(job)[0], signal.SIGUSR1)
    if name != "given":
        attack(store)
    (tmp_path / "go").touch()
    if name == "given":
        attack(store)
    first = job.processes[0].wait(60)
    os.kill(pids(job)[1], signal.SIGCONT)
    assert [first, job.processes[1].wait(60)] == [70, 70], job.output
    assert "was not written by one of them" in job.output
    job.run_to_end()
    assert [one.events[-1]["kind"] for one in job.history.attempts][-1] == "finish"
    assert job.history.attempts[-1].events[-1]["step"] == 8


def test_on_one_machine_no_port_is_open_to_others(job, tmp_path):
    """Whoever is on the network would reach it."""
    found = listeners_of(pids(job))
    assert found
    assert [one for one in found if one[0] in WILDCARDS] == []
    (tmp_path / "go").touch()
    assert [one.wait(60) for one in job.processes] == [0, 0], job.output


def test_ranks_of_two_jobs_that_meet_by_accident_do_not_train_together(tmp_path):
    """One port for both is enough for that: rank 1 of one came where rank 0 of the other was."""
    job = RankedJob(tmp_path, 2, "attacked.py")
    (tmp_path / "go").touch()
    processes = job.start([{"FORGE_JOB_TOKEN": "one"}, {"FORGE_JOB_TOKEN": "other"}])
    assert [one.wait(60) for one in processes] == [70, 70], job.output
    assert "has connected to rank 0 of another job" in job.output
