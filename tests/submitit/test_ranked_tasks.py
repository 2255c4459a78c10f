"""`forge.Checkpointable` as several tasks of one job, under submitit's own LocalExecutor."""

import subprocess
from functools import partial

import pytest
import submitit
import submitted_ranks
import warm
from light import POLICY, noted
from submitit.core.utils import FailedJobError

import forge
from forge.jobdir.job_files import STATE, forge_dir, read_json

pytestmark = pytest.mark.slow

STRIKES = ("", "SIGUSR2", "SIGKILL", "raises")


class Job:
    def __init__(self, folder, strike):
        self.notes = folder
        executor = submitit.LocalExecutor(folder / "log")
        executor.update_parameters(timeout_min=4, tasks_per_node=2)
        one = forge.Checkpointable(submitted_ranks.train, POLICY)
        self.job = executor.submit(one, folder, strike)

    def noted(self, rank, what):
        return noted(self.notes / str(rank), what)

    @property
    def state(self):
        (found,) = self.job.paths.folder.glob(f"{self.job.job_id}_forge_*")
        return read_json(forge_dir(found) / STATE)


@pytest.fixture(scope="module")
def jobs(own_environment, tmp_path_factory):
    """All of them at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", partial(warm.Popen, is_parent=True))
        folder = tmp_path_factory.mktemp("ranks")
        found = {strike: Job(folder / (strike or "none"), strike) for strike in STRIKES}
        yield found
        for one in found.values():
            one.job._process.terminate()  # only where a test has failed is there anything left
            one.job._process.wait()


def test_each_task_is_a_rank_and_returns_its_own(jobs):
    (first, digest), second = jobs[""].job.results()
    assert (first, second) == (0, (1, digest))


@pytest.mark.parametrize(("strike", "budget"), [("SIGUSR2", "timeouts"), ("SIGKILL", "failures")])
def test_a_signal_at_one_rank_requeues_the_job_once(jobs, strike, budget):
    """Stopped after the same step, or gone on from the last checkpoint: the same bits."""
    one = jobs[strike]
    assert one.job.results() == jobs[""].job.results()
    # A signal at rank 1 stops all two steps later; a kill goes back to the save every 4 steps.
    came_back = {"SIGUSR2": {"step_10", "step_9", "step_8"}, "SIGKILL": {"step_8", "step_4"}}
    assert one.noted(0, "resumed") == one.noted(1, "resumed")
    first, second = one.noted(0, "resumed")
    assert first == "None"
    assert second in came_back[strike]
    assert (one.state["state"], one.state["counts"][budget]) == ("finished", 1)
    assert one.state["counts"]["restarts"] == 1


def test_what_one_rank_raises_fails_the_job(jobs):
    """It would raise it again."""
    one = jobs["raises"]
    with pytest.raises(FailedJobError):
        one.job.results()
    assert one.state["state"] == "failed"
    assert "rank 1 raised an error: see its log" in one.state["because"]
    assert len(one.noted(0, "starts")) == 1
    with pytest.raises(FailedJobError, match="ValueError: no such luck"):
        one.job.task(1).result()
