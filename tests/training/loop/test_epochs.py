"""`run.epochs` and `run.batches`: after a stop or a kill, and how scripts call them.

One module, since both halves test the same two calls: the first in processes that are stopped and
killed, the second in this process.
"""

import contextlib
import itertools
import random
import signal
import weakref

import pytest
import torch
from harness import assert_same_run
from rows import few
from torch.utils.data import DataLoader

import forge
from forge.jobdir import ledger, process_id

SCRIPT = "epochs.py"
STOPS = {"TERM": 143, "USR1": 75, "KILL": -9}


# -- a stop or a kill, at any place ----------------------------------------------------------------


def assert_same_when_disturbed(make_job, undisturbed, folder, loop, places, **policy):
    """Disturb a job once: it ends with the same bits as an undisturbed one. Returns the job."""
    job = make_job(folder, script=SCRIPT, loop=loop, kill_at=places, policy={"checkpoint": policy})
    (name,) = places.values()
    job.run_to_end(STOPS[name])
    assert_same_run(job, undisturbed(script=SCRIPT, loop=loop, policy={"checkpoint": policy}))
    return job


LOOPS = ["plain", "plateau", "acts_before", "accumulates", "finishes"]
HITS = [
    ("before 2", "KILL"),
    ("ran 14", "USR1"),
    ("ran 17", "KILL"),
    ("ran 17", "TERM"),
    ("after 2", "KILL"),
    ("after 2", "TERM"),
]


@pytest.mark.parametrize(
    ("place", "name", "loop"),
    [
        # Each loop, and each place; `make proofs` runs all pairs.
        pytest.param(*hit, loop, marks=() if i == j else pytest.mark.proofs)
        for i, hit in enumerate(HITS)
        for j, loop in enumerate(LOOPS)
    ],
)
def test_a_stop_and_a_kill_change_no_bit(loop, name, place, tmp_path, make_job, undisturbed):
    """Before a pass, in it, after its last step, and in the code after it."""
    assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", loop, {place: name}, every_steps=5
    )


@pytest.mark.parametrize(
    ("place", "name"), few(1, [("step 12", "KILL"), ("before 1", "TERM"), ("after 1", "USR1")])
)
def test_a_pass_and_a_training_that_end_by_break(name, place, tmp_path, make_job, undisturbed):
    """A later start does not train the batches and epochs that were left out."""
    assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "breaks", {place: name}, every_steps=3
    )


@pytest.mark.parametrize("place", few(1, ["step 13", "before 2", "after 2"]))
def test_a_second_loader_is_read_on_from_where_it_was(place, tmp_path, make_job, undisturbed):
    assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "second", {place: "KILL"}, every_steps=5
    )


@pytest.mark.parametrize(
    ("place", "name"),
    few(1, [*zip(["late 1", "step 6", "after 1", "step 9"], ["TERM", "KILL"] * 2, strict=True)]),
)
def test_a_break_while_a_name_still_holds_the_pass(name, place, tmp_path, make_job, undisturbed):
    """As with a progress bar: the code after the pass acts once, and due functions still run."""
    job = assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "bar", {place: name}, every_steps=3
    )
    evaluated = {step for step, values in job.history.metrics.items() if "held_out" in values}
    assert evaluated == {3, 7, 11, 15}


@pytest.mark.parametrize(
    ("place", "name"),
    few(1, [*zip(["ran 13", "before 2", "late 1", "before 0"], ["KILL", "TERM"] * 2, strict=True)]),
)
def test_a_loader_whose_state_goes_on_from_pass_to_pass(
    name, place, tmp_path, make_job, undisturbed
):
    assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "streams", {place: name}, every_steps=5
    )


@pytest.mark.parametrize("place", few(1, ["step 13", "late 1", "before 2"]))
def test_each_epoch_may_make_a_loader_with_a_generator(place, tmp_path, make_job, undisturbed):
    """The state of the previous epoch's loader must not be applied to the new one."""
    folder, places = tmp_path / "job", {place: "KILL"}
    assert_same_when_disturbed(
        make_job, undisturbed, folder, "loaders_of_epochs", places, every_steps=9
    )


