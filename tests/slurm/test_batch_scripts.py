"""A batch script written by hand: its job is requeued once if it should be, and otherwise never.

All jobs of a fixture run at the same time, since Slurm's pause after a requeue takes long.
"""

import pytest
from batch_scripts import Folder, preempt
from cluster import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RUN = "srun $train"


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    return Folder(cluster, tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def undisturbed(folder):
    return folder.result_here()


@pytest.fixture(scope="module")
def usual(cluster, folder):
    """Jobs with all the ends that are tested each time."""
    jobs = {
        "preempted": folder.submit("preempted", RUN, "--nodelist=n1"),
        "cancelled": folder.submit("cancelled", f"{RUN} slow=1", "--nodelist=n1"),
        "by hand": folder.submit("by hand", RUN, "--nodelist=n2"),
        "limit": folder.submit("limit", RUN, "--nodelist=n2", "--time=2"),
    }
    for name in ("preempted", "cancelled", "by hand", "limit"):
        jobs[name].wait()
    preempt(cluster, folder.folder, "--nodelist=n1")
    wait_for(lambda: jobs["cancelled"].noted("saving"), "save after a preemption")
    jobs["cancelled"].scancel()
    (jobs["cancelled"].notes / "cancelled").touch()
    jobs["by hand"].scancel("--signal=TERM")
    jobs["limit"].scancel("--signal=USR1")
    yield jobs
    cluster.clear()


def test_a_preempted_script_is_requeued_once_and_ends_with_the_same_bits(usual, undisturbed):
    """There is no wrapper; Slurm requeues only a job that still runs after its preemption."""
    job = usual["preempted"]
    assert job.end() == ("COMPLETED", 1), job.output
    assert job.noted("result") == undisturbed
    assert job.repeated() == 0
    assert job.noted("callbacks") == ["0"]
    assert job.state["counts"]["preemptions"] == 1


def test_a_script_at_its_limit_is_requeued_within_the_budget_of_time_limits(usual, undisturbed):
    """Any signal that the policy maps to `requeue` can announce the time limit."""
    job = usual["limit"]
    assert job.end() == ("COMPLETED", 1), job.output
    assert job.noted("result") == undisturbed
    assert job.state["counts"]["timeouts"] == 1


def test_a_script_that_is_cancelled_or_signalled_by_hand_is_not_requeued(usual):
    """A cancel sends the signals of a preemption, and can come while a preempted job saves."""
    cancelled, by_hand = usual["cancelled"], usual["by hand"]
    assert cancelled.end() == ("CANCELLED", 0), cancelled.output
    assert (
        "is not requeued: it was cancelled. To resume it:\n  scontrol requeue" in cancelled.output
    )
    assert by_hand.end() == ("FAILED", 0), by_hand.output
    assert "the signal was sent by a person or a program" in by_hand.output
    assert f"sbatch '{by_hand.place / 'job.sh'}'" in by_hand.output
    assert "python" not in by_hand.output
    assert by_hand.verdict["exit_code"] == 143
