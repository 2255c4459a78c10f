"""`forge exec` on a true cluster: Slurm signals every process, and forge nobody a second time.

All commands are one sweep: what takes long is Slurm.
"""

import contextlib
import json
import signal

import pytest
from cluster import wait_for
from commands import COMMANDS, SlurmCommands, ends, wait_ready

from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

AWKWARD = {"pipeline": -15, "daemon": 0}
"""Each with its exit code when it is asked to stop; `any_command.py` has the others."""
KILLED = ("batch", "srun", "supervisor", "command")
"""Jobs of which this process is killed."""
MORE = {
    **dict.fromkeys([*KILLED, "cancelled", "asked"], COMMANDS["trap"]),
    "rule": ["bash", "-c", 'cat "$FORGE_JOB_DIR/recovered" || exit 3'],
    "absent": ["no-such-program"],
}
RULES = (
    "resilience.requeue.rules=[{exit_codes:[3],recover:[bash,-c,"
    '\'echo "recovered from $FORGE_RETURN_CODE" > "$FORGE_JOB_DIR/recovered"\']}]'
)


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """All of them, each asked to stop once, killed or cancelled; when they have ended."""
    folder = tmp_path_factory.mktemp("commands") / "project"
    kinds = f"kind={','.join([*AWKWARD, *MORE])}"
    with contextlib.closing(SlurmCommands(cluster, folder)) as found:
        path = folder / "conf.yaml"
        path.write_text(
            path.read_text().replace("commands: {", f"commands: {json.dumps(MORE)[:-1]}, ")
        )
        timeout = "resilience.shutdown.timeout_s=3"
        sweep = found.start("--config-name", "conf", kinds, timeout, RULES)
        found.wait_for_jobs(sweep, len(kinds.split(",")))
        jobs = found.jobs()
        for name in (*AWKWARD, *KILLED, "cancelled", "asked"):
            wait_ready(jobs[name], sweep)
            (jobs[name].directory / "state").write_text("10\n")  # the command saved step 10 earlier
        for name in (*AWKWARD, "asked"):
            jobs[name].scancel(f"--signal={'TERM' if name in AWKWARD else 'USR1'}")
        jobs["cancelled"].scancel()
        pids = {
            "batch": jobs["batch"].wrapper,
            "srun": jobs["srun"].srun,
            "supervisor": jobs["supervisor"].supervisor,
            "command": processes.descendants(jobs["command"].supervisor)[0],
        }
        for pid in pids.values():
            assert processes.send(pid, signal.SIGKILL)
        assert sweep.wait() == 1, sweep.output  # one was cancelled, one not found
        yield found


@pytest.fixture(scope="module")
def jobs(ended):
    """The jobs by what they are to show."""
    return ended.jobs()


@pytest.mark.parametrize("name", AWKWARD)
def test_a_command_that_slurm_tells_to_leave_runs_again_and_nothing_is_left(name, jobs):
    """Slurm signals the command's processes itself; a second signal from forge would end a save."""
    job = jobs[name]
    assert ends(job) == [f"terminated signalled {AWKWARD[name]}", "finished finished 0"], job.output
    assert job.marked == []
    wait_for(lambda: job.shown["JobState"] == "COMPLETED", "end in Slurm's eyes")


@pytest.mark.parametrize("name", KILLED)
def test_whichever_process_is_killed_the_command_comes_to_its_end(name, jobs):
    """The command resumes from its save, on the same nodes: in the queue it could wait for a day.

    If srun or its supervisor is killed, nobody knows how the step ended: the job is requeued.
    """
    job = jobs[name]
    assert job.state["state"] == "finished", job.output
    assert job.state["counts"]["failures"] == 1
    assert (job.restarts, job.marked) == (int(name in ("srun", "supervisor")), [])
    steps = (job.directory / "steps.txt").read_text().split()
    assert steps == [str(step) for step in range(1, 21)]


def test_a_cancelled_command_is_not_run_again_whatever_it_exits_with(jobs):
    """The command saves and exits with 0; only Slurm's controller knows that it was cancelled."""
    job = jobs["cancelled"]
    assert ends(job) == ["terminated cancelled 0"], job.output
    assert (job.state["state"], job.state["code"]) == ("terminated", 0)
    wait_for(lambda: job.shown["JobState"] == "CANCELLED", "end in Slurm's eyes")


def test_the_siblings_of_a_cancelled_job_are_left_alone(jobs):
    """The siblings are in the same Slurm array as the cancelled job."""
    arrays = {jobs[name].shown["ArrayJobId"] for name in ("cancelled", "asked", "srun")}
    assert len(arrays) == 1


def test_the_launcher_reports_what_became_of_each_job(ended):
    """The launcher also prints the command that resumes the stopped jobs."""
    (sweep,) = ended.started
    assert "8 of 10 finished, 1 failed · 1 terminated · " in sweep.output
    assert "To resume (starts again: 1 cancelled, 1 failed):\n" in sweep.output


def test_a_signal_that_asks_to_requeue_goes_through_the_queue(jobs):
    """SIGUSR1 kills a script without a trap; the policy defines it as a request to requeue."""
    job = jobs["asked"]
    assert ends(job) == ["terminated requested -10", "finished finished 0"], job.output
    assert job.restarts == 1


def test_a_rule_s_recovery_command_runs_on_the_nodes_of_the_job(jobs):
    """The recovery command runs as a separate Slurm step before the step of the next attempt."""
    job = jobs["rule"]
    assert ends(job) == ["failed failed 3", "finished finished 0", "finished finished 0"]
    _, second = job.output.split("==== forge: attempt 2, ")
    assert "recovered from 3" in second


def test_a_command_that_the_nodes_do_not_know_is_told_in_its_log(jobs):
    """The login node cannot check it: the nodes can have other modules and containers."""
    job = jobs["absent"]
    assert ends(job) == ["failed failed 127"]
    assert "no-such-program cannot be started" in job.output
