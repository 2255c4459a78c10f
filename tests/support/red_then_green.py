"""Tests of a fix must fail without it: runs tests with an older `forge/`, then with this one.

    python tests/support/red_then_green.py REVISION ROWS_FILE

Each line of ROWS_FILE is `what | tests, separated by blanks | anything else`. The tests of the
working tree run twice: in a copy of it whose `forge/`, `hydra_plugins/`, `conf/`, `benchmarks/`,
`docs/`, `README.md` and `pyproject.toml` are those of REVISION, and as they are. Prints a Markdown
table with the first line of what failed before; ends with 1 unless each row has a test that failed
before, and every test passes now.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OLD = ("forge", "hydra_plugins", "conf", "benchmarks", "docs", "README.md", "pyproject.toml")


class Row(NamedTuple):
    """A line of the file."""

    what: str
    tests: list[str]


class Result(NamedTuple):
    """What became of a test, over all its parameters."""

    outcome: str
    why: str


def read_rows(path: Path) -> list[Row]:
    """Those of a file."""
    rows = []
    for line in path.read_text().splitlines():
        if line.count("|") >= 1 and not line.startswith("#"):
            what, tests, *_ = line.split("|")
            rows.append(Row(what.strip(), tests.replace(",", " ").replace("`", " ").split()))
    return rows


def tree_of(revision: str, folder: Path) -> Path:
    """The tests of this working tree, with forge as it was."""
    names = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(names, cwd=ROOT, text=True).split("\n"):
        source = ROOT / name
        if name and source.is_file() and Path(name).parts[0] not in OLD:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
    archive = subprocess.check_output(["git", "archive", revision, *OLD], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def environment_of(tree: Path, folder: Path) -> str:
    """The Python of an environment that imports forge from `tree`, else what this one has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sysconfig.get_python_version()}"
    site_packages = folder / "lib" / version / "site-packages"
    outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    site_packages.joinpath("tree.pth").write_text("\n".join([str(tree), *outer]) + "\n")
    script = Path(sys.executable).with_name("forge").read_text().partition("\n")[2]
    command = folder / "bin" / "forge"
    command.write_text(f"#!{folder / 'bin' / 'python'}\n{script}")
    command.chmod(0o755)
    return str(folder / "bin" / "python")


def run(python: str, tree: Path, tests: list[str], report: Path, jobs: str) -> dict[str, Result]:
    """What became of each test, by `file::name`."""
    words = [python, "-m", "pytest", "-q", "-m", "", "-n", jobs, f"--junitxml={report}"]
    words += ["--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # Its words go to stderr: the table is all that stdout has.
    subprocess.run([*words, *tests], cwd=tree, stdout=sys.stderr, check=False, env=variables)
    found: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = _name(case.get("classname", ""), case.get("name", ""))
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if bad is not None:
            lines = re.findall(r"^E\s+(.*)", bad.text or "", re.MULTILINE)
            found[name] = Result("failed", lines[0] if lines else (bad.get("message") or ""))
        elif skipped is not None:
            found.setdefault(name, Result("skipped", skipped.get("message") or ""))
        else:
            found.setdefault(name, Result("passed", ""))
    return found


def _name(module: str, test: str) -> str:
    path = f"{module.replace('.', '/')}.py" if module else f"{test.replace('.', '/')}.py"
    return f"{path}::{test.partition('[')[0]}" if module else path


def of(test: str, found: dict[str, Result]) -> Result:
    """The result of a test; of one whose file could not be imported, that error."""
    name = test.partition("[")[0]
    path = name.partition("::")[0]
    return found.get(name) or found.get(path) or Result("not run", "")


def shown(text: str) -> str:
    """In one cell of a table."""
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 110 else f"{text[:109]}…"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revision")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--jobs", default="3")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    tests = list(dict.fromkeys(test for row in rows for test in row.tests))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = tree_of(arguments.revision, folder / "tree")
        python = environment_of(tree, folder / "environment")
        before = run(python, tree, tests, folder / "before.xml", arguments.jobs)
        now = run(sys.executable, ROOT, tests, folder / "now.xml", arguments.jobs)
    is_good = True
    print("| line | test | before | now | what failed before |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        old = [of(test, before) for test in row.tests]
        new = [of(test, now) for test in row.tests]
        is_good &= any(one.outcome == "failed" for one in old)
        is_good &= all(one.outcome == "passed" for one in new)
        for test, was, is_ in zip(row.tests, old, new, strict=True):
            cells = (row.what, test, was.outcome, is_.outcome, shown(was.why))
            print(f"| {' | '.join(cells)} |")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
