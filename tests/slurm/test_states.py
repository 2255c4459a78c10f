"""Slurm's states of a job, and what each means for forge: one table."""

import os

import pytest

from forge.slurm import client, job_info

DOCUMENTED = """
    BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE EXPEDITING FAILED NODE_FAIL
    OUT_OF_MEMORY PENDING POWER_UP_NODE PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD
    REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT
"""


def fake_squeue(folder, monkeypatch, *lines):
    """No release of Slurm that tests can install has these states."""
    program = folder / "squeue"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_every_state_that_slurm_documents_is_known():
    """One that is missing would be taken for another state somewhere."""
    assert set(DOCUMENTED.split()) <= job_info.STATES.keys()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("NODE_FAIL", "node_failed"),
        ("BOOT_FAIL", "node_failed"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("COMPLETING Reason=OutOfMemory", "out_of_memory"),
        ("DEADLINE", "cancelled"),
        ("TIMEOUT", "time_limit"),
        ("PREEMPTED", "preempted"),
        ("RUNNING", "unknown"),
        ("EXPEDITING", "unknown"),
    ],
)
def test_a_job_that_slurm_has_ended_counts_as_ended(state, why):
    """A process that outlives its job must not be taken for one that a person has signalled."""
    info = job_info.JobInfo.parse(f"JobId=7 JobState={state} Restarts=0 PreemptTime=None")
    assert info.has_ended is (why != "unknown")
    assert client.why(info, 0).name == why


def test_a_state_that_forge_does_not_know_counts_as_alive_and_is_named_once(
    tmp_path, monkeypatch, caplog
):
    """The next release of Slurm can have one: a job that is taken for gone is submitted twice."""
    lines = [f"{number}|{state}|None|x" for number, state in enumerate(("EXPEDITING", "FLOATING"))]
    fake_squeue(tmp_path, monkeypatch, *lines, "2|NODE_FAIL|None|x")
    for _ in range(2):
        assert [one.is_alive for one in client.queue().values()] == [True, True, False]
    said = caplog.text
    assert said.count("squeue shows job 1 as FLOATING, a state that forge does not know") == 1
    assert "EXPEDITING" not in said
