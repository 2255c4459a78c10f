"""Whole jobs, stopped and started again, end with the bits of a job that nobody stopped."""

import importlib.util
import itertools

import pytest
from harness import Job, assert_same_run
from nan_trainer import outliving
from rows import few

import forge
from forge.jobdir import ledger

CODES = {"TERM": 143, "USR1": 75, "USR2": 75, "INT": 130, "KILL": -9}

LOADERS = {
    "plain": {},
    "workers that draw": {"workers": 2, "augment": "random"},
    "seeded": {"augment": "seeded"},
    "stateful": {"loader": "stateful"},
    "persistent": {"loader": "persistent", "workers": 2},
    "generator": {"loader": "generator"},
    "sampler": {"loader": "sampler"},
    "replacement": {"loader": "replacement"},
    "list": {"loader": "list"},
    "own": {"loader": "own"},
    "none": {"loader": "none"},
}
"""Epochs have 10 steps (8 with replacement, 9 of the own loader)."""
COMBINED = {
    "one worker that draws": {"workers": 1, "augment": "random"},
    "seeded workers": {"workers": 2, "augment": "seeded"},
    "stateful, drawing": {"loader": "stateful", "augment": "random"},
    "stateful workers": {"loader": "stateful", "workers": 2},
    "persistent seeded": {"loader": "persistent", "workers": 2, "augment": "seeded"},
    "plain, drawing": {"augment": "random"},
    "stateful seeded workers": {"loader": "stateful", "workers": 2, "augment": "seeded"},
    "generator, workers that draw": {"loader": "generator", "workers": 2, "augment": "random"},
    "sampler, workers": {"loader": "sampler", "workers": 2, "augment": "seeded"},
    "replacement, seeded workers": {"loader": "replacement", "workers": 2, "augment": "seeded"},
}
"""Other combinations of the same."""
LOADERS |= COMBINED


class CalledJob(Job):
    """A `Job` whose attempts are calls of its main, in this process; the signals are true.

    A loader and each way to stop is a process of its own once; compared is always with one.
    """

    def run(self, **env: str) -> int:
        source = importlib.util.spec_from_file_location("small", self.script)
        module = importlib.util.module_from_spec(source)
        source.loader.exec_module(module)
        with outliving():
            try:
                module.main(self.directory, self.spec)
            except forge.Exit as error:
                return int(error.code)
        return 0

    @property
    def output(self) -> str:
        return "(in this process)"


