"""Jobs of sweeps on a real Slurm cluster, with every interruption that a cluster can cause.

All sweeps of this file run at once, because Slurm pauses after a requeue, and because its shortest
time limit is a minute. So the tests of the limit come last.
One module, since its tests share that time.
"""

import contextlib
import signal

import pytest
from cluster import submit, wait_for
from slurm_apps import HOLD, SlurmApp, SlurmJob, reasons, table, urgent
from sweeps import assert_same_job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

KINDS = ("struck", "zero", "stuck")
LATER = 20
"""The step at which `struck` holds to be preempted; at HOLD other things have happened to it."""
KILLED = ("task", "wrapper", "srun")
"""Processes of a job, each killed in an attempt."""

EXITS = """
    import os, sys, time, traceback
    from pathlib import Path
    import hydra

    NODE = os.environ.get("SLURMD_NODENAME")

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        gates = Path(cfg.gates)
        with open(gates / f"{cfg.kind} ran on", "a") as file:
            file.write(f"{NODE}\\n")
        while not (gates / "go").exists():
            time.sleep(0.05)
        if cfg.kind == "raises":
            raise ValueError("no such luck")
        if cfg.kind == "ranks" and os.environ["SLURM_PROCID"] == "1":
            raise RuntimeError("rank 1 alone")
        if cfg.kind == "nowhere":
            sys.exit(69)
        if cfg.kind == "unwilling":
            os._exit(3)
        return 42, os.environ.get("FROM_SETUP")

    if __name__ == "__main__":
        from forge.launch.slurm import launcher

        launch = launcher.launch

        def spy(*given):
            for one in launch(*given):
                value = one._return_value
                kind = next(text for text in one.overrides if text.startswith("kind="))
                print("RETURNED", kind, type(value).__name__, value)
                if isinstance(value, Exception):
                    traceback.print_exception(value, file=sys.stdout)
            return []

        launcher.launch = spy
        main()
"""
EXITS_CONF = """
    defaults: [{resilience: default}, _self_]
    kind: plain
    gates: ???
    tasks: {ranks: 2}
    resilience:
      health: {enabled: false}
      requeue: {max_no_progress: 5}
      slurm:
        tasks_per_node: ${oc.select:tasks.${kind},1}
"""


class Sweeps:
    """The three sweeps, and what is done to their jobs."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.app = SlurmApp(cluster, folder / "disturbed")
        self.limits = SlurmApp(cluster, folder / "limits")
        self.exits = SlurmApp(cluster, folder / "exits", EXITS, EXITS_CONF)
        self.sweep = self.app.start(
            f"kind={','.join(KINDS)}",
            "++idle=[stuck]",
            f"++holds={table(struck=3, zero=1, stuck=1)}",
            f"++later={table(struck=LATER)}",
            f"++nodes={table(**dict.fromkeys(KINDS, 'n2'))}",
            f"++partitions={table(zero='zero')}",
        )
        self.limited = start_limited(self.limits, "limit", "deaf")

    def disturb(self):
        """Disturb all jobs, as soon as every job has reached its step."""
        for kind in KINDS:
            self.app.wait_for_gate(f"{kind} 0", self.sweep)
        struck = self.app.jobs()["struck"]
        struck.kill("wrapper")
        self.app.wait_for_gate("struck 1", self.sweep)
        struck.scancel("--signal=TERM")
        self.app.wait_for_gate("struck 2", self.sweep)
        preempting = urgent(self.cluster, self.app.folder, "--nodelist=n2")
        is_over = lambda: self.cluster.show(preempting)["JobState"] == "COMPLETED"  # noqa: E731
        wait_for(is_over, "end of the urgent job")
        self._exit()

    def _exit(self):
        """Jobs that end in every way; others wait for the success of two of them."""
        self.exiting = self.exits.start(
            "kind=good,raises,ranks,nowhere,unwilling",
            "hydra.launcher.setup=['set -e','export FROM_SETUP=yes']",
            "hydra.launcher.teardown=['echo torn down','false']",
        )

        for kind in ("good", "raises"):
            self.exits.wait_for_gate(f"{kind} ran on", self.exiting)
        self.after = {
            kind: submit(
                self.cluster,
                self.exits.folder,
                "true",
                f"--dependency=afterok:{self.exits.jobs()[kind].slurm_id}",
            )
            for kind in ("good", "raises")
        }
        (self.exits.gates / "go").touch()


def start_limited(app, *kinds):
    """Start jobs with Slurm's shortest time limit."""
    return app.start(
        f"kind={','.join(kinds)}",
        f"++holds={table(limit=1, deaf=1, held=1)}",
        f"++minutes={table(**dict.fromkeys(kinds, 1))}",
        f"++seconds={table(deaf=0)}",
        f"++fruitless={table(late=1)}",
    )


