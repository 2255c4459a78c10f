"""Jobs of 2 nodes with 2 tasks each on a true Slurm, with what a cluster does to them.

All run at once, each with four ranks that train with DDP. The time limit is of two minutes, since
Slurm may announce it up to one too early.
"""

import os
import signal

import pytest
from cluster import submit, wait_for
from harness import made_once
from ranked_apps import TRAIN, RankedApp, RankedSwept, assert_same_ranks
from slurm_apps import SlurmApp, SlurmJob, table
from sweeps import CONF

from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

HOLD = 15
SIZE = 4
KINDS = ("preempted", "killed", "srun", "cancelled", "limit", "plain")
MORE = """
    kind: plain
    gates: ???
    partitions: {}
    minutes: {}
"""
SLURM = """
      signal: {warning_s: 14}
      health: {enabled: false}
      slurm:
        partition: ${oc.select:partitions.${kind},urgent}
        timeout_min: ${oc.select:minutes.${kind},10}
        nodes: 2
        tasks_per_node: 2
"""


class RankedStep(SlurmJob, RankedSwept):
    """One of these jobs."""


class RankedSlurmApp(SlurmApp):
    """The folder, and the sweep."""

    def __init__(self, cluster, folder):
        conf = (
            CONF.rstrip()
            .replace("timeout_s: 20", "timeout_s: 12")
            .replace("\n    resilience:", f"{MORE.rstrip()}\n    resilience:")
        )
        super().__init__(cluster, folder, TRAIN, conf + SLURM)

    def jobs(self):
        return {
            kind: RankedStep(self.cluster, one.directory) for kind, one in super().jobs().items()
        }


@pytest.fixture(scope="module")
def undisturbed(shared_folder):
    def make(folder):
        RankedApp(folder / "app", SIZE).finish("lr=0.1")

    folder = made_once(shared_folder / "undisturbed_four_ranks", make)
    return RankedSwept(folder / "app/sweep/0")


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """The jobs by kind, once all that can end has ended."""
    app = RankedSlurmApp(cluster, tmp_path_factory.mktemp("ranks") / "app")
    for number, kind in enumerate(KINDS):
        if kind != "plain":
            app.hold(number, HOLD)
    sweep = app.start(
        f"kind={','.join(KINDS)}",
        f"++partitions={table(preempted='low')}",
        f"++minutes={table(limit=2)}",
    )
    app.wait_for_jobs(sweep, len(KINDS))
    jobs = app.jobs()
    held = {kind: jobs[kind].held(0, SIZE) for kind in KINDS if kind != "plain"}
    os.kill(held["killed"][3], signal.SIGKILL)
    assert processes.send(jobs["srun"].srun, signal.SIGKILL)
    jobs["cancelled"].scancel()
    cpus = int(cluster.show(jobs["preempted"].slurm_id)["NumCPUs"])
    assert cpus == SIZE
    free = max(os.cpu_count() or 1, 16) - 2 * (len(KINDS) - 1)
    options = ("--partition=urgent", "--nodelist=n2", "--ntasks=1", f"--cpus-per-task={free}")
    submit(cluster, app.folder, "sleep 0.1", *options)
    for number, kind in enumerate(KINDS):
        if kind != "limit":  # which holds until the limit is announced
            (app.folder / f"hold {number}").unlink(missing_ok=True)
    code = sweep.wait()
    yield jobs, code, sweep.output
    app.close()


@pytest.fixture
def job(ended, request):
    jobs, code, output = ended
    assert code == 1, output  # one was cancelled
    return jobs[request.param]


def of(*kinds):
    return pytest.mark.parametrize("job", kinds, indirect=True)


def reasons(job):
    return [one["reason"] for one in job.told if one["kind"] == "end"]


@of("plain", "preempted", "killed", "srun", "limit")
def test_it_ends_with_the_bits_of_an_undisturbed_job(job, undisturbed):
    """Which was started here, by the local launcher: the same four ranks."""
    assert_same_ranks(job, undisturbed, SIZE)
    assert job.shown["JobState"] == "COMPLETED"


@of("preempted")
def test_a_preempted_job_of_two_nodes_saves_and_comes_back_once(job):
    assert job.restarts == 1
    assert job.repeated == [0]
    assert reasons(job) == ["preempted", "finished"]
    assert (job.counts["preemptions"], job.counts["failures"]) == (1, 0)


@of("limit")
def test_the_time_limit_stops_all_ranks_after_one_step(job):
    assert job.repeated == [0]
    assert reasons(job) == ["time_limit", "finished"]
    assert job.counts["timeouts"] == 1


@of("killed")
def test_a_killed_rank_costs_one_restart_on_the_same_nodes(job):
    """Whatever its three peers end with, in their broken collective."""
    assert job.restarts == 0
    assert reasons(job) == ["crashed", "finished"]
    assert (job.counts["failures"], job.counts["restarts"]) == (1, 1)


@of("srun")
def test_a_killed_srun_costs_one_restart(job):
    assert job.attempts == 2
    assert (job.counts["failures"], job.counts["restarts"]) == (1, 1)


@of("cancelled")
def test_a_cancelled_job_stays_cancelled(job):
    wait_for(lambda: job.shown["JobState"] == "CANCELLED", "end of the job")
    assert job.restarts == 0
    assert not (job.directory / "weights_0.pt").exists()


@of("plain")
def test_each_rank_has_its_log_and_one_of_them_hydras_files(job):
    names = {path.name for path in job.directory.iterdir()}
    assert {"output.log", *(f"output.log.{rank}" for rank in range(1, SIZE))} <= names
    assert "Training finished at step 40" in job.output


def test_nothing_is_left_of_any_job(ended):
    for job in ended[0].values():
        assert job.is_free(), job.directory
