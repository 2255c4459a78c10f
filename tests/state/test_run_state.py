"""`run.state`: the user's values are restored exactly and in place, or refused by path."""

import math
import random
from collections import deque
from contextlib import closing

import pytest
import torch

import forge
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.errors import CheckpointError
from forge.shutdown import stopping
from forge.state.run_state import RunState

numpy = pytest.importorskip("numpy")


def saved(state, tmp_path):
    """The state after a save and a load."""
    with closing(Store(tmp_path, CheckpointConfig())) as store:
        store.commit(store.snapshot(1, state.capture(), copy=False))
        return store.newest().state


def filled():
    state = RunState()
    state["best"] = math.inf
    state["name"] = "première"
    state["buffer"] = [(0.5, 1, True), {"x": torch.arange(3.0), 7: numpy.arange(4)}]
    state["noise"] = {"torch": torch.Generator().manual_seed(3), "python": random.Random(4)}
    state["old"] = numpy.random.RandomState(7)
    state["numpy"] = [numpy.random.default_rng(5), numpy.random.Generator(numpy.random.MT19937(6))]
    return state


def draws(state):
    return [
        torch.rand(3, generator=state["noise"]["torch"]).tolist(),
        [state["noise"]["python"].gauss(0, 1) for _ in range(3)],
        [one.normal(size=3).tolist() for one in [*state["numpy"], state["old"]]],
    ]


def test_all_kinds_of_values_come_back_to_the_bit(tmp_path):
    """Generators, too: they continue at the same position."""
    before, after = filled(), RunState()
    draws(before)
    after.restore(saved(before, tmp_path))
    assert after["best"] == math.inf
    assert after["name"] == "première"
    assert after["buffer"][0] == (0.5, 1, True)
    assert torch.equal(after["buffer"][1]["x"], torch.arange(3.0))
    assert numpy.array_equal(after["buffer"][1][7], numpy.arange(4))
    assert draws(after) == draws(before)


@pytest.mark.parametrize("already", ["nothing", "as at the start", "ahead"])
def test_a_generator_goes_on_with_the_children_that_it_would_spawn(already, tmp_path):
    """Each child has its own stream: a stream that is spawned twice correlates with itself."""
    before, after = RunState(), RunState()
    before["rng"] = numpy.random.default_rng(5)
    before["rng"].bit_generator.seed_seq.spawn(3)
    if already != "nothing":
        after["rng"] = live = numpy.random.default_rng(5)
    if already == "ahead":
        live.bit_generator.seed_seq.spawn(4)
    after.restore(saved(before, tmp_path))
    if already == "as at the start":
        assert after["rng"] is live
    (child,), (expected,) = (one["rng"].bit_generator.seed_seq.spawn(1) for one in (after, before))
    assert child.state == expected.state
    assert after["rng"].random() == before["rng"].random()


def test_what_is_there_already_is_changed_in_place(tmp_path):
    """The loop can have a reference to the list, tensor or generator; a rollback must change it."""
    state = filled()
    kept = saved(state, tmp_path)
    held = state["buffer"], state["buffer"][1], state["buffer"][1]["x"], state["noise"]["torch"]
    arrays = state["buffer"][1][7], state["numpy"][0], state["noise"]["python"]
    expected = draws(state)
    held[0].append("more")
    held[2].zero_()
    arrays[0][:] = 9
    del state["name"]
    state.restore(kept)
    assert held[0] is state["buffer"]
    assert len(held[0]) == 2
    assert held[1] is state["buffer"][1]
    assert held[2] is state["buffer"][1]["x"]
    assert held[2].tolist() == [0, 1, 2]
    assert held[3] is state["noise"]["torch"]
    assert arrays[0].tolist() == [0, 1, 2, 3]
    assert arrays[1] is state["numpy"][0]
    assert arrays[2] is state["noise"]["python"]
    assert draws(state) == expected
    assert state["name"] == "première"


def test_what_is_assigned_before_the_loop_is_how_the_first_attempt_begins(tmp_path):
    """A resume replaces the values, and changes objects of the script in place."""
    kept = saved(filled(), tmp_path)
    state = RunState()
    state.restore(kept)
    state["best"], state["new"] = 0.0, 1
    state["buffer"] = buffer = []
    del state["name"]
    state.begin_loop()
    assert state["best"] == math.inf
    assert state["new"] == 1
    assert state["buffer"] is buffer
    assert len(buffer) == 2
    assert state["name"] == "première"


