"""`tests/red_green.py` on a repository of two commits: what was red, and what never was."""

import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import red_green
from repository import ROOT

TOOL = Path(red_green.__file__)
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
TESTS = """
import pytest
import thing

@pytest.mark.parametrize("n", [1, 2])
def test_fixed(n):
    assert thing.double(n) == 2 * n

def test_always():
    assert thing.double(2) == 4

def test_never():
    assert False
"""


@pytest.fixture
def repository(tmp_path):
    """At its first commit double(1) is wrong; it has an environment in which it is installed."""
    root = tmp_path / "repository"
    (root / "tests").mkdir(parents=True)
    (root / ".gitignore").write_text(".venv\n__pycache__\n")
    git(root, "init", "-q")
    (root / "thing.py").write_text("def double(n):\n    return n * n\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    git(root, "tag", "base")
    (root / "thing.py").write_text("def double(n):\n    return n + n\n")
    (root / "tests" / "test_thing.py").write_text(TESTS)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "fixed")
    venv.create(root / ".venv")
    (packages,) = (root / ".venv" / "lib").glob("python3*/site-packages")
    (packages / "all.pth").write_text(f"{root}\n{sysconfig.get_paths()['purelib']}\n")
    return root


def git(root, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True)


def red_green_table(root, lines):
    (root / "lines.tsv").write_text(lines)
    python = root / ".venv" / "bin" / "python"
    done = subprocess.run(
        [python, str(TOOL), "base", "lines.tsv"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [line.split(" | ")[2:] for line in done.stdout.splitlines()[2:]]


def test_only_what_was_red_and_is_green_proves_a_fix(repository):
    """By the code of the base, though the environment's packages name the repository."""
    tests = ("fixed", "always", "never", "missing")
    lines = "".join(f"line\ttests/test_thing.py::test_{name}\n" for name in tests)
    code, (fixed, always, never, missing) = red_green_table(repository, lines)
    assert fixed == ["1 of 2 failed, 1 of 2 passed: assert 1 == (2 * 1)", "2 of 2 passed |"]
    assert always == ["NOT RED: 1 of 1 passed", "1 of 1 passed |"]
    assert never[1] == "NOT GREEN: 1 of 1 failed: assert False |"
    assert missing[1].startswith("NOT GREEN: 1 of 1 error")
    assert code == 1
    assert red_green_table(repository, lines.splitlines()[0])[0] == 0
    assert (repository / "thing.py").read_text().endswith("n + n\n")
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_a_skipped_test_is_not_green():
    """It would be so on every machine without Slurm."""
    assert not red_green.parse("SKIPPED [1] tests/test_a.py:3: no Slurm\n").is_green
    assert red_green.parse("PASSED tests/test_a.py::test_b\n").is_green
    assert red_green.parse("ERROR tests/test_a.py - ImportError: x\n").reason == "ImportError: x"
    assert not red_green.parse("").is_green


def test_the_list_of_fixes_names_tests_that_exist():
    """`tests/fixes.tsv` is what the tool is run with; a test that was renamed is left out of it."""
    lines = (ROOT / "tests/fixes.tsv").read_text().splitlines()
    for label, ids in (line.split("\t") for line in lines):
        for one in ids.split():
            file, _, name = one.partition("::")
            wanted = f"def {name.partition('[')[0]}(" if name else "def test_"
            assert wanted in (ROOT / file).read_text(), (label, one)
    assert len(lines) == len({line.partition("\t")[0] for line in lines}) > 0
