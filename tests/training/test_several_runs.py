"""Several trainings in one script (folds, seeds, stages): each has its own, or it is an error."""

import threading

import pytest
import torch
from forked import ForkedJob
from harness import assert_same_bits

import forge
from forge.jobdir import config_file, ledger
from forge.jobdir.ledger_writer import Ledger


def folds(directory, **spec):
    return ForkedJob(directory, "folds.py", **spec)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Three folds that nobody interrupted."""
    job = folds(tmp_path_factory.mktemp("folds"))
    job.run_to_end()
    return job


def test_a_second_run_on_what_this_process_has_finished_is_an_error(tmp_path):
    """It would resume from the end of fold 0, train nothing, and score fold 0's weights."""
    job = folds(tmp_path, by="nothing")
    assert job.run() == 78
    assert not (tmp_path / "weights.pt").exists()
    said = job.output.replace("\n", " ")
    assert f"this process has already finished a training in {tmp_path / 'checkpoints'}" in said
    assert 'name="fold2"' in said


@pytest.mark.parametrize(
    ("fold", "step", "name", "code"),
    [(1, 5, "KILL", -9), (1, 5, "TERM", 143), (0, "end", "TERM", 143)],
)
def test_a_script_that_is_ended_in_a_fold_resumes_there(
    fold, step, name, code, tmp_path, undisturbed
):
    """The bits of every fold, of what follows each, and their metrics are those of one sitting."""
    job = folds(tmp_path, kill_at={"1": [fold, step, name]})
    job.run_to_end(code)
    assert_same_bits(job.weights, undisturbed.weights)
    assert job.history.runs == undisturbed.history.runs
    assert list(job.history.runs) == ["fold0", "fold1", "fold2"]
    assert all(set(run) == set(range(9)) for run in job.history.runs.values())
    assert job.output.count("fold0 already finished at step 8") == 1


def test_each_run_knows_the_step_it_had_come_to(tmp_path):
    """What a kill has cost is said by the Run that it hit."""
    job = folds(tmp_path, folds=2, kill_at={"1": [1, 5, "KILL"]})
    job.run_to_end(-9)
    starts = [e for a in job.history.attempts for e in a.events if e["kind"] == "start"]
    assert [(e["step"], e["previous_step"]) for e in starts] == [
        (0, None),
        (0, None),
        (8, 8),
        (3, 5),
    ]
    assert ledger.read_progress(job.checkpoints).step == 8


def test_the_metrics_of_several_runs_are_not_mixed(tmp_path):
    """Asked for those of the job, the ledger says that there are several."""
    job = folds(tmp_path, folds=2, steps=2)
    job.run_to_end()
    with pytest.raises(forge.ForgeError, match="several Runs: fold0, fold1"):
        _ = job.history.metrics


@pytest.mark.parametrize(
    "name", ["", ".forge", "a/b", "..", "step_12", "latest", "a b", "x" * 101, "ä", 3]
)
def test_a_name_that_is_no_name_of_a_directory_is_refused(name, caplog):
    """It becomes one; and an object under that keyword would never be saved."""
    with pytest.raises(forge.Exit) as exit:
        forge.Run(name=name)
    assert exit.value.code == 78
    assert "`name=` is" in caplog.text


@pytest.mark.parametrize(
    "name", ["fold1", "lr=1e-3,wd=0.1", "2", "a.b-c_d+e@f", "step_", "x" * 100]
)
def test_a_name_of_a_directory_is_taken(name, tmp_path):
    """Checkpoints lie below it."""
    model = torch.nn.Linear(1, 1)
    with forge.Run({"checkpoint": {"dir": str(tmp_path)}}, name=name, model=model) as run:
        list(run.steps(1))
    assert (tmp_path / name / "step_1").is_dir()


def policy(directory):
    return {"checkpoint": {"dir": str(directory), "every_steps": 1, "every_s": None}}


def test_a_run_inside_another_is_refused_and_the_outer_one_goes_on(tmp_path):
    """It took the outer one's signals: a SIGTERM then ended the process with nothing saved."""
    job = folds(tmp_path, folds=1, by="dir", nests=True, kill_at={"1": [0, 5, "TERM"]})
    job.run_to_end(143)
    assert job.output.count("refused with 78") == 1
    assert "stopped by SIGTERM at step 6" in job.output
    assert "one after the other, each with a name" in job.output
    assert not (tmp_path / "inner").exists()


def test_a_run_in_a_thread_is_one_clear_error(tmp_path):
    """Under Hydra the handlers stand already, and to change them fails in the middle."""
    found = []

    def enter():
        try:
            with forge.Run(policy(tmp_path / "job"), model=torch.nn.Linear(1, 1)):
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is
            found.append(error)

    callback = forge.on_stop(lambda: None)
    try:
        thread = threading.Thread(target=enter, name="trainer")
        thread.start()
        thread.join()
    finally:
        forge.shutdown.stopping.remove_callback(callback)
        forge.shutdown.stopping.uninstall()
    (error,) = found
    assert type(error) is forge.ForgeError
    assert "entered in the thread 'trainer'" in str(error)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("enabled", [True, False])
def test_epochs_count_in_a_plain_loop_too(enabled, tmp_path):
    """A loop that breaks on them would never end."""
    seen = []
    with forge.Run({"enabled": enabled} | policy(tmp_path), model=torch.nn.Linear(1, 1)) as run:
        for _ in run.steps(100, [1, 2, 3]):
            seen.append(run.epoch)
            if run.epoch == 2:
                break
    assert seen == [0, 0, 0, 1, 1, 1, 2]


def test_a_job_with_named_runs_can_be_shown(tmp_path):
    """One of several has to be named; the only one is found."""
    content = {"resilience": {"checkpoint": {"dir": "saves"}}}
    config_file.write(tmp_path / ".forge/config.yaml", content)
    for name in ("fold0", "fold1"):
        model = torch.nn.Linear(1, 1)
        with forge.Run(policy(tmp_path / "saves"), name=name, model=model) as run:
            list(run.steps(1))
        if name == "fold0":
            assert forge.load(tmp_path).path == tmp_path / "saves/fold0/step_1"
    with pytest.raises(forge.CheckpointError, match="saves/fold0, saves/fold1"):
        forge.load(tmp_path)


def test_how_far_a_job_has_come_is_what_all_its_runs_have_saved(tmp_path):
    """Wherever they save: a job that trains on in its second fold is not one without progress."""
    job = tmp_path / "job"
    far = tmp_path / "elsewhere"
    assert ledger.saved_steps(job, "checkpoints") == -1
    for directory in (job / "checkpoints", job / "checkpoints/fold1", far):
        Ledger(job, directory).close()
    for directory, step, wanted in (
        (job / "checkpoints/fold1", 0, 0),
        (job / "checkpoints/fold1", 8, 8),
        (far, 3, 12),
        (job / "checkpoints", 2, 15),
        (job / "never told of", 99, 15),
    ):
        (directory / f"step_{step}").mkdir(parents=True)
        assert ledger.saved_steps(job, "./checkpoints") == wanted
