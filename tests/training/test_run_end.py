"""The end of a Run is the exit of its `with` block: what follows the last loop is done once."""

import itertools

import pytest
import torch
from harness import assert_same_bits, assert_same_run
from ranked import RankedJob
from rows import each_value, few

import forge
from forge.checkpoint.store import Store
from forge.jobdir import process_id
from forge.shutdown import stopping

CODES = {"TERM": 143, "USR1": 75, "KILL": -9}


def spec_of(kind):
    """A loop that ends by its `n` after a save that was due, or was not, or by a break."""
    script, every_steps, breaks_at = {
        "steps": ("loops.py", 6, None),
        "steps, due": ("loops.py", 5, None),
        "break": ("loops.py", 6, 14),
        "epochs": ("epochs.py", 5, None),
        "epochs, due": ("epochs.py", 6, None),
        "epochs, break": ("epochs.py", 5, 2),
    }[kind]
    policy = {"checkpoint": {"every_steps": every_steps, "keep_last": 1}}
    return {"script": script, "loop": "folds", "breaks_at": breaks_at, "policy": policy}


KINDS = ["steps", "steps, due", "epochs, due", "epochs", "break", "epochs, break"]
MORE = [*itertools.product(KINDS[1::2], CODES, ["after", "folded"])]


def assert_folded_once(job, undisturbed):
    """In the process, in the file that it wrote in the block, and in what others read."""
    assert_same_run(job, undisturbed)
    folded = torch.load(job.directory / "folded.pt", weights_only=True)
    assert_same_bits(folded, undisturbed.weights)
    state = forge.load(job.checkpoints).state
    assert_same_bits(state["live"]["states"]["model"], undisturbed.weights)
    assert state["run.state"]["folds"] == 1


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    each_value(KINDS[::2], list(CODES), ["after", "folded"])
    + [pytest.param(*row, marks=pytest.mark.proofs) for row in MORE],
)
def test_what_follows_the_last_loop_is_done_once(
    kind, name, place, tmp_path, make_job, undisturbed
):
    """A stop takes effect at the exit; after a kill a start repeats it from the loop's end."""
    spec = spec_of(kind)
    job = make_job(tmp_path / "job", kill_at={place: name}, **spec)
    whole = undisturbed(**spec)
    assert job.run() == CODES[name], job.output
    ended = forge.load(job.checkpoints).manifest.is_complete
    assert ended == (name != "KILL")
    for _ in range(2):
        assert job.run() == 0, job.output
        assert_folded_once(job, whole)
    assert job.output.count("already finished") == 1 + (name != "KILL")
    saved = {e["path"] for a in job.history.attempts for e in a.events if e["kind"] == "save"}
    assert len([path for path in saved if path.startswith("final_")]) == 1


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains for `n` steps, and halves the weight after the loop; each as a process of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def attempt(n, name="job", fold=True, **checkpoint):
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = {"dir": str(tmp_path / name), "every_steps": 100, **checkpoint}
        with forge.Run({"checkpoint": checkpoint}, model=model, optimizer=optimizer) as run:
            for _ in run.steps(n):
                loss = model(torch.rand(1)).square().sum()
                loss.backward()
                run.update(loss, optimizer)
            run.log(weight=model.weight.item())
            if fold:
                with torch.no_grad():
                    model.weight.data.mul_(0.5)
        return model.state_dict()

    yield attempt
    stopping.uninstall()


def names(directory):
    return sorted(one.name for one in directory.iterdir() if "step_" in one.name)


def test_the_end_is_saved_once_more_only_if_the_state_differs(train, tmp_path):
    """Else its checkpoint is marked, with what was logged after the loop."""
    train(4, fold=False)
    assert names(tmp_path / "job") == ["step_4"]
    found = forge.load(tmp_path / "job").manifest
    assert found.is_complete
    assert "weight" in found.metrics
    train(4, "other")
    assert names(tmp_path / "other") == ["final_step_4", "step_4"]
    assert forge.load(tmp_path / "other").path.name == "final_step_4"
    assert (tmp_path / "other/latest").resolve().name == "final_step_4"


def test_a_finished_job_that_is_made_longer_goes_on_from_the_end_of_its_loop(train, tmp_path):
    """What followed it is no part of the longer training; its checkpoint is removed."""
    train(4)
    longer, whole = train(9), train(9, "whole")
    assert_same_bits(longer, whole)
    assert_same_bits(forge.load(tmp_path / "job").state["live"]["states"]["model"], whole)
    assert names(tmp_path / "job") == ["final_step_9", "step_4", "step_9"]


@pytest.mark.parametrize("call", ["mark_complete", "commit"])
def test_a_kill_in_the_last_save_repeats_what_followed_the_loop(call, train, tmp_path, monkeypatch):
    """Before the second checkpoint, and between that and the mark."""
    made = getattr(Store, call)

    def killed(store, *args, **options):
        if call == "mark_complete" or args[0].is_final:
            raise RuntimeError("killed")
        return made(store, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Store, call, killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(4)
    assert not forge.load(tmp_path / "job").manifest.is_complete
    whole = train(4, "whole")
    assert_same_bits(train(4), whole)
    assert_same_bits(forge.load(tmp_path / "job").state["live"]["states"]["model"], whole)


def test_a_save_after_a_break_is_the_state_that_the_loop_has_left(tmp_path, train):
    """What stands between there and `run.save()` runs again at a resume."""

    def attempt(is_killed):
        with forge.Run({"checkpoint": {"dir": str(tmp_path / "job"), "every_steps": 100}}) as run:
            for step in run.steps(9):
                run.state["steps"] = step + 1
                if step == 3:
                    run.should_step(0.0)
                    break
            run.state["steps"] *= 2
            run.save()
            if is_killed:
                raise KeyError("killed")
            return run.state["steps"]

    with pytest.raises(KeyError):
        attempt(is_killed=True)
    assert attempt(is_killed=False) == 8


@pytest.mark.parametrize("how", few(1, ["SIGKILL", "SIGTERM"]))
def test_what_follows_the_last_loop_is_done_once_on_all_ranks(how, tmp_path):
    """One rank is signalled: all leave after the save of all, or resume from the loop's end."""
    spec = {"n": 6, "folds": True, "checkpoint": {"every_steps": 4}}
    whole = RankedJob(tmp_path / "whole", 2, **spec)
    whole.run_to_end()
    job = RankedJob(tmp_path / "job", 2, signal_after=[[6, 1]], how=how, **spec)
    codes = job.run()
    assert codes == [143, 143] if how == "SIGTERM" else codes[1] == -9, job.output
    for _ in range(2):
        assert job.run() == [0, 0], job.output
        job.assert_same_run(whole)
    assert job.history.attempts[1].start_step == 6
    assert forge.load(job.checkpoints).path.name == "final_step_6"
