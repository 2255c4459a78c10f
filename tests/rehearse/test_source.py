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
    count, total = 0, 0
    for step, given in run.steps(9, other):
        total = total + given
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_a_variable_is_found_where_it_is_first_assigned(script):
    """In its function; a class of the same file may have another of the name."""
    assert source.line_of(script, "", "best") == 2
    assert source.line_of(script, "main", "best") == 8
    assert source.line_of(script, "main", "total") == 9
    assert source.line_of(script, "main", "nowhere") is None
    assert source.line_of("no such file.py", "", "best") is None
