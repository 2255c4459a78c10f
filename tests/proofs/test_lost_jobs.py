"""Jobs that a cluster, or somebody on it, ends in ways that once lost them.

All jobs run at once, as in test_disturbed.py.
"""

import signal
from pathlib import Path

import pytest
from cluster import stat_of, submit, wait_for
from harness import until
from slurm_apps import TRAIN, SlurmApp, SlurmJob, reasons, table, undisturbed  # noqa: F401
from sweeps import assert_same_job

from forge.process import processes
from forge.slurm import job_info

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# Some of them wait for a file instead of a signal.
HELD = TRAIN.replace(
    "        while num_", '        while not Path(cfg.gates, f"go {cfg.kind}").exists() and num_'
).replace("is_stopping() and hears", 'is_stopping() and hears and cfg.kind != "left"')
assert HELD.count(" cfg.kind != ") == HELD.count("go {cfg.kind}") == 1
ON_N2 = ("removed", "anew", "lost")
ON_N1 = ("full", "script", "stepd", "withdrawn", "extended")
AWAY = ("patient", "left")


def stepd_above(pid):
    """The daemon of the step that a process belongs to."""
    name, parent = stat_of(pid)
    while not name.startswith("slurmstepd"):
        pid, (name, parent) = parent, stat_of(parent)
        assert pid
    return pid


def has_ended(job):
    return job.state["state"] in ("finished", "failed", "stopped")


def when(job, kind):
    """When its wrapper first wrote something down."""
    return next(one["t"] for one in job.told if one["kind"] == kind)


class Sweep:
    """The sweep, and what is done to its jobs."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.app = SlurmApp(cluster, folder / "lost", HELD)
        kinds = (*ON_N2, *ON_N1)
        cancels = dict.fromkeys(("removed", "anew", "withdrawn"), "cancel")
        self.sweep = self.app.start(
            f"kind={','.join(kinds)}",
            f"++holds={table(**dict.fromkeys(kinds, 1))}",
            f"++nodes={table(**dict.fromkeys(ON_N2, 'n2'))}",
            f"++partitions={table(**cancels, lost='urgent')}",
            f"++minutes={table(extended=1)}",
        )
        self.away = SlurmApp(cluster, folder / "away", HELD)
        self.first = {}

    def disturb(self):
        extended = self._submitted()["extended"]
        until(lambda: extended.state.get("step") == 0, "its first attempt")
        # Now: Slurm may announce the end after 16 s, when the task has not even started.
        self.cluster.run("scontrol", "update", f"JobId={extended.slurm_id}", "TimeLimit=10")
        for kind in (*ON_N2, *ON_N1):
            self.app.wait_for_gate(f"{kind} 0", self.sweep)
        jobs = self.app.jobs()
        self.first = {kind: job.slurm_id for kind, job in jobs.items()}
        jobs["full"].scancel("--full", "--signal=TERM")
        jobs["withdrawn"].scancel()
        _, batch_shell = stat_of(jobs["script"].state["pid"])
        assert processes.send(batch_shell, signal.SIGKILL)
        assert processes.send(stepd_above(jobs["stepd"].supervisor), signal.SIGKILL)
        self.cluster.run("scontrol", "update", f"JobId={self.first['anew']}", "Requeue=0")
        options = ["--partition=urgent", "--nodelist=n2", "--cpus-per-task=15"]
        submit(self.cluster, self.app.folder, "sleep 0.1", *options)
        (self.app.gates / "go stepd").touch()  # Slurm does not see it any more
        for kind in ("removed", "anew"):
            wait_for(lambda kind=kind: has_ended(jobs[kind]), f"end of {kind}")
            if kind == "anew":
                continue
            # Slurm's own comes later: what it still sees on a lost node is requeued.
            is_over = lambda kind=kind: jobs[kind].shown["JobState"] == "COMPLETED"  # noqa: E731
            wait_for(is_over, f"end of {kind} for Slurm")
        self._lose(jobs["lost"])
        self._take_controller_away()
        run_s = lambda: job_info.seconds(jobs["extended"].shown["RunTime"])  # noqa: E731
        wait_for(lambda: run_s() > 65, "the end as it was at first")
        (self.app.gates / "go extended").touch()

    def _take_controller_away(self):
        """As both want their requeue: one has the time to wait for it, the other has not."""
        self.follower = self.away.start(
            f"kind={','.join(AWAY)}",
            f"++holds={table(**dict.fromkeys(AWAY, 1))}",
            f"++minutes={table(left=1)}",
        )
        for kind in AWAY:
            self.away.wait_for_gate(f"{kind} 0", self.follower)
        jobs = self.away.jobs()
        with self.cluster.controller_away():
            for kind in AWAY:
                assert processes.send(jobs[kind].task, signal.SIGUSR1)
            (self.away.gates / "go left").touch()
            wait_for(lambda: has_ended(jobs["left"]), "end of left", 180)

    def _submitted(self):
        until(lambda: "extended" in self.app.jobs(), "sweep")
        return self.app.jobs()

    def _lose(self, job):
        """End all processes of a job on its node, as a power cut does; then Slurm notices it."""
        daemons = [pid for pid in processes.descendants() if stat_of(pid)[0] == "slurmd"]
        (slurmd,) = [pid for pid in daemons if b"n2" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pids = [stepd_above(job.supervisor), stepd_above(job.state["pid"])]
        pids += [stat_of(job.state["pid"])[1], job.state["pid"], *job.marked]
        processes.send(slurmd, signal.SIGSTOP)
        for pid in pids:
            processes.send(pid, signal.SIGKILL)
        self.cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
        processes.send(slurmd, signal.SIGCONT)
        wait_for(lambda: job.shown["JobState"] == "PENDING", "requeue by Slurm")
        # Unless it is back by itself, as ReturnToService has it.
        self.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)


@pytest.fixture(scope="module")
def sweep(cluster, tmp_path_factory):
    found = Sweep(cluster, tmp_path_factory.mktemp("sweep"))
    try:
        found.disturb()
        yield found
    finally:
        for app in (found.app, found.away):
            app.close()


@pytest.fixture
def job(sweep, request) -> SlurmJob:
    """The job that the test's parameter names, when it has ended."""
    found = (sweep.app.jobs() | sweep.away.jobs())[request.param]
    wait_for(lambda: has_ended(found), "its end")
    return found