def test_after_that_an_assignment_counts(tmp_path):
    """A later loop, or one after a rollback, starts with the present values."""
    state = filled()
    state.begin_loop()
    state.restore(saved(filled(), tmp_path))
    state["best"] = 0.0
    state.begin_loop()
    assert state["best"] == 0.0


def test_a_value_is_no_attribute():
    """An attribute would silently not be saved."""
    state = RunState()
    with pytest.raises(AttributeError, match="best"):
        state.best = 1
    with pytest.raises(AttributeError, match="ema"):
        state.ema = torch.nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="best"):
        _ = state.best


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (deque([1]), r"run\.state\.x: a collections\.deque"),
        ({"a": [1, object()]}, r"run\.state\.x\.a\[1\]: a builtins\.object"),
        ([random.SystemRandom()], r"run\.state\.x\[0\]: a random\.SystemRandom"),
        ((torch.Generator(),), r"run\.state\.x\[0\]: a torch.*Generator"),
        (torch.nn.Linear(1, 1), r"run\.state\.x: a torch\.nn.*Linear"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path_as_it_is_assigned(value, path):
    """The error comes at once, and not hours later at the first save."""
    state = RunState()
    with pytest.raises(CheckpointError, match=path):
        state["x"] = value
    assert "x" not in state
    with pytest.raises(
        TypeError, match=r"run\.state\[3\]: expected a string as the key, found int"
    ):
        state[3] = 1


def a_run(directory, loop, steps=12, **policy):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = {"dir": str(directory), "every_steps": 4}
    with forge.Run({"checkpoint": checkpoint, **policy}, model=model, optimizer=optimizer) as run:
        for step in run.steps(steps):
            loss = model(torch.randn(3, 2)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            loop(run, step)
        return dict(run.state)


@pytest.mark.parametrize("depth", [150, 100_000])
def test_a_value_that_is_nested_too_deep_is_refused_in_one_sentence(depth):
    """Otherwise Python's RecursionError prints 3000 lines, and possibly only at the save."""
    deep = []
    for _ in range(depth):
        deep = [deep]
    state = RunState()
    with pytest.raises(CheckpointError, match=r"run\.state\.history.* nested in more than 100"):
        state["history"] = deep
    state["history"] = []
    state["history"].append(deep)
    with pytest.raises(CheckpointError, match=r"nested in more than 100 containers"):
        state.capture()


def test_a_loop_that_begins_with_its_own_values_goes_on_with_the_saved_ones(tmp_path):
    """Scripts commonly assign initial values before the loop, and fill them in it."""

    def part(directory, stop_at):
        model = torch.nn.Linear(1, 1)
        policy = {"checkpoint": {"dir": str(directory), "every_steps": 1}}
        with forge.Run(policy, model=model) as run:
            run.state["seen"] = seen = []
            for step in run.steps(6):
                if step == stop_at:
                    raise RuntimeError("stopped here")
                seen.append(step)
        return seen

    with pytest.raises(RuntimeError, match="stopped here"):
        part(tmp_path / "job", 4)
    assert part(tmp_path / "job", None) == [0, 1, 2, 3, 4, 5]


def test_a_rollback_takes_it_back(tmp_path):
    """A loop with a reference to the list keeps the same list."""
    seen, held = [], []

    def loop(run, step):
        held.append(run.state.setdefault("history", []))
        held[0].append(step)
        if step in (9, 10) and step not in seen:
            seen.append(step)
            run.should_step(math.nan)

    nan = {"action": "rollback", "max_consecutive": 2}
    state = a_run(tmp_path / "job", loop, nan=nan)
    assert seen == [9, 10]
    assert state["history"] == held[0] == list(range(12))


def test_a_bad_value_deep_inside_is_named_at_the_save(tmp_path, monkeypatch):
    """The value was appended after the assignment."""
    monkeypatch.setattr(stopping, "leave", lambda code, text, reason: forge.Exit(code, text))

    def loop(run, step):
        run.state.setdefault("history", []).append(object() if step == 2 else step)

    with pytest.raises(forge.Exit, match=r"run\.state\.history\[2\]: a builtins\.object"):
        a_run(tmp_path / "job", loop)
    stopping.uninstall()  # the process would have ended


def test_a_plain_loop_has_it_as_well(tmp_path):
    """The same script runs with `resilience=disabled`."""
    assert a_run(tmp_path, lambda run, step: run.state.update(last=step), enabled=False) == {
        "last": 11
    }
