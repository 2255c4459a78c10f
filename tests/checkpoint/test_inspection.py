"""Checkpoints are looked at from outside: by forge.load, by `forge show`, and without forge."""

import collections
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy
import pytest
import torch

import forge
from forge.checkpoint import Manifest, named
from forge.checkpoint.checksums import Checksums
from forge.checkpoint.leaves import differences, leaves
from forge.errors import CheckpointError, DamagedCheckpoint

TENSORS, STATE = "tensors_rank00000.safetensors", "state_rank00000.json"
ROOT = Path(__file__).resolve().parents[2]


def flip(path, where=-8):
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)


def contents(folder):
    """Everything below, with the times at which it was changed."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_mode) for path in paths}


@pytest.fixture
def trained(store, commit):
    for step in (1, 2, 10):
        commit(store, step)
    return store.directory


def forge_command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "forge", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    return done.returncode, done.stdout, done.stderr


# -- forge.load ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "step"), [(".", 10), ("latest", 10), ("step_2", 2), ("step_10/../step_1", 1)]
)
def test_a_checkpoint_or_the_newest_of_a_directory_is_loaded(where, step, trained, state_of):
    """By the name that people have at hand."""
    found = forge.load(trained / where)
    assert found.path == trained.resolve() / f"step_{step}"
    assert found.manifest.step == step
    assert found.state["names"] == state_of(step)["names"]
    assert torch.equal(found.state["weights"], state_of(step)["weights"])


def test_a_copy_of_another_name_is_loaded(trained, tmp_path):
    """The best one was copied to where it is served from."""
    (trained / "step_2").rename(tmp_path / "best")
    assert forge.load(str(tmp_path / "best")).manifest.step == 2


@pytest.mark.parametrize("name", ["checkpoints", "here", None])
def test_of_a_job_the_checkpoints_are_found(name, open_store, commit, tmp_path):
    """Its config says where they are; without one (plain submitit) there is only one place."""
    job = tmp_path / "job"
    (job / ".forge").mkdir(parents=True)
    if name:
        text = f"resilience: {{checkpoint: {{dir: {name}}}}}\n"
        (job / ".forge" / "config.yaml").write_text(text)
        (job / "other").mkdir()
        (job / "other" / "step_77").mkdir()
    commit(open_store(job / (name or "anything")), 3)
    assert forge.load(job).manifest.step == 3


def test_nothing_is_claimed_or_written(trained, store, commit):
    """A job is running there: the fixture's store holds the directory's lock."""
    before = contents(trained)
    forge.load(trained)
    assert contents(trained) == before
    commit(store, 11)
    assert forge.load(trained).manifest.step == 11


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_directory_that_one_may_only_read_is_enough(trained):
    """Colleagues look at each other's runs."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        copied = shutil.copytree(trained, Path(folder, "copied"), symlinks=True)
        for path in [*copied.rglob("*"), copied]:
            if not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        assert load_as(4321, copied) == "10 read only"