@pytest.fixture(scope="module")
def sweeps(cluster, tmp_path_factory):
    found = Sweeps(cluster, tmp_path_factory.mktemp("sweeps"))
    try:
        found.disturb()
        yield found
    finally:
        for one in (found.sweep, found.limited, getattr(found, "exiting", found.sweep)):
            if one.popen.poll() is None:
                one.signal(signal.SIGKILL)
                one.wait()
        cluster.clear()


@pytest.fixture
def job(sweeps, request) -> SlurmJob:
    """The job that the test's parameter names, when its sweep has ended."""
    assert sweeps.sweep.wait() == 0, sweeps.sweep.output
    return sweeps.app.jobs()[request.param]


def of(*kinds):
    return pytest.mark.parametrize("job", kinds, indirect=True)


@of("struck")
def test_a_preempted_job_saves_and_comes_back_once(job, undisturbed):
    """With a grace time the job requeues itself."""
    assert_same_job(job, undisturbed)
    wait_for(lambda: job.shown["JobState"] == "COMPLETED", "the end in Slurm")
    assert job.restarts == 1
    assert job.repeated[-1] in (0, 1)
    assert job.counts["preemptions"] == 2, "the signal that was sent by hand is one"


@of("zero")
def test_a_job_that_is_preempted_without_a_grace_time_comes_back_once(job, undisturbed):
    """Slurm has requeued it already."""
    assert_same_job(job, undisturbed)
    wait_for(lambda: job.shown["JobState"] == "COMPLETED", "the end in Slurm")
    assert job.restarts == 1
    assert len(job.repeated) == 1
    assert job.repeated[0] <= 1
    assert job.counts["preemptions"] == 1
    assert job.counts["failures"] == 0


@of("stuck")
def test_a_task_that_hears_nothing_is_preempted_all_the_same(job):
    """The task holds Python's interpreter lock during the whole grace time."""
    assert job.restarts == 1
    assert reasons(job) == ["preempted", "finished"]
    assert job.counts["preemptions"] == 1


@of("struck")
def test_a_job_whose_wrapper_is_killed_comes_to_its_end(job):
    """The job restarts at once on the same nodes: in the queue it could wait for a day.

    The batch script restarts the wrapper. The rest of the old step is killed before the task
    starts again, so that two tasks never share a directory.
    """
    kinds = [one["kind"] for one in job.told if one["kind"] in ("attempt", "requeued")]
    assert kinds == ["attempt", "attempt", "attempt", "requeued", "attempt"]
    assert job.counts["failures"] == 1
    assert job.attempts == 4
    assert job.starts[:2] == [0, 10]
    assert job.state["reason"] == "finished"


@of("struck")
def test_sigterm_by_hand_saves_and_goes_on(job):
    """Slurm did not send this signal, so the job keeps its nodes."""
    assert job.starts[2] == HOLD + 1
    assert reasons(job) == ["signalled", "preempted", "finished"]


@pytest.mark.proofs
def test_a_training_comes_to_its_end_whichever_process_is_killed(cluster, tmp_path, undisturbed):
    """If srun is killed, nobody knows how the step ended, so the job is requeued."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app")) as app:
        sweep = app.start("kind=struck", f"++holds={table(struck=len(KILLED))}")
        for number, kind in enumerate(KILLED):
            app.wait_for_gate(f"struck {number}", sweep)
            (job,) = app.jobs_by_place()
            job.kill(kind)
        assert sweep.wait() == 0, sweep.output
        assert_same_job(job, undisturbed)
        kinds = [one["kind"] for one in job.told if one["kind"] in ("attempt", "requeued")]
        assert kinds == [*["attempt"] * len(KILLED), "requeued", "attempt"]
        assert job.restarts == 1
        assert job.counts["failures"] == len(KILLED)
        assert job.starts == [0, *[10] * len(KILLED)]


# -- exit states -----------------------------------------------------------------------------------


@pytest.fixture
def ended(sweeps) -> dict[str, SlurmJob]:
    """The jobs of the sweep of exit states, when it has ended."""
    assert sweeps.exiting.wait() == 0, sweeps.exiting.output
    return sweeps.exits.jobs()


def state_of(job):
    """(JobState, ExitCode), once the batch script has ended, too."""
    wait_for(lambda: job.shown["JobState"] not in ("RUNNING", "COMPLETING"), "end of the job")
    return job.shown["JobState"], job.shown["ExitCode"]


def test_success_is_completed_and_an_exception_is_failed(sweeps, ended):
    """Whatever the teardown's own commands end with, and although the setup asks for `set -e`."""
    assert state_of(ended["good"]) == ("COMPLETED", "0:0")
    assert state_of(ended["raises"]) == ("FAILED", "1:0")
    assert state_of(ended["unwilling"]) == ("FAILED", "3:0")
    logs = sweeps.exits.sweep_dir / ".submitit"
    torn_down = [path for path in logs.glob("*.out") if "torn down" in path.read_text()]
    assert len(torn_down) >= 5


