"""A test of a fix must fail without the fix: each line's tests at an older commit, and now.

    .venv/bin/python tests/red_green.py <base> lines.tsv

A line of the file is a label, a tab, and test ids with spaces between them. They run twice: with
the code of `base` (a worktree in a temporary directory, with today's tests and a copy of this
environment), and with the code that is here. Prints a table; exits with 1 unless at least one test
of each line fails at the base, and all of them pass now.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(?:.*? - (.*))?", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How the tests of a line ended."""

    counts: Counter[str]
    reason: str
    """What the first that failed says."""

    @property
    def is_red(self) -> bool:
        return bool(self.counts["FAILED"] or self.counts["ERROR"])

    @property
    def is_green(self) -> bool:
        return set(self.counts) == {"PASSED"}

    def __str__(self) -> str:
        total = sum(self.counts.values())
        words = [f"{n} of {total} {name.lower()}" for name, n in sorted(self.counts.items())]
        shown = self.reason.replace("|", "\\|")[:60]
        return ", ".join(words) + (f": {shown}" if shown else "")


def run(root: Path, python: Path, ids: list[str], timeout_s: float) -> Outcome:
    """Run tests in a checkout."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=no", "-rA", *ids]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=os.environ | {"COLUMNS": "500"},  # of the summary's lines, which are cut there
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Outcome(Counter(ERROR=1), f"no end within {timeout_s:.0f} s")
    return parse(done.stdout + done.stderr)


def parse(output: str) -> Outcome:
    """What `pytest -rA` says; a file that cannot be imported, or is not there, is an error."""
    summary = output.rpartition("short test summary info")[2]  # before it: what tests printed
    found = [match.groups() for match in _RESULT.finditer(summary)]
    reasons = [reason for name, reason in found if name in ("FAILED", "ERROR") and reason]
    if not found:
        found, reasons = [("ERROR", None)], [(output.strip().splitlines() or ["no output"])[-1]]
    return Outcome(Counter(name for name, _ in found), reasons[0] if reasons else "")


@contextmanager
def checkout(root: Path, base: str) -> Iterator[tuple[Path, Path]]:
    """(root, python) of a worktree with the code of `base` and today's tests, while it lasts."""
    place = Path(tempfile.mkdtemp(prefix="red-green-")) / "base"
    git = ["git", "-C", str(root), "worktree"]
    subprocess.run([*git, "add", "-q", "--detach", str(place), base], check=True)
    try:
        shutil.rmtree(place / "tests", ignore_errors=True)
        shutil.copytree(root / "tests", place / "tests")
        copy_environment(Path(sys.prefix), root, place)
        yield place, place / ".venv" / "bin" / "python"
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)
        shutil.rmtree(place.parent)


def copy_environment(environment: Path, root: Path, place: Path) -> None:
    """Into `.venv` below `place`: by hard links, but what names `root` names `place`."""
    copied = place / ".venv"
    try:
        shutil.copytree(environment, copied, symlinks=True, copy_function=os.link)
    except shutil.Error:  # another file system
        shutil.rmtree(copied)
        shutil.copytree(environment, copied, symlinks=True)
    packages = next((copied / "lib").glob("python3*")) / "site-packages"
    candidates = [copied / "pyvenv.cfg", *(copied / "bin").iterdir(), *packages.glob("*.pth")]
    for path in [*candidates, *packages.glob("*.dist-info/*")]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        changed = content.replace(os.fsencode(environment), os.fsencode(copied))
        changed = changed.replace(os.fsencode(root), os.fsencode(place))
        if changed != content and b"\0" not in content:
            mode = path.stat().st_mode
            path.unlink()  # the link: the other name keeps the content
            path.write_bytes(changed)
            path.chmod(mode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the commit without the fixes")
    parser.add_argument("lines", type=Path, nargs="+", help="files of `label<TAB>test ids`")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for each line")
    options = parser.parse_args()
    top = ["git", "rev-parse", "--show-toplevel"]
    root = Path(subprocess.run(top, check=True, capture_output=True, text=True).stdout.strip())
    text = "\n".join(path.read_text() for path in options.lines)
    lines = [line.split("\t", 1) for line in text.splitlines() if line.strip()]
    print(f"| line | tests | at {options.base} | now |\n| --- | --- | --- | --- |", flush=True)
    is_right = True
    with (
        checkout(root, options.base) as (base, python),
        ThreadPoolExecutor(options.parallel) as pool,
    ):

        def both(ids: list[str]) -> tuple[Outcome, Outcome]:
            before = run(base, python, ids, options.timeout_s)
            return before, run(root, Path(sys.executable), ids, options.timeout_s)

        found = pool.map(both, [ids.split() for _, ids in lines])
        for (label, ids), (before, now) in zip(lines, found, strict=True):
            is_right &= before.is_red and now.is_green
            before_shown = str(before) if before.is_red else f"NOT RED: {before}"
            now_shown = str(now) if now.is_green else f"NOT GREEN: {now}"
            names = "<br>".join(f"`{one}`" for one in ids.split())
            print(f"| {label} | {names} | {before_shown} | {now_shown} |", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
