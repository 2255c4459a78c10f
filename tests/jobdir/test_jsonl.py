"""The end of a ledger is read without the rest of it."""

import json
import random

import pytest

from forge.jobdir import jsonl

MARK = b'"summary": {'


def written(path, lines, torn=""):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + torn)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_all_events_since_the_last_mark_are_found(tmp_path, seed):
    """Wherever the mark is, and however the chunks of the file fall."""
    draw = random.Random(seed)
    lines = [
        {"kind": "metrics", "n": n, "pad": "x" * draw.randrange(400)}
        for n in range(draw.randrange(1, 400))
    ]
    marked = draw.randrange(len(lines))
    lines[marked] = {"kind": "save", "n": marked, "summary": {"loss": [1]}}
    path = written(tmp_path / "ledger", lines, '{"kind": "met' if seed % 2 else "")
    found, is_whole = jsonl.tail(path, MARK)
    assert is_whole
    assert found == lines[marked:]


def test_a_file_without_a_mark_gives_its_end_and_says_so(tmp_path):
    """A ledger of an earlier version has no marks, and can have hundreds of megabytes."""
    lines = [{"kind": "metrics", "n": n} for n in range(5000)]
    found, is_whole = jsonl.tail(written(tmp_path / "long", lines), MARK)
    assert not is_whole
    assert 0 < len(found) < 1000
    assert found == lines[-len(found) :]
    found, is_whole = jsonl.tail(written(tmp_path / "short", lines[:9]), MARK)
    assert is_whole
    assert found == lines[:9]


def test_lines_that_are_no_events_are_skipped(tmp_path):
    """Numbers, lists, objects without a kind, bytes that are no text."""
    path = tmp_path / "ledger"
    path.write_bytes(b'7\n[1]\n{"a": 1}\n\xff\xfe\n{"kind": 3}\n{"kind": "save"}\n')
    assert jsonl.tail(path, MARK) == ([{"kind": "save"}], True)
    assert list(jsonl.events(path)) == [{"kind": "save"}]
    assert list(jsonl.events(tmp_path / "none")) == []