def test_results_and_exceptions_come_back(sweeps, ended):
    """The traceback is in the job's log as well."""
    output = sweeps.exiting.output
    assert "RETURNED kind=good tuple (42, 'yes')" in output
    assert "RETURNED kind=raises ValueError no such luck" in output
    assert 'raise ValueError("no such luck")' in output
    assert "Traceback" in ended["raises"].output
    assert 'raise ValueError("no such luck")' in ended["raises"].output
    assert "RETURNED kind=unwilling JobError" in output
    assert "exit code 3" in output


def test_afterok_works_for_success_and_not_for_failure(sweeps, ended):
    """With submitit's plugin a failed job is COMPLETED, so a dependent job would start."""
    good, raises = sweeps.after["good"], sweeps.after["raises"]
    show = sweeps.cluster.show
    never = "DependencyNeverSatisfied"
    wait_for(lambda: show(good)["JobState"] == "COMPLETED", "the job after success")
    wait_for(lambda: show(raises)["Reason"] == never, "Slurm's verdict on the other")
    assert show(good)["ExitCode"] == "0:0"
    assert show(raises)["JobState"] == "PENDING"
    assert show(raises)["StartTime"] == "Unknown"


def test_the_failure_of_any_rank_counts(sweeps, ended):
    """The job has failed although rank 0 has returned."""
    assert state_of(ended["ranks"]) == ("FAILED", "1:0")
    assert "RuntimeError: rank 1 alone" in ended["ranks"].state["because"]
    assert "rank 1 alone" in sweeps.exiting.output


def test_a_job_that_no_node_is_left_for_fails(sweeps, ended):
    """Slurm would leave the job pending forever, or start it on the failed node again."""
    assert state_of(ended["nowhere"]) == ("FAILED", "69:0")
    nodes = (sweeps.exits.gates / "nowhere ran on").read_text().split()
    assert sorted(nodes) == ["n1", "n2"]
    assert (ended["nowhere"].restarts, ended["nowhere"].counts["excluded"]) == (1, 1)
    assert "too few nodes are left for it without n1, n2." in sweeps.exiting.output


# -- the time limit --------------------------------------------------------------------------------


@pytest.fixture
def limited(sweeps, request) -> SlurmJob:
    assert sweeps.limited.wait(timeout_s=280) == 0, sweeps.limited.output
    return sweeps.limits.jobs()[request.param]


@pytest.mark.parametrize("limited", ["limit"], indirect=True)
def test_an_announced_time_limit(limited, undisturbed):
    """Saved at the signal; Slurm sends it early enough to come before the loop, too."""
    assert_same_job(limited, undisturbed)
    assert_only_limits(limited)
    assert all(again <= 1 for again in limited.repeated)


@pytest.mark.parametrize("limited", ["deaf"], indirect=True)
def test_the_time_limit_itself(limited, undisturbed):
    """The job has no deadline, so Slurm ends the task at the limit, and not the supervisor."""
    assert_same_job(limited, undisturbed)
    assert_only_limits(limited)
    assert any(10 <= start <= HOLD for start in limited.starts[1:])
    assert "time_limit" in [one.get("answer") for one in limited.told]


@pytest.mark.proofs
def test_deadlines_and_late_starts_at_the_time_limit(cluster, tmp_path, undisturbed):
    """The supervisor ends a task that hears no signal. A start that needs more time than the job
    has is no lack of progress: Slurm sends the signal up to a minute early.
    """
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app")) as app:
        sweep = start_limited(app, "held", "late")
        assert sweep.wait(timeout_s=280) == 0, sweep.output
        jobs = app.jobs()
        for job in jobs.values():
            assert_same_job(job, undisturbed)
            assert_only_limits(job)
    assert any(10 <= start <= HOLD for start in jobs["held"].starts[1:])
    first = next(one for one in jobs["late"].told if one["kind"] == "why")
    assert first["left_s"] < 16  # its lead is 14 s


def assert_only_limits(job):
    """Once at least; a machine under load may see the limit of the next start as well."""
    assert job.restarts >= 1
    assert reasons(job) == [*["time_limit"] * job.restarts, "finished"], job.told
    assert job.counts["timeouts"] == job.restarts