@pytest.mark.parametrize("loader", few(len(LOADERS) - len(COMBINED), [*LOADERS]))
def test_a_stop_in_the_second_epoch_changes_no_bit(loader, tmp_path, make_job, undisturbed):
    """The product's one promise, for each kind of loader."""
    spec = {"steps": 26} | LOADERS[loader]
    # torchdata's loader begins with a warning, which is an error in this process.
    is_process = loader == "plain" or "workers" in spec or spec.get("loader") == "stateful"
    kind = make_job if is_process else CalledJob
    job = kind(tmp_path / "job", kill_at={"13": "TERM"}, **spec)
    job.run_to_end(143)
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.slow
def test_spawned_workers_draw_as_forked_ones_before_and_after_a_stop(
    tmp_path, make_job, undisturbed
):
    """How a worker is started must make no difference; each is a fresh Python, as users have it."""
    spec = {"steps": 8, "workers": 1, "augment": "random"}
    job = make_job(tmp_path / "job", start="spawn", kill_at={"5": "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize("step", few(4, [0, 9, 10, 25, 19, 8, 18, 20]))
def test_a_stop_at_any_place_of_an_epoch_changes_no_bit(step, tmp_path, undisturbed):
    """The first and the last step, and those around an epoch's end, are where counts go wrong."""
    spec = {"steps": 26}
    job = CalledJob(tmp_path / "job", kill_at={str(step): "TERM"}, **spec)
    job.run_to_end(143)
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize(
    ("loader", "step"),
    few(
        2,
        [
            *(("stateful workers", 9), ("own", 19)),
            *itertools.product(["persistent seeded", "sampler"], [9, 19]),
        ],
    ),
)
def test_a_stop_at_an_epochs_end_changes_no_bit(loader, step, tmp_path, make_job, undisturbed):
    """All batches are taken, but the iterator has not said so yet."""
    spec = {"steps": 26} | LOADERS[loader]
    kind = make_job if "workers" in spec else CalledJob
    job = kind(tmp_path / "job", kill_at={str(step): "USR1"}, **spec)
    job.run_to_end(75)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize(
    "kind",
    few(1, ["plain, drawing", "workers that draw", "stateful", "sampler"]),
)
def test_three_stops_and_a_kill_change_no_bit(kind, tmp_path, make_job, undisturbed):
    """What a resume gets wrong by a little, several resumes get wrong by much."""
    spec = {"steps": 26, "policy": {"checkpoint": {"every_steps": 4}}} | LOADERS[kind]
    reference = undisturbed(**spec)
    job = make_job(tmp_path / "job", **spec)
    for signal, step in [("TERM", 3), ("KILL", 9), ("USR2", 13), ("INT", 21)]:
        job.spec["kill_in_attempt"] = {str(step): signal}
        assert job.run() == CODES[signal], job.output
    del job.spec["kill_in_attempt"]
    job.run_to_end()
    # The kill in step 9 costs the step after the save at 8, and the step that it hit.
    assert job.steps_repeated == [0, 1, 0, 0]
    assert_same_run(job, reference)


VARIANTS = {
    "accumulating": {"accumulate": 4},
    "scaler, accumulating": {"scaler": True, "accumulate": 2},
    "guard": {"guard": True},
    "NaN": {"bad_steps": [4, 12, 13, 14, 20]},
    "async": {"policy": {"checkpoint": {"async_save": True, "every_steps": 3}}},
    "scaler": {"scaler": True},
    "saves often": {"policy": {"checkpoint": {"every_steps": 1, "keep_last": 1}}},
}


@pytest.mark.parametrize(
    ("variant", "step"),
    few(
        5,
        [
            (variant, (12, 14)[(number + more) % 2])
            for more in (0, 1)
            for number, variant in enumerate(VARIANTS)
        ],
    ),
)
def test_all_that_an_update_depends_on_is_kept(variant, step, tmp_path, undisturbed):
    """Gradients that are being accumulated, the loss scale, a streak of NaNs."""
    spec = {"steps": 26} | VARIANTS[variant]
    job = CalledJob(tmp_path / "job", kill_at={str(step): "TERM"}, **spec)
    job.run_to_end(143)
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize("variant", few(1, ["async", "saves often"]))
def test_a_kill_changes_no_bit(variant, tmp_path, make_job, undisturbed):
    """Whatever was saved last is a whole step."""
    spec = {"steps": 26} | VARIANTS[variant]
    job = make_job(tmp_path / "job", kill_at={"14": "KILL"}, **spec)
    job.run_to_end(-9)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize(
    "extra",
    few(
        3,
        [
            *({"accumulate": 3}, {"by_hand": True}, {"swaps": True}),
            *({}, {"guard": True}, {"scaler": True}),
        ],
    ),
    ids=["accumulating", "by hand", "swaps", "plain", "guard", "scaler"],
)
def test_a_stop_inside_an_evaluation_changes_no_bit(extra, tmp_path, undisturbed):
    """The signal comes just before it."""
    spec = {"steps": 26, "evaluate_every": 7} | extra
    job = CalledJob(tmp_path / "job", kill_at={"13": "TERM"}, **spec)
    job.run_to_end(143)
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**spec))


def test_a_finished_job_started_again_trains_nothing(tmp_path, make_job, undisturbed):
    """A requeue that comes too late must not go on training."""
    job = make_job(tmp_path / "job", steps=26)
    job.run_to_end()
    first = (job.checkpoints / "latest").resolve().name
    assert job.run() == 0
    assert (job.checkpoints / "latest").resolve().name == first == "step_26"
    kinds = [e["kind"] for e in job.history.attempts[1].events]
    assert [one for one in kinds if one != "health"] == ["run", "start", "finish"]
    assert_same_run(job, undisturbed(steps=26))


@pytest.mark.proofs
def test_fresh_processes_agree_with_forked_ones(tmp_path, undisturbed):
    """The other tests fork their jobs; this one starts Python for each attempt, as users do."""
    spec = {"steps": 26, "workers": 2, "augment": "random"}
    job = Job(tmp_path / "job", kill_at={"13": "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))
    assert ledger.read_progress(job.checkpoints)[:2] == (2, 26)


@pytest.mark.parametrize("loader", ["persistent", "stateful workers"])
def test_what_is_not_exact_is_named_at_start(loader, undisturbed):
    """People learn it before they rely on it."""
    job = undisturbed(steps=26, **LOADERS[loader])
    assert "Not known to resume exactly" in job.output
    assert "forge.data.seeded" in job.output


@pytest.mark.parametrize("loader", ["plain", "workers that draw", "list", "sampler", "seeded"])
def test_what_is_exact_is_not_accused(loader, undisturbed):
    """A warning that is always there is read by nobody."""
    job = undisturbed(steps=26, **LOADERS[loader])
    assert "Training finished" in job.output
    assert "Not known to resume exactly" not in job.output
