"""A loop that is begun again after an error: exact at a resume, or refused there."""

import itertools

import pytest
from harness import assert_same_run
from nan_trainer import outliving
from rows import each_value

import forge
from forge.checkpoint.format import manifest
from forge.jobdir import process_id

SPEC = {"script": "loops.py", "policy": {"checkpoint": {"every_steps": 4}}}
CODES = {"TERM": 143, "KILL": -9}


@pytest.mark.parametrize("name", CODES)
def test_a_job_that_has_not_come_to_its_loop_is_not_finished(name, tmp_path, make_job):
    """The resumed job meets no error, so it never begins the second loop; step 13 is no end."""
    job = make_job(tmp_path / "job", loop="begins_again", kill_at={"step 13": name}, **SPEC)
    assert job.run() == CODES[name]
    newest = (job.checkpoints / "latest").resolve()
    for _ in range(2):
        assert job.run() == 78
        assert not (job.directory / "weights.pt").exists()
        assert not manifest.read(newest).is_complete
        assert (job.checkpoints / "latest").resolve() == newest
    said = " ".join(job.output.split())
    assert "saved in loop 2 of this Run (run.steps(20))" in said
    assert "left the `with` block after loop 1" in said
    assert "run.state" in said


@pytest.mark.parametrize(
    ("loop", "place", "name"),
    each_value(
        ["halves_a_batch", "keeps_its_batch_size", "two_phases", "evaluation_fails"],
        ["step 5", "step 6", "step 7", "step 13"],
        list(CODES),
    ),
)
def test_two_ways_to_try_again_and_two_phases_resume(
    loop, place, name, tmp_path, make_job, undisturbed
):
    """In the step, or with what changes in `run.state`; a break or an error ends a first loop."""
    job = make_job(tmp_path / "job", loop=loop, kill_at={place: name}, **SPEC)
    job.run_to_end(CODES[name])
    assert_same_run(job, undisturbed(loop=loop, **SPEC))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in loops that are each left at a step; each call counts as a process of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def attempt(*loops):
        seen = []
        with forge.Run({"checkpoint": {"dir": str(tmp_path / "job"), "every_steps": 1}}) as run:
            for n, left_at in loops:
                for step in run.steps(n):
                    seen.append(step)
                    if step == left_at:
                        break
                    if step == 9:
                        raise KeyError("as a kill would")
        return seen

    with outliving():
        yield attempt


@pytest.mark.parametrize("loops", [[], [(20, None)]])
def test_a_with_block_that_leaves_out_the_saved_loop_saves_nothing(loops, train, tmp_path):
    """One without any loop as well: it marked a job that was stopped in the middle as finished."""
    first = [(20, 4), (20, None)]
    with pytest.raises(KeyError):
        train(*first)
    with pytest.raises(forge.Exit) as exit:
        train(*loops)
    assert exit.value.code == 78
    assert "before its first loop" in exit.value.text or loops
    newest = (tmp_path / "job/latest").resolve()
    assert (newest.name, manifest.read(newest).is_complete) == ("step_9", False)


def test_a_finished_job_may_be_entered_with_fewer_loops_but_not_made_longer(train):
    """An evaluation enters it; with more steps the loop that trains them has to come."""
    first = [(9, 4), (9, None)]
    assert len(train(*first)) == 10
    assert train() == train((9, 4)) == train(*first) == []
    with pytest.raises(forge.Exit) as exit:
        train((20, 4))
    assert exit.value.code == 78
