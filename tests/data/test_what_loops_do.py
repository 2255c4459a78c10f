"""What people's loops do around their steps: each is stopped once, and ends with the same bits."""

import pytest
import torch
from harness import assert_same_run
from rows import each_value, few

import forge


@pytest.mark.parametrize(
    "place",
    few(2, ["between", "step 8", "step 7", "step 13"]),
)
def test_an_evaluation_between_two_loops(place, stop_and_compare):
    """It runs again at a resume; the second loop starts from the random state that it leaves."""
    job = stop_and_compare(place, loop="between")
    assert job.steps_repeated == [0]


@pytest.mark.parametrize(
    ("loop", "name"), each_value(["sharpness", "lists", "combined", "zipped"], ["TERM", "KILL"])
)
def test_what_people_give_to_a_run(loop, name, tmp_path, make_job, undisturbed):
    """SAM, optimizers in a list that share their groups, generators of numpy; loaders joined."""
    spec = {"script": "loops.py", "loop": loop, "policy": {"checkpoint": {"every_steps": 4}}}
    job = make_job(tmp_path / "job", kill_at={"step 10": name}, **spec)
    job.run_to_end({"TERM": 143, "KILL": -9}[name])
    assert_same_run(job, undisturbed(**spec))


def test_a_save_between_two_loops_does_not_move_what_is_drawn_there(tmp_path):
    """It is drawn again at a resume, from where the first loop ended and not from the save on."""

    def train(directory, *, is_killed):
        torch.manual_seed(1)
        with forge.Run({"checkpoint": {"dir": str(directory), "every_steps": 100}}) as run:
            for _ in run.steps(2):
                torch.rand(1)
            drawn = [torch.rand(1).item()]
            run.save()
            for _ in run.steps(4):
                if is_killed:
                    raise RuntimeError("killed")
                drawn.append(torch.rand(1).item())
        return drawn

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "hit", is_killed=True)
    found = train(tmp_path / "hit", is_killed=False)
    assert found == train(tmp_path / "undisturbed", is_killed=False)


@pytest.mark.parametrize("place", few(2, ["step 7", "step 12", "step 3", "step 19"]))
def test_what_stands_between_loops_acts_once(place, stop_and_compare):
    """Though it runs again at each resume: it draws what it drew, and changes nothing twice."""
    stop_and_compare(place, loop="stages")


@pytest.mark.parametrize("step", few(2, [8, 13, 7]))
def test_what_was_unfrozen_is_trained_on_after_a_resume(step, stop_and_compare):
    """The script freezes it at each start, and thaws it in one step that is not repeated."""
    job = stop_and_compare(f"step {step}", loop="unfreezes")
    assert [values["trained"] for values in job.history.metrics.values()] == [4] * 8 + [6] * 12


def test_a_stop_between_the_two_updates_of_a_step_waits_for_its_end(stop_and_compare):
    """A GAN's: between them the first is done, and its loss was computed before it was."""
    job = stop_and_compare("between 13", loop="gan")
    assert job.steps_repeated == [0]
