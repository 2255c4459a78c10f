"""What the source of a script tells of its variables."""

import textwrap

import pytest

from forge.rehearse import source

SCRIPT = """
best = 1

class Data:
    best = 2

def main(run, other):
    best = 3
    x = y = None
    count, total = 0, 0
    batch = next(other)
    def show():
        print(shown)
    for step, given in run.steps(9, other):
        if step % 2:
            x = 1
        else:
            x = 2
        if step % 3:
            y = 1
        loss = x + given
        count += 1
        total = total + loss
        previous = batch
        batch = next(other)
        shown = loss
        try:
            maybe = loss
        except ValueError:
            pass
        for one in other:
            last = one
        best = min(best, loss + y + previous)
"""


@pytest.fixture
def script(tmp_path):
    source._tree.cache_clear()
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_a_variable_is_found_where_it_is_first_assigned(script):
    """In its function; a class of the same file may have another of the name."""
    assert source.line_of(script, "", "best") == 2
    assert source.line_of(script, "main", "best") == 8
    assert source.line_of(script, "main", "total") == 10
    assert source.line_of(script, "main", "nowhere") is None
    assert source.line_of("no such file.py", "", "best") is None


@pytest.mark.parametrize("name", ["x", "loss", "step", "given", "previous"])
def test_what_each_step_assigns_before_it_reads_it_is_no_state(script, name):
    """It differs after a resume, and nobody sees it."""
    assert source.is_renewed(script, name)


@pytest.mark.parametrize(
    "name", ["y", "count", "total", "batch", "shown", "maybe", "last", "best", "nowhere"]
)
def test_what_a_step_may_read_of_the_one_before_is_state(script, name):
    """By itself, in a branch, in a function, or where an exception has come between."""
    assert not source.is_renewed(script, name)


def test_a_script_that_cannot_be_read_renews_nothing(tmp_path):
    """Better a variable too many."""
    (tmp_path / "bad.py").write_text("for x in")
    assert not source.is_renewed(str(tmp_path / "bad.py"), "x")
