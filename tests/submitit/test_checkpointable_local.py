"""`forge.Checkpointable` under submitit's own LocalExecutor; its processes are true ones."""

import os
import pickle
import signal
import subprocess
from functools import partial

import light
import pytest
import submitit
import submitted
import warm
from cluster import wait_for
from light import HASTY, POLICY, noted
from submitit.core.utils import FailedJobError

import forge
from forge.jobdir.job_files import STATE, forge_dir, read_json

pytestmark = pytest.mark.slow

OFTEN = {"checkpoint": {"every_steps": 4}}


class Submitted:
    """A job, and the folder in which it notes what it does."""

    def __init__(self, folder, task, *arguments, policy=None, **options):
        self.notes = folder / "notes"
        executor = submitit.LocalExecutor(folder / "log")
        executor.update_parameters(timeout_min=4, signal_delay_s=1)
        one = forge.Checkpointable(task, POLICY | (policy or {}))
        self.job = executor.submit(one, self.notes, *arguments, **options)
        self.result = self.job.result

    def noted(self, what):
        return noted(self.notes, what)

    def signal(self, number, count=1):
        """To the process that waits in its task, once it does for the `count`th time."""
        wait_for(lambda: len(self.noted("waits")) >= count, "task that waits", 120)
        os.kill(int(self.noted("waits")[count - 1]), number)

    @property
    def directory(self):
        (found,) = self.job.paths.folder.glob(f"{self.job.job_id}_forge_*")
        return found


JOBS = {
    "good": ((light.value, 20), {"summand": 2}),
    "bad": ((light.fail,), {}),
    "leaves": ((light.leave, 128), {}),
    "without a run": (
        (light.wait_without_a_run,),
        {"policy": HASTY | {"requeue": {"max_no_progress": 2}}},
    ),
    "limited": ((submitted.train,), {"how": "boundary"}),
    "over": ((submitted.train,), {"how": "boundary", "policy": {"requeue": {"max_timeouts": 0}}}),
    "stopped": ((submitted.train,), {"how": "boundary"}),
    "in C": ((submitted.train, HASTY | OFTEN), {"how": "in C", "policy": HASTY | OFTEN}),
    "by hand": ((submitted.train_by_hand,), {"policy": HASTY}),
}


