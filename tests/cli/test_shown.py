"""`forge show` and `forge diff`: what they print, and what differs."""

import collections
import json
import math
import re
import struct
from pathlib import Path

import forked
import numpy
import pytest
import torch
from harness import FORGE

from forge.checkpoint.format.leaves import differences
from forge.checkpoint.format.manifest import TENSORS, Manifest, entry_of


def forge_command(*arguments):
    command = [FORGE, *map(str, arguments)]
    done = forked.completed(command, Path.cwd(), joins_output=False)
    return done.returncode, done.stdout, done.stderr


def rewrite(path):
    """A manifest that fits the files as they are now."""
    raw = json.loads((path / "manifest.json").read_bytes())
    del raw["checksum"]
    for name in raw["files"]:
        raw["files"][name] = entry_of((path / name).read_bytes())
    (path / "manifest.json").write_bytes(Manifest(**raw).to_bytes())


def test_show_begins_with_step_time_size_state_and_how_to_resume(store):
    """Lines have at most 80 columns; only the path can be longer."""
    weight = torch.randn(16, 4)
    state = {
        "step": 7,
        "model": {"w": weight, "tied": weight, "deep." + "x" * 99: torch.ones(3, dtype=torch.half)},
        "rows": list(range(1000)),
        "array": numpy.zeros((2, 2)),
        "evil": "\x1b[2J\n",
        "none": None,
        "empty": {},
    }
    store.commit(store.snapshot(7, state, copy=False))
    store.mark_complete(7)
    code, shown, error = forge_command("show", "-v", store.directory)
    assert (code, error) == (0, "")
    lines = shown.splitlines()
    assert max(map(len, lines[1:])) <= 80
    facts = dict(re.findall(r"^(\w+|last logged)  +(\S.*)$", shown.partition("\n\n")[0], re.M))
    assert list(facts) == [
        "checkpoint",
        "step",
        "saved",
        "size",
        "state",
        "resume",
        "versions",
        "job",
    ]
    assert facts["step"] == "7"
    assert re.fullmatch(r"[0-9: -]{19}( \(\d+ seconds? ago\))?, by attempt \d+", facts["saved"])
    assert re.fullmatch(r"[0-9.]+ KiB in 2 files", facts["size"])
    assert facts["state"] == "intact: all checksums match"
    assert facts["resume"] == "nothing to resume: training has finished"
    assert f"torch {torch.__version__}" in facts["versions"]
    assert re.search(rf"^{TENSORS} +[0-9.]+ \w+$", shown, re.MULTILINE)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line[:1].isalpha()}
    assert rows["model.w"] == rows["model.tied"] == "float32[16, 4] 256 bytes"
    assert rows["rows"] == "list of 1000 int"
    assert rows["array"] == "float64[2, 2] numpy 32 bytes"
    assert rows["none"] == "None"
    assert any(line.startswith("…xxx") and "float16[3]" in line for line in lines)
    assert "\x1b" not in shown
    assert lines[-1] == "9 tensors and values"


def test_diff_prints_each_leaf_that_differs(store):
    """The largest difference shows whether two checkpoints differ by rounding or completely."""
    state = {
        "same": torch.ones(3),
        "w": torch.tensor([1.0, 2.0, torch.nan]),
        "inf": torch.tensor([torch.inf, 1.0]),
        "big": torch.tensor([2**53, 7]),
        "zero": torch.zeros(2),
        "dtype": torch.ones(2),
        "shape": torch.ones(2),
        "gone": torch.ones(1),
        "lr": 0.1,
        "sparse": torch.eye(2).to_sparse(),
        "nan": float("nan"),
    }
    other = {
        **state,
        "w": torch.tensor([1.0, 2.5, torch.nan]),
        "big": torch.tensor([2**53 + 1, 7]),
        "zero": -torch.zeros(2),
        "dtype": torch.ones(2, dtype=torch.half),
        "shape": torch.ones(3),
        "lr": 0.2,
        "sparse": 3 * torch.eye(2).to_sparse(),
        "new": [1],
    }
    del other["gone"]
    store.commit(store.snapshot(1, state, copy=False))
    store.commit(store.snapshot(2, other, copy=False))
    code, shown, error = forge_command(
        "diff", store.directory / "step_1", store.directory / "step_2"
    )
    assert (code, error) == (1, "")
    assert dict(line.split(": ", 1) for line in shown.splitlines()) == {
        "w": "1 of 3 differ, largest difference 0.5",
        "big": "1 of 2 differ, largest difference 0",
        "zero": "equal values, different bits (sign of a zero, or NaN payload)",
        "dtype": "float32[2] → float16[2]",
        "shape": "float32[2] → float32[3]",
        "gone": "only in A: float32[1]",
        "lr": "float 0.1 → float 0.2",
        "sparse": "values differ",
        "new[0]": "only in B: int 1",
    }
    assert forge_command("diff", store.directory / "step_1", store.directory / "step_1") == (
        0,
        "",
        "",
    )


