"""A batch script written by hand: its job is requeued once if it should be, and otherwise never.

All jobs of a fixture run at the same time, since Slurm's pause after a requeue takes long.
"""

import pytest
from batch_scripts import COLLIDES, Folder, preempt
from cluster import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RUN, EXEC = "srun $train", "srun $exec"


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
        "trains": folder.submit("trains", f"{RUN} holds=0,1", "--nodelist=n1", "--time=2"),
        "cancelled": folder.submit("cancelled", f"{EXEC} slow=1", "--nodelist=n1"),
        "array": folder.submit("array", COLLIDES, "--nodelist=n1", "--array=0-3"),
        "by hand": folder.submit("by hand", RUN, "--nodelist=n2"),
        "shell": folder.submit("shell", RUN, "--nodelist=n2", "--time=1", "--signal=B:USR1@30"),
        "shell by hand": folder.submit("shell by hand", RUN, "--nodelist=n2"),
    }
    jobs["refused"], jobs["array"] = jobs["array"], jobs["array"].winner()
    for name in jobs.keys() - {"refused"}:
        jobs[name].wait()
    preempt(cluster, folder.folder, "--nodelist=n1")
    wait_for(lambda: jobs["cancelled"].noted("saving"), "save after a preemption")
    jobs["cancelled"].scancel()
    (jobs["cancelled"].notes / "cancelled").touch()
    jobs["by hand"].scancel("--signal=TERM")
    jobs["shell by hand"].scancel("--batch", "--signal=TERM")
    jobs["trains"].wait(2)
    jobs["trains"].scancel("--signal=USR1")
    yield jobs
    cluster.clear()


def test_a_preempted_script_is_requeued_once_and_so_it_is_at_its_limit(usual, undisturbed):
    """There is no wrapper; Slurm requeues only a job that still runs after its preemption.

    Any signal that the policy maps to `requeue` can announce the time limit.
    """
    job = usual["trains"]
    assert job.end() == ("COMPLETED", 2), job.output
    assert job.noted("result") == undisturbed
    assert job.repeated() == 0
    assert job.noted("callbacks") == ["0", "1"]
    assert (job.state["counts"]["preemptions"], job.state["counts"]["timeouts"]) == (1, 1)


def test_a_script_that_is_cancelled_or_signalled_by_hand_is_not_requeued(usual):
    """A cancel sends the signals of a preemption, and can come while a preempted job saves.

    The cancelled one is a command of `forge exec`; own_scripts.py does the same to a training.
    """
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


def test_a_shell_that_dies_of_the_announcement_is_no_cancel(usual, undisturbed):
    """`--signal=B:USR1@60` without a trap ends the shell, and Slurm then ends the training.

    Slurm cannot tell `--signal=B:TERM` from a SIGTERM by hand, and the message says what helps.
    """
    announced, by_hand = usual["shell"], usual["shell by hand"]
    assert announced.end() == ("COMPLETED", 1), announced.output
    assert announced.noted("result") == undisturbed
    assert announced.repeated() == 0
    assert announced.state["counts"]["timeouts"] == 1
    assert by_hand.end() == ("FAILED", 0), by_hand.output
    assert "is not requeued: its batch script was ended by SIGTERM" in by_hand.output
    assert "from `--signal=B:TERM`" in by_hand.output
    assert "cancelled" not in by_hand.output


def test_of_an_array_in_one_directory_one_task_trains_and_comes_back(usual, folder):
    """Hydra names directories by the second, in which all tasks of an array can start.

    A task that was refused must leave nothing of its own there: the other one would be requeued
    with its config, or not find its directory again.
    """
    winner, output = usual["array"], usual["refused"].output
    assert winner.end() == ("COMPLETED", 1), output
    task = int(winner.name.partition(" ")[2])
    assert winner.noted("result") == folder.result_here(task)
    assert winner.repeated() == 0
    refused = [one for one in range(4) if one != task]
    shown = [winner.cluster.show(f"{usual['refused'].number}_{one}") for one in refused]
    assert [one["ExitCode"] for one in shown] == ["73:0"] * 3, output
    hint = "'hydra.run.dir=runs/${oc.env:SLURM_ARRAY_JOB_ID}_${oc.env:SLURM_ARRAY_TASK_ID}'"
    assert output.count(hint) == 3