@pytest.mark.parametrize(
    ("place", "name"),
    few(
        1,
        [
            *(("step 13", "TERM"), ("ran 14", "KILL"), ("before 2", "KILL")),
            *(("ran 17", "TERM"), ("after 2", "KILL")),
        ],
    ),
)
def test_code_before_a_pass_sees_run_state_as_the_epoch_began(
    name, place, tmp_path, make_job, undisturbed
):
    """A sampler that it builds from values which the pass changes is the same at a resume."""
    spec = {"script": SCRIPT, "loop": "reweighs"}
    spec["policy"] = {"checkpoint": {"every_steps": 5}}
    job = make_job(tmp_path / "job", kill_at={place: name}, **spec)
    job.run_to_end(STOPS[name])
    assert_same_run(job, undisturbed(**spec))


def test_several_loaders_in_one_loop(tmp_path, make_job, undisturbed):
    assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "several", {"step 13": "TERM"}
    )


@pytest.mark.parametrize("place", ["after 1", "late 1"])
def test_a_stop_after_a_pass_commits_what_was_there_before_it(
    place, tmp_path, make_job, undisturbed
):
    """The weights can be swapped by then; `check_stop` stops before the evaluation ends."""
    job = assert_same_when_disturbed(
        make_job, undisturbed, tmp_path / "job", "swaps", {place: "TERM"}
    )
    assert job.history.attempts[1].start_step == 12
    assert job.steps_repeated == [0]


@pytest.mark.parametrize(("back", "codes"), [(0, [0]), (8, [75, 0])])
def test_a_rollback_stays_in_its_pass_or_begins_anew(back, codes, tmp_path, make_job):
    """`for` cannot go back to an earlier epoch: the next attempt does, with one rollback used."""
    rollback = {"steps_back": back, "lr_scale": 0.5}
    nan = {"action": "rollback", "rollback": rollback, "max_consecutive": 1}
    job = make_job(
        tmp_path / "job",
        script=SCRIPT,
        loop="rolls_back",
        policy={"nan": nan, "checkpoint": {"every_steps": 3}},
    )
    assert [job.run() for _ in codes] == codes
    (rolled,) = [e for a in job.history.attempts for e in a.events if e["kind"] == "rollback"]
    assert (rolled["step"], rolled["first_bad"]) == ((12, 14) if back == 0 else (6, 14))
    nan = forge.load(job.directory / "checkpoints").state["nan"]
    assert (nan["rollbacks"], nan["lr_scale"]) == (1, 0.5)
    assert ("the batches since then are trained on again" in job.output) == (back == 8)