def load_as(uid, path):
    """As that user: the step that is loaded, and whether the directory could have been written."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import forge; forge.load; os.setuid(int(sys.argv[3]))\n"
        "print(forge.load(sys.argv[2]).manifest.step, end=' ')\n"
        "try: open(sys.argv[2] + '/x', 'w')\n"
        "except PermissionError: print('read only')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(path), str(uid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr


def test_a_newest_that_is_damaged_is_passed_over_and_told(trained, caplog):
    """As a resume would."""
    flip(trained / "step_10" / TENSORS)
    assert forge.load(trained).manifest.step == 2
    assert re.search(r"Passed over .*step_10: tensors.*CRC-32", caplog.text)


@pytest.mark.parametrize(
    ("verify", "harm", "complaint"),
    [
        ("full", lambda p: flip(p / TENSORS), rf"step_2: {TENSORS}: expected CRC-32 \w+.*, found"),
        ("size", lambda p: os.truncate(p / STATE, 5), rf"{STATE}: expected \d+ bytes, found 5"),
        ("none", lambda p: (p / TENSORS).unlink(), rf"{TENSORS}: cannot be opened: No such file"),
        ("full", lambda p: (p / "manifest.json").unlink(), "no manifest: the save did not finish"),
    ],
)
def test_damage_is_an_error_that_names_the_file(verify, harm, complaint, trained):
    """What was expected, what was found."""
    harm(trained / "step_2")
    with pytest.raises(DamagedCheckpoint, match=complaint) as error:
        forge.load(trained / "step_2", verify=verify)
    assert str(trained) in str(error.value)


def test_what_verifies_less_sees_less(trained, state_of):
    """`size` lets a flipped bit through: that is what it saves its time by."""
    flip(trained / "step_2" / TENSORS)
    found = forge.load(trained / "step_2", verify="size").state["weights"]
    assert not torch.equal(found, state_of(2)["weights"])


def test_of_damaged_checkpoints_alone_each_is_named(trained):
    """Not only the last one that was tried."""
    for step in (1, 2, 10):
        flip(trained / f"step_{step}" / STATE, 3)
    with pytest.raises(DamagedCheckpoint) as error:
        forge.load(trained)
    assert all(f"step_{step}: {STATE}" in str(error.value) for step in (1, 2, 10))


def several_jobs(folder):
    for number in "01":
        (folder / number / ".forge").mkdir(parents=True)


NOTHING = {
    "missing": (lambda f: f / "no", "there is nothing here"),
    "dangling": (lambda f: (os.symlink("gone", f / "l"), f / "l")[1], "is a link to gone"),
    "file": (lambda f: ((f / "x").write_text(""), f / "x")[1], "is a file"),
    "empty": (lambda f: f, "has no checkpoint. Expected a checkpoint"),
    "young job": (lambda f: ((f / ".forge").mkdir(), f)[1], "has not saved a checkpoint yet"),
    "sweep": (lambda f: (several_jobs(f), f)[1], "has several jobs. Name one of them: 0, 1"),
    "several": (
        lambda f: ([(f / n / "step_1").mkdir(parents=True) for n in "ab"], f)[1],
        "has several directories of checkpoints: a, b",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_where_there_is_no_checkpoint_the_error_says_what_there_is(case, tmp_path):
    """And what would have been one."""
    make, complaint = NOTHING[case]
    path = make(tmp_path)
    with pytest.raises(CheckpointError) as error:
        forge.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert complaint in str(error.value)


def test_an_unknown_verify_is_refused(trained):
    """A typo must not mean `none`."""
    with pytest.raises(ValueError, match="expected full, size, none"):
        forge.load(trained, verify="fulll")


def test_loading_goes_on_while_the_job_removes_what_is_old(trained, open_store, commit, tmp_path):
    """A running job keeps few; one that vanishes while it is read is no error."""
    busy = open_store(tmp_path / "busy", keep_last=1)
    commit(busy, 0)
    is_done = threading.Event()

    def train():
        for step in range(1, 2000):
            commit(busy, step)
            busy.retain()
            if step >= 60 and len(loaded) > 2:
                break
        is_done.set()

    loaded = []
    thread = threading.Thread(target=train)
    thread.start()
    while not is_done.is_set():
        loaded.append(forge.load(busy.directory).manifest.step)
    thread.join()
    assert loaded == sorted(loaded)
    assert len(loaded) > 2


# -- the terminal ----------------------------------------------------------------------------------


def test_show_prints_facts_and_leaves_in_a_hundred_columns(store):
    """With what is tied counted once."""
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
    store.commit(store.snapshot(7, state, True, copy=False))
    code, shown, error = forge_command("show", store.directory)
    assert (code, error) == (0, "")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert "step 7, saved " in shown
    assert "training had ended" in shown
    assert f"torch {torch.__version__}" in shown
    assert re.search(rf"^  {TENSORS} +CRC-32 [0-9a-f]{{8}} ", shown, re.MULTILINE)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line[:1].isalpha()}
    assert rows["model.w"] == rows["model.tied"] == "float32[16, 4] 256 bytes"
    assert rows["rows"] == "list of 1000 int"
    assert rows["array"] == "float64[2, 2] numpy 32 bytes"
    assert rows["none"] == "None"
    assert any(line.startswith("…xxx") and "float16[3]" in line for line in lines)
    assert "\x1b" not in shown
    assert lines[-1] == "9 leaves, 294 bytes; what is tied counts once"


def test_diff_prints_each_leaf_that_differs(store):
    """The largest difference says whether it is rounding or another model."""
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
    store.commit(store.snapshot(1, state, False, copy=False))
    store.commit(store.snapshot(2, other, False, copy=False))
    code, shown, error = forge_command(
        "diff", store.directory / "step_1", store.directory / "step_2", "--verify", "size"
    )
    assert (code, error) == (1, "")
    assert dict(line.split(": ", 1) for line in shown.splitlines()) == {
        "w": "values differ by at most 0.5, in 1 of 3",
        "big": "values differ by at most 0, in 1 of 2",
        "zero": "values are equal, bits are not (a zero's sign, a NaN's payload, or their order)",
        "dtype": "float32[2] → float16[2]",
        "shape": "float32[2] → float32[3]",
        "gone": "only in A: float32[1]",
        "lr": "float 0.1 → float 0.2",
        "sparse": "values differ by at most 2, in 2 of 4",
        "new[0]": "only in B: int 1",
    }
    assert forge_command("diff", store.directory / "step_1", store.directory / "step_1") == (
        0,
        "",
        "",
    )


def not_imported(value):
    return named.NotImported("their.State", value)


ROW = list(range(2000))
ONE = torch.arange(2000.0)
TWO = torch.arange(2000.0).index_fill(0, torch.tensor(1000), 7)
DIFFERENT = {
    "a class that is not imported": (not_imported((ONE,)), not_imported((TWO,)), ["[0]"]),
    "its name": (not_imported((1,)), named.NotImported("other.State", (1,)), [""]),
    "an enum": (not_imported("RED"), not_imported("BLUE"), [""]),
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
    """Exit code 0 says that two checkpoints are the same, and is believed."""
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
    "a class that is not imported": (not_imported((ONE, {1})), not_imported((ONE.clone(), {1}))),
    "nothing": ({"a": {}, "b": []}, {"a": {}, "b": []}),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_the_same_does_not_differ(case):
    """A set has no order, and NaN is itself here."""
    assert list(differences(*SAME[case])) == []


def test_what_a_class_holds_that_is_not_imported_is_shown_and_counted():
    """Optimizers keep whole models in namedtuples."""
    found = list(leaves({"state": not_imported((ONE, 3))}))
    assert [(leaf.path, leaf.num_bytes) for leaf in found] == [("state[0]", 8000), ("state[1]", 0)]


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path):
    """74, as for every checkpoint that cannot be read; 2 for a command that is not understood."""
    code, shown, error = forge_command("show", tmp_path / "no")
    assert (code, shown) == (74, "")
    assert error.startswith(f"{tmp_path / 'no'}: there is nothing here")
    for wrong in (["show"], ["diff", "a"], ["show", "a", "--verify", "much"], ["shw", "a"]):
        code, shown, error = forge_command(*wrong)
        assert (code, shown) == (2, "")
        assert error.startswith("usage: forge plan")


def test_a_value_of_somebody_s_own_class_is_shown_by_name(store):
    """`forge show` has not imported their program."""
    state = {"action": forge.ExitCode.HALTED}
    path = store.commit(store.snapshot(1, state, False, copy=False))
    text = (path / STATE).read_text().replace("forge.errors", "their.module")
    assert "their.module" in text
    (path / STATE).write_text(text)
    rewrite(path)
    found = forge.load(path).state["action"]
    assert found == named.NotImported("their.module.ExitCode", "HALTED")
    assert "NotImported" in forge_command("show", path)[1]


def rewrite(path):
    """A manifest that fits the files as they are now."""
    raw = json.loads((path / "manifest.json").read_bytes())
    del raw["checksum"]
    for name in raw["files"]:
        checksums = Checksums()
        checksums.update(memoryview((path / name).read_bytes()))
        raw["files"][name] = checksums.entry()
    (path / "manifest.json").write_bytes(Manifest(**raw).to_bytes())


# -- without forge ---------------------------------------------------------------------------------


def snippet():
    text = (ROOT / "README.md").read_text().partition("<!-- reading -->\n```python\n")[2]
    return text.partition("```\n<!-- /reading -->")[0]


def run_snippet(folder):
    """The lines of README, where `import forge` fails."""
    check = (
        "import sys; sys.modules['forge'] = None\n"
        "try: import forge\n"
        "except ImportError: print('no forge')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", check + snippet()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_checkpoint_can_be_read_in_ten_lines_without_forge(trained):
    """Whoever has the weights must not need us."""
    assert 0 < len(snippet().splitlines()) <= 10
    code, shown, error = run_snippet(trained.parent)
    assert code == 0, error
    assert shown == ["no forge", "10 {'weights': [64]}"]


@pytest.mark.parametrize("name", [TENSORS, STATE])
def test_those_lines_notice_damage(name, trained):
    """They check every file against the manifest."""
    flip(trained / "step_10" / name)
    code, _, error = run_snippet(trained.parent)
    assert code == 1
    assert f"{name} is damaged" in error