ROW = list(range(2000))
ONE = torch.arange(2000.0)
TWO = torch.arange(2000.0).index_fill(0, torch.tensor(1000), 7)
DIFFERENT = {
    "a number as a key": ({1: 5, "1": 6}, {1: 7, "1": 6}, ["1"]),
    "keys with dots": ({"a": {"b": 1}, "a.b": 2}, {"a": {"b": 9}, "a.b": 2}, ["a.b"]),
    "list and tuple": ([1, ONE], (1, ONE), [""]),
    "list and tuple, and what they hold": ([1, 2], (1, 3), ["", "[1]"]),
    "dict and ordered dict": ({"a": 1}, collections.OrderedDict(a=1), [""]),
    "one and true": ({"a": 1}, {"a": True}, ["a"]),
    "one and true as keys": ({1: 0}, {True: 0}, ["1", "True"]),
    "one and true in a row": ([1] * 99, [True] * 99, [""]),
    "a row": (ROW, [*ROW[:-1], 0], [""]),
    "sets": ({0, 8}, {0, 9}, [""]),
    "payloads": (struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f"), (math.nan,), ["[0]"]),
    "zeros": ({"a": 0.0}, {"a": -0.0}, ["a"]),
    "nothing and something": ({"a": {}}, {"a": {"x": 1, "y": 2}}, ["a.x", "a.y"]),
    "a value and a container": ({"a": 1}, {"a": {"x": ONE}}, ["a"]),
    "empty ones": ({"a": {}}, {"a": []}, ["a"]),
    "bytes": (bytearray(b"x"), b"x", [""]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_whatever_differs_is_found_where_it_is(case):
    """Scripts rely on exit code 0, which means that two checkpoints are equal."""
    a, b, paths = DIFFERENT[case]
    assert [path for path, _ in differences(a, b)] == paths
    assert len(list(differences(b, a))) == len(paths)
    assert all(said for _, said in differences(a, b))


SAME = {
    "sets in another order": ({0, 8}, {8, 0}),
    "sets of sets": ({frozenset({0, 8}), (1,)}, {(1,), frozenset({8, 0})}),
    "keys in another order": ({"a": 1, "b": ONE}, {"b": ONE.clone(), "a": 1}),
    "NaN": ({math.nan: math.nan}, {float("nan"): float("nan")}),
    "rows": (ROW, list(ROW)),
    "arrays": (numpy.arange(3), numpy.arange(3)),
    "nothing": ({"a": {}, "b": []}, {"a": {}, "b": []}),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_the_same_does_not_differ(case):
    """Sets are compared without an order, and NaN equals NaN."""
    assert list(differences(*SAME[case])) == []


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path):
    """74, as for every checkpoint that cannot be read; 2 for a command that is not understood."""
    code, shown, error = forge_command("show", tmp_path / "no")
    assert (code, shown) == (74, "")
    assert error.startswith(f"forge: {tmp_path / 'no'}"), error
    for wrong in (["show"], ["diff", "a"], ["show", "a", "--verify"], ["plan"], []):
        code, shown, error = forge_command(*wrong)
        assert (code, shown) == (2, "")
        assert error.startswith("usage: forge ")


def test_show_has_a_line_for_each_object_of_a_run(store):
    """A thousand lines of tensors would push the important lines out of the terminal."""
    weights = {f"layer{n}.w": torch.ones(256) for n in range(1000)}
    state = {"live": {"states": {"model": weights, "ema": {"w": torch.ones(2)}}}, "step": 3}
    store.commit(store.snapshot(3, state, copy=False))
    _, shown, _ = forge_command("show", store.directory)
    rows = [line.split() for line in shown.partition("\n\n")[2].splitlines()]
    assert rows[0] == ["model", "1000", "tensors,", "0", "values", "1000.0", "KiB"]
    assert rows[1] == ["ema", "1", "tensors,", "0", "values", "8", "bytes"]
    assert len(shown.splitlines()) < 20


def test_show_of_a_damaged_checkpoint_says_so_and_what_a_resume_takes(store):
    """A script can recognize a damaged checkpoint by the exit code of `forge show`."""
    store.commit(store.snapshot(1, {"w": torch.ones(64)}, copy=False))
    path = store.directory / "step_1"
    (path / TENSORS).write_bytes((path / TENSORS).read_bytes()[:-1])
    code, shown, error = forge_command("show", path)
    assert (code, error) == (74, "")
    assert "state       DAMAGED: no job can resume from this checkpoint" in shown
    assert TENSORS in shown
    assert "newest intact checkpoint" in shown


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (2, r"^resume      \S+/\.forge/resume\.sh$"),
        (1, "resumes from step_2, its newest"),
    ],
)
def test_show_names_the_command_that_resumes_from_the_newest(step, expected, open_store, tmp_path):
    """Only a new job can start from another checkpoint."""
    (tmp_path / "job" / ".forge").mkdir(parents=True)
    (tmp_path / "job" / ".forge" / "resume.sh").touch()
    store = open_store(tmp_path / "job" / "checkpoints")
    for number in (1, 2):
        store.commit(store.snapshot(number, {}, copy=False))
    _, shown, _ = forge_command("show", store.directory / f"step_{step}")
    assert re.search(expected, shown, re.M | re.S), shown