# -- calls in a script -----------------------------------------------------------------------------


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """Makes Runs in one directory, each as if in a new process."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def make(**policy):
        torch.manual_seed(1)
        random.seed(1)
        model = torch.nn.Linear(2, 1)
        checkpoint = {"dir": str(tmp_path / "job"), "every_steps": 2}
        return forge.Run({"checkpoint": checkpoint, **policy}, model=model)

    return make


BATCHES = DataLoader(torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize("enabled", [True, False])
def test_steps_count_over_all_epochs_and_batches_within_one(a_run, enabled):
    """The same with `enabled=False`."""
    seen = []
    with a_run(enabled=enabled) as run:
        run.every(epochs=1)(lambda step: seen.append(("pass", step)))
        run.every(at_end=True)(lambda step: seen.append(("end", step)))
        for epoch in run.epochs(2):
            assert run.batch == 0
            for step, _ in run.batches(BATCHES):
                assert run.step == step
                seen.append((epoch, run.epoch, step, run.batch))
            seen.append(("after", run.batch))
    first = [(0, 0, step, step) for step in range(3)]
    second = [(1, 1, step, step - 3) for step in range(3, 6)]
    after = ("after", 3)
    assert seen == [*first, ("pass", 3), after, *second, ("pass", 6), after, ("end", 6)]
    assert run.epoch == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pass_whose_iterator_is_held_ends_with_its_epoch(a_run, enabled):
    """After a break, the variable of a progress bar can still refer to it."""
    seen = []
    with a_run(enabled=enabled) as run:
        run.every(epochs=1)(lambda step: seen.append(step))
        for _ in run.epochs(2):
            held = run.batches(BATCHES)
            for _ in held:
                if run.batch == 1:
                    run.state["steps"] = run.state.get("steps", 0) + 1
                    break
    assert (seen, run.step) == ([1, 2], 2)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_updated", [True, False])
def test_what_is_due_where_a_pass_ends_by_a_break_runs_once(enabled, has_updated, a_run):
    """With `enabled=False`, too; `run.check_stop` after the pass is not an error."""
    seen = []
    with a_run(enabled=enabled) as run:
        run.every(2)(lambda step: seen.append(("two", step)))
        run.every(1, epochs=1)(lambda step: seen.append(("one", step)))
        for _ in run.epochs(1):
            held = run.batches(BATCHES)
            for step, _ in held:
                if step == 1 and has_updated:
                    run.should_step(0.0)
                if step == 1:
                    break
            del held
            run.check_stop()
    expected = [("one", 1), *([("two", 2), ("one", 2)] if has_updated else [])]
    assert seen == expected


def test_a_finished_training_goes_on_with_more_epochs(a_run):
    """Without more epochs it trains nothing."""
    seen = []
    for count in (2, 2, 3):
        with a_run() as run:
            for epoch in run.epochs(count):
                seen.extend((epoch, step) for step, _ in run.batches(BATCHES))
        seen.append("end")
    first = [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert seen == [*first, "end", "end", (2, 6), (2, 7), (2, 8), "end"]


def test_what_is_logged_before_and_after_a_pass_counts_once(a_run, tmp_path):
    with a_run() as run:
        for epoch in run.epochs(2):
            run.log(before=epoch)
            for _ in run.batches(BATCHES):
                run.log(within=1)
            run.log(after=epoch)
    metrics = ledger.read(tmp_path / "job").metrics
    assert {step: sorted(values) for step, values in metrics.items()} == {
        0: ["before", "within"],
        1: ["within"],
        2: ["after", "within"],
        3: ["before", "within"],
        4: ["within"],
        5: ["after", "within"],
    }


@pytest.mark.parametrize("has_changed", [True, False])
def test_run_state_of_the_epochs_start_is_saved_once_if_nothing_changed_it(
    has_changed, a_run, tmp_path
):
    """Otherwise each checkpoint would have two copies of a table that never changes."""
    with a_run() as run:
        run.state["table"] = torch.zeros(10_000)
        for _ in run.epochs(1):
            for _ in run.batches(BATCHES):
                run.state["table"] += has_changed
                if run.batch == 2:
                    run.save()
    (path,) = (tmp_path / "job").glob("step_2/tensors*")
    assert (path.stat().st_size > 70_000) == has_changed


def test_a_large_run_state_is_not_kept_as_an_epoch_begins_and_a_warning_says_so(
    a_run, caplog, monkeypatch
):
    """At a resume, code before the pass sees the values of the save; one warning says so."""
    monkeypatch.setattr("forge.training.loop.epoch_start.MAX_BYTES", 2000)
    seen = []
    for n in (5, None):
        with contextlib.suppress(KeyError), a_run() as run:
            run.state.setdefault("table", torch.zeros(1000))
            for _ in run.epochs(2):
                seen.append(run.state["table"][0].item())
                for step, _ in run.batches(BATCHES):
                    run.state["table"] += 1
                    if step + 1 == n:
                        raise KeyError("as a kill would")
        assert caplog.text.count("run.state is larger than") == 1
        caplog.clear()
    assert seen == [0, 3, 4]


def test_what_no_resume_repeats_exactly_is_logged_once(a_run, caplog):
    """Even if each epoch makes a new loader of the same kind."""
    with a_run() as run:
        for _ in run.epochs(3):
            list(run.batches(iter([torch.ones(2)])))
    assert caplog.text.count("Not known to resume exactly") == 1


def nothing_in_an_epoch(run):
    for _ in run.epochs(2):
        pass


def two_passes(run):
    for _ in run.epochs(2):
        list(run.batches(BATCHES))
        list(run.batches(BATCHES))


def no_epoch(run):
    list(run.batches(BATCHES))


def two_loops(run):
    for _ in run.epochs(1):
        list(run.batches(BATCHES))
    list(run.epochs(2))


def steps_in_an_epoch(run):
    for _ in run.epochs(1):
        list(run.steps(3, BATCHES))


def steps_by_epoch(run):
    for _ in range(2):
        list(run.steps(len(BATCHES), BATCHES))


def nested_steps(run):
    for _ in run.steps(3):
        list(run.steps(9, BATCHES))


def text_of_steps(run):
    list(run.steps("3", BATCHES))


def text_of_epochs(run):
    list(run.epochs("3"))


@pytest.mark.parametrize(
    ("loop", "complaint"),
    [
        (nothing_in_an_epoch, r"Epoch 0 has ended without `for step, batch in run\.batches"),
        (two_passes, r"run\.batches\(\) was called .* or twice in one epoch"),
        (no_epoch, r"run\.batches\(\) was called outside `for epoch in run\.epochs"),
        (two_loops, r"run\.epochs\(\) was called after another loop"),
        (steps_in_an_epoch, r"already has a loop over run\.epochs"),
        (steps_by_epoch, r"run\.steps\(3\) was called again after 3 steps.*run\.epochs\(epochs\)"),
        (nested_steps, r"inside a step of another run\.steps"),
        (text_of_steps, r"run\.steps\(\): expected the number of steps .* found '3'"),
        (text_of_epochs, r"run\.epochs\(\): expected the number of epochs .* found '3'"),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_loop_that_would_train_something_else_is_an_error(loop, complaint, enabled, a_run):
    """The worst result would be exit code 0 with a model that was trained for one epoch."""
    with pytest.raises(forge.ForgeError, match=complaint), a_run(enabled=enabled) as run:
        loop(run)


@pytest.mark.parametrize(("num_loops", "is_same", "count"), [(2, 1, 0), (5, 1, 1), (5, 0, 0)])
def test_loops_over_steps_that_are_epochs_are_named_once(num_loops, is_same, count, a_run, caplog):
    """A resume would repeat the code between them on another state; a few phases are fine."""
    with a_run() as run:
        for epoch in range(num_loops):
            loader = BATCHES if is_same else DataLoader(BATCHES.dataset)
            list(run.steps((epoch + 1) * len(loader), loader))
    assert run.step == 3 * num_loops
    assert caplog.text.count("Write `for epoch in run.epochs(epochs):`") == count


def test_a_training_cannot_change_from_steps_to_epochs(a_run):
    """The first epoch would be trained in addition to the finished steps."""
    with a_run() as run:
        list(run.steps(3, BATCHES))
    complaint = r"the checkpoint has a position in a loop over run\.steps"
    with pytest.raises(forge.StateMismatch, match=complaint), a_run() as run:
        list(run.epochs(3))


def fails_while_it_is_stopped(run):
    run.every(epochs=1)(lambda step: None)
    for _ in run.epochs(2):
        for _ in run.batches(BATCHES):
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("in a step")


def test_an_error_in_a_pass_saves_nothing_of_it(a_run, tmp_path):
    """The error leaves the pass like a break, but a resume must not begin at the end of it."""
    with pytest.raises(RuntimeError, match="in a step"), a_run() as run:
        fails_while_it_is_stopped(run)
    assert list((tmp_path / "job").glob("step_*")) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_without_a_number_of_steps_a_break_ends_the_loop(a_run, enabled):
    with a_run(enabled=enabled) as run:
        for step in run.steps(None):
            if step == 7:
                break
    assert run.step == 7


def test_what_the_script_drops_before_a_pass_is_freed(a_run):
    """A resume searches all objects for its loader, and must not keep references to them."""

    class Large(list):
        pass

    def killed():
        with a_run() as run:
            for epoch in run.epochs(3):
                if epoch == 1:
                    raise RuntimeError("killed")
                for _ in run.batches(BATCHES):
                    pass
                run.save()

    with pytest.raises(RuntimeError, match="killed"):
        killed()
    large = Large()
    known = weakref.ref(large)
    with a_run() as run:
        assert run.resumed_from is not None
        for _ in run.epochs(3):
            del large
            assert known() is None
            break


@pytest.mark.parametrize("enabled", [True, False])
def test_epochs_and_passes_have_a_length(enabled, a_run):
    """MetricLogger of DINO and MAE calls `len` of what it iterates; tqdm's total is it."""
    with a_run(enabled=enabled) as run:
        epochs = run.epochs(2)
        assert len(epochs) == 2
        for epoch in epochs:
            batches = run.batches(BATCHES if epoch == 0 else (x for x in BATCHES))
            if epoch == 0:
                assert len(batches) == 3
            else:
                with pytest.raises(TypeError):
                    len(batches)
            assert len(list(batches)) == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loop_over_steps_is_as_long_as_its_number_of_steps(enabled, a_run):
    """After a resume too, like the step that it yields."""
    with a_run(enabled=enabled) as run:
        assert len(run.steps(12, BATCHES)) == 12
        assert len(run.steps(12)) == 12
        with pytest.raises(TypeError, match="has no len"):
            len(run.steps(None, BATCHES))