def of(*kinds):
    return pytest.mark.parametrize("job", kinds, indirect=True)


@of("removed")
def test_a_preempted_job_comes_back_where_slurm_would_only_cancel_it(job, undisturbed):  # noqa: F811
    """PreemptMode=CANCEL without grace time: COMPLETING, as after a scancel."""
    assert_same_job(job, undisturbed)
    assert job.restarts == 1
    assert reasons(job) == ["preempted", "finished"]
    assert job.counts["preemptions"] == 1


def resumed(app, kind):
    """The job, once `forge resume` has started it again and it has ended."""
    app.forge("resume", str(app.sweep_dir), f"kind={kind}")
    job = app.jobs()[kind]
    wait_for(lambda: job.state.get("state") == "finished", f"end of {kind}")
    return job


@of("anew")
def test_a_preempted_job_that_slurm_does_not_requeue_ends_and_says_so(sweep, job, undisturbed):  # noqa: F811
    """A command of its user starts it again, from its checkpoint."""
    assert (job.state["state"], job.state["reason"]) == ("stopped", "unanswered")
    assert "Run the sweep's command again" in job.output
    assert_same_job(resumed(sweep.app, "anew"), undisturbed)


@of("withdrawn")
def test_a_cancel_in_such_a_partition_is_one(job):
    """It must not be taken for a preemption."""
    assert job.state["reason"] == "cancelled"
    wait_for(lambda: job.shown["JobState"] == "CANCELLED", "end of the job")
    assert job.restarts == 0


@of("lost")
def test_after_its_node_was_lost_a_job_begins_at_once(job, undisturbed):  # noqa: F811
    """Slurm has requeued it: to do so again would be a second wait in a full queue."""
    assert_same_job(job, undisturbed)
    assert job.restarts == 1
    assert [one["because"] for one in job.told if one["kind"] == "requeue"] == ["node failed"]


@of("script")
def test_a_job_whose_batch_script_is_killed_comes_back_as_a_failure(job, undisturbed):  # noqa: F811
    """By the out-of-memory killer, say: nobody has cancelled it."""
    assert_same_job(job, undisturbed)
    assert job.restarts == 1
    (why,) = [one["because"] for one in job.told if one["kind"] == "requeue"]
    assert why == "its batch script was killed"
    assert job.counts["failures"] == 1


@of("full")
def test_sigterm_by_hand_to_the_whole_job_is_no_failure(job, undisturbed):  # noqa: F811
    """`scancel --full --signal=TERM`: of a SIGTERM srun would kill the tasks while they save."""
    assert_same_job(job, undisturbed)
    assert reasons(job) == ["signalled", "finished"]
    assert job.repeated == [0]
    assert job.counts["failures"] == 0
    assert job.restarts == 0


@of("extended")
def test_a_time_limit_that_was_extended_while_the_job_ran(job, undisturbed):  # noqa: F811
    """The administrator did so for the job not to be interrupted."""
    assert_same_job(job, undisturbed)
    assert reasons(job) == ["finished"]
    assert "time limit moved" in [one["kind"] for one in job.told]


@of("stepd")
def test_a_step_that_slurm_has_lost_sight_of_ends_with_its_tasks(job, undisturbed):  # noqa: F811
    """srun would wait until the time limit."""
    assert_same_job(job, undisturbed)
    assert job.restarts == 0


@of("patient")
def test_a_job_asks_a_controller_that_is_away_until_it_is_back(sweep, job, undisturbed):  # noqa: F811
    """It is requeued once; it has the rest of its allocation to wait for that."""
    assert_same_job(job, undisturbed)
    assert reasons(job) == ["requested", "finished"]
    assert job.repeated == [0]
    assert job.restarts == 1
    assert when(job, "requeued") > when(sweep.away.jobs()["left"], "stopped")


@of("left")
def test_a_job_whose_controller_stays_away_ends_and_says_so(sweep, job, undisturbed):  # noqa: F811
    """Before its allocation ends; a command of its user starts it again."""
    assert (job.state["state"], job.state["reason"]) == ("stopped", "unanswered")
    assert when(job, "stopped") - when(job, "attempt") < 60
    sweep.follower.wait()
    job = resumed(sweep.away, "left")
    assert_same_job(job, undisturbed)
    assert job.repeated == [0]