@pytest.fixture(scope="module")
def forked(own_environment):
    """What submitit starts, and what that starts, is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", partial(warm.Popen, is_parent=True))
        yield


@pytest.fixture(scope="module")
def jobs(forked, tmp_path_factory):
    """All of them at once: they start while others wait."""
    folder = tmp_path_factory.mktemp("jobs")
    found = {
        name: Submitted(folder / name, *arguments, **options)
        for name, (arguments, options) in JOBS.items()
    }
    yield found
    for one in found.values():
        one.job._process.terminate()  # only where a test has failed is there anything left
        one.job._process.wait()


def test_a_task_s_value_and_its_error_are_the_job_s(jobs):
    """As in plain submitit."""
    assert jobs["good"].result() == 42
    with pytest.raises(FailedJobError, match="ValueError: no such luck"):
        jobs["bad"].result()
    assert len(jobs["bad"].noted("starts")) == 1


def test_a_code_that_is_128_and_no_signal_is_the_task_s_own(jobs):
    """Nobody has stopped it: taken for a stop, Slurm would run it again as at a time limit."""
    with pytest.raises(FailedJobError, match=r"sys\.exit\(128\); not started again: exit code"):
        jobs["leaves"].result()


def test_a_loop_without_boundaries_fails_at_the_deadline(jobs):
    """There is no checkpoint, so another start would do the same again."""
    one = jobs["by hand"]
    one.signal(signal.SIGUSR2)
    with pytest.raises(FailedJobError, match="has no checkpoint to resume from"):
        one.result()
    assert len(one.noted("starts")) == 1


def test_requeuing_checkpointable(jobs, undisturbed):
    """The signal of the time limit: saved at the boundary, and the same bits at the end."""
    one = jobs["limited"]
    one.signal(signal.SIGUSR2)
    assert one.result() == undisturbed[submitted.train]
    assert one.noted("resumed") == ["None", "step_6"]
    state = read_json(forge_dir(one.directory) / STATE)
    assert (state["state"], state["counts"]["timeouts"]) == ("finished", 1)


def test_requeuing_not_checkpointable(jobs):
    """A task that saves nothing begins anew each time, but not forever."""
    for count in (1, 2):
        jobs["without a run"].signal(signal.SIGUSR1, count)
    with pytest.raises(FailedJobError, match="2 attempts in a row saved nothing new"):
        jobs["without a run"].result()


def test_a_task_that_is_lost_in_c_is_requeued_from_its_last_checkpoint(jobs, undisturbed):
    """Nothing can be saved then; nothing is lost but what no checkpoint holds."""
    one = jobs["in C"]
    one.signal(signal.SIGUSR2)
    assert one.result() == undisturbed[submitted.train]
    assert one.noted("resumed") == ["None", "step_4"]
    assert "in wait_here" in one.job.stderr()  # the stacks of all threads


def test_a_budget_that_is_used_up_and_a_stop_by_hand_are_told(jobs):
    """Both save; neither comes back; `result()` says why."""
    over, stopped = jobs["over"], jobs["stopped"]
    over.signal(signal.SIGUSR2)
    stopped.signal(signal.SIGTERM)
    with pytest.raises(FailedJobError, match=r"requeue\.max_timeouts=0"):
        over.result()
    with pytest.raises(FailedJobError, match="SIGTERM; not started again"):
        stopped.result()
    for one in (over, stopped):
        assert (one.directory / "checkpoints" / "step_6").is_dir()


def test_a_bad_policy_is_refused_before_anything_is_submitted():
    """Not hours later, in the queue."""
    with pytest.raises(forge.ConfigError, match=r"nan\.action"):
        forge.Checkpointable(light.value, {"nan": {"action": "explode"}})


def test_a_task_that_waits_runs_with_the_policy_of_an_earlier_version(caplog):
    """Keys that exist no longer are ignored, as in the files of a launcher's job."""
    one = forge.Checkpointable(light.value, {"requeue": {"max_failures": 2}})
    state = one.__getstate__()
    state["policy"]["hang"]["factor"] = 7.0
    later = forge.Checkpointable.__new__(forge.Checkpointable)
    later.__setstate__(pickle.loads(pickle.dumps(state)))
    assert later.policy == one.policy
    assert "`resilience.hang.factor`" in caplog.text


def test_outside_submitit_the_task_is_just_called(tmp_path):
    """For a debugger; and it can be pickled like any other."""
    one = pickle.loads(pickle.dumps(forge.Checkpointable(light.value)))
    assert one(tmp_path, 1, summand=1) == 3
    assert one.checkpoint(tmp_path, 1, summand=1).result() == 3


class Noted(forge.Checkpointable):
    """A user's own, which does something more."""

    def checkpoint(self, *args, **kwargs):
        self.is_noted = True
        return super().checkpoint(*args, **kwargs)


def test_it_has_the_name_for_which_submitit_looks_first(tmp_path):
    """A wrapper around a task can pass on that name alone; one that is overridden counts."""
    one = Noted(light.value)
    assert one.__submitit_checkpoint__(tmp_path, 1, summand=1).result() == 3
    assert one.is_noted


HANDED_OVER = {"held": "step_6", 7: "step_7", "step": "step_4"}
"""Where the signal comes -> the checkpoint with which the next start begins."""


def test_submitit_s_own_handler_resubmits_a_run_from_what_checkpoint_has_saved(forked, tmp_path):
    """In an evaluation that has swapped the weights, between two loops, and inside a step."""
    executor = submitit.LocalExecutor(tmp_path / "log")
    executor.update_parameters(timeout_min=4)
    places = [*HANDED_OVER, "never"]
    jobs = {
        place: executor.submit(submitted.UnderSubmitit(), tmp_path / str(place), place)
        for place in places
    }
    expected = jobs["never"].result()
    for place, checkpoint in HANDED_OVER.items():
        assert jobs[place].result() == expected, place
        assert noted(tmp_path / str(place), "resumed") == ["None", checkpoint]
        said = f"saves: the newest checkpoint is {checkpoint}"
        assert said in jobs[place].stderr()
