"""Why an interrupted run differs, from what was traced."""

import json

import pytest

from forge.rehearse.hints import explained, read, remarks

SCRIPT = """\
best = 9
clock = 0
for step in run.steps(9):
    loss = best + clock
    best = best - loss
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


class Tracing:
    """Lines of a trace: what one process has at a boundary."""

    def __init__(self, file, script):
        self.file, self.script = file, script

    def at(self, step, pid=1, batch="b", leaves=(), kind="value", **variables):
        line = {
            "pid": pid,
            "place": ["checkpoints", 0, None, step],
            "leaves": {"live.w": f"w{step}", "rng.torch": f"t{step}"} | dict(leaves),
            "batch": f"{batch}{step}",
            "variables": [
                [self.script, "", name, f"f{value}", str(value), kind]
                for name, value in variables.items()
            ],
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def traced(tmp_path, script):
    """(uninterrupted, interrupted, what is said of them)."""
    files = tmp_path / "one", tmp_path / "other"
    pair = [Tracing(file, script) for file in files]
    return (*pair, lambda: explained(read(files[0]), read(files[1]), set()))


def test_a_variable_that_is_another_after_the_resume_is_named_with_its_line(traced):
    """Not the clock, which is another before anything is hit; nor what no step has assigned yet."""
    usual, interrupted, said = traced
    usual.at(0, best=9, clock=1)
    usual.at(5, best=4, clock=2, loss=3)
    interrupted.at(0, best=9, clock=7)
    interrupted.at(5, pid=2, best=9, clock=8)
    title, line, advice = said()
    assert title == "not saved, so different after the resume at step 5:"
    assert line.endswith("train.py: `best`: 9, but 4 without interruption")
    assert advice == "  → keep `best` in run.state"


def test_a_tensor_of_a_module_is_to_be_a_buffer(traced):
    """`run.state` would keep it, too, but not the module that moves it to a device."""
    usual, interrupted, said = traced
    for one, pid in (usual, 1), (interrupted, 2):
        one.at(0, kind="buffer", shadow=0)
        one.at(5, pid=pid, kind="buffer", shadow=pid)
    *_, advice = said()
    assert advice == "  → make `shadow` a persistent buffer of its module (register_buffer)"


def test_a_part_of_what_is_named_is_not_named_again(traced):
    """An object and its attributes differ together; and a few lines are enough."""
    usual, interrupted, said = traced
    many = {f"x{n}": n for n in range(9)}
    usual.at(5, kind="generator", **{"best": 1, "best.rng": 2, "best.rng.x": 3}, **many)
    interrupted.at(0)
    changed = {name: -value - 1 for name, value in many.items()}
    interrupted.at(
        5, pid=2, kind="generator", **{"best": 4, "best.rng": 5, "best.rng.x": 6}, **changed
    )
    found = said()
    assert len([line for line in found if "train.py" in line]) == 6
    assert not [line for line in found if "best.rng" in line]
    assert "  and 4 more" in found
    assert found[-1].startswith("  → keep the state of `best`, `x0`, ")


def test_a_batch_is_compared_with_the_earlier_ones(traced):
    """One that was seen before says that a pass has begun anew."""
    usual, interrupted, said = traced
    for step in (0, 1, 5, 6):
        usual.at(step)
    interrupted.at(0)
    interrupted.at(5, pid=2)
    interrupted.at(6, pid=2, batch="other")
    assert said()[0].startswith("step 5 got another batch: the loader, sampler or dataset")
    interrupted.file.unlink()
    interrupted.at(0)
    interrupted.at(5, pid=2)
    line = json.loads(interrupted.file.read_text().splitlines()[-1])
    line |= {"batch": "b1", "place": [*line["place"][:3], 6]}
    with interrupted.file.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert said()[0] == "step 5 got the batch of step 0: the loader began again"


def test_a_random_state_that_goes_another_way_is_named(traced):
    """No variable differs: one of the runs drew random numbers where the other did not."""
    usual, interrupted, said = traced
    usual.at(5)
    usual.at(6)
    interrupted.at(0)
    interrupted.at(5, pid=2)
    interrupted.at(6, pid=2, leaves={"rng.torch": "x", "live.w": "y"})
    (line,) = said()
    assert line.startswith("step 5 drew other random numbers (torch): ")


def test_where_nothing_else_is_known_the_leaf_is(traced):
    usual, interrupted, said = traced
    usual.at(5)
    usual.at(6)
    interrupted.at(0)
    interrupted.at(5, pid=2)
    interrupted.at(6, pid=2, leaves={"live.w": "y"})
    assert said() == ["batch and random states are the same; different: live.w"]
    interrupted.file.unlink()
    interrupted.at(0)
    interrupted.at(5, pid=2, leaves={"live.w": "y"})
    assert said() == [
        "saved, but another value right after the resume at step 5 (does load_state_dict restore"
        " it?): live.w"
    ]


def test_a_resume_that_is_exact_is_passed_over(traced):
    """The first resume can be exact although the second is not."""
    usual, interrupted, said = traced
    for step in (3, 5, 6):
        usual.at(step, best=step)
    interrupted.at(0)
    interrupted.at(3, pid=2, best=3)
    interrupted.at(5, pid=3, best=9)
    assert "after the resume at step 5" in said()[0]


def test_nothing_is_said_of_what_is_the_same(traced):
    """A trace that ends in the middle of a line causes no message either."""
    usual, interrupted, said = traced
    usual.at(5, best=1)
    interrupted.at(5, pid=2, best=1)
    with interrupted.file.open("a") as file:
        file.write('{"pid": 3')
    assert said() == []


def test_what_a_resume_lost_without_effect_is_a_remark(tmp_path, script):
    """A count in the name of a file changes no checkpoint; a clock differs before any signal."""
    usual, one, other = (Tracing(tmp_path / name, script) for name in ("usual", "one", "other"))
    usual.at(0, best=9, clock=1)
    one.at(0, best=9, clock=7)
    one.at(5, best=4, clock=8)
    one.at(5, pid=2, best=4, clock=9)
    assert remarks(usual.file, [one.file]) == []
    other.at(0, best=9, clock=10)
    other.at(6, best=3, clock=11, loss=2)
    other.at(6, pid=2, best=9, clock=12)
    title, variable, advice = remarks(usual.file, [one.file, other.file])
    assert title.startswith("Not saved, so different after the resume at step 6, but no result")
    assert variable.endswith("train.py: `best`: 9, but 3 without interruption")
    assert "keep `best` in run.state" in advice
