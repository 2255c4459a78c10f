"""docs/how-to/watch-a-sweep.md: what it tells a reader to type."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme

import forge
from forge.jobdir.job_state import State

PAGE = readme.DOCS / "how-to/watch-a-sweep.md"
DIRECTORY = "multirun/2026-01-31/12-00-00"
FAILED = "2"
"""The job that failed on the page."""


@pytest.fixture
def there(swept, tmp_path, monkeypatch):
    """The sweep, where the page has it, and the app beside it."""
    shutil.copytree(swept.parent, tmp_path / "app", ignore=shutil.ignore_patterns("sweep"))
    shutil.copytree(swept, tmp_path / "app" / DIRECTORY)
    monkeypatch.chdir(tmp_path / "app")


@pytest.mark.proofs
@pytest.mark.timeout(240)
def test_the_commands_of_the_page(there):
    """Each exits as it should; job 2 of the page is the one of the sweep that raised.

    A job id of Slurm is left out: test_slurm_sweeps.py has a cluster.
    """
    ran = []
    for line in "".join(readme.blocks("sh", PAGE)).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "pip" or "30410_4" in words:
            continue
        words = [{FAILED: "1", "lr=0.1,seed=2": "mode=raises"}.get(word, word) for word in words]
        if words[:2] == ["forge", "resume"] and "--dry-run" not in words:
            words = [word for word in words if "=" not in word or "mode" in word]
        ends = [words.index(one) for one in ("|", ">") if one in words]
        command = [sys.executable, "-m", *words[: min(ends, default=None)]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        fails_again = words[1] == "resume" and "--dry-run" not in words
        assert done.returncode == fails_again, (words, done.stdout + done.stderr)
        ran.append(words[1])
    assert set(ran) == {*("status", "why", "logs", "cancel", "resume", "report", "verify")}
    assert Path("report.html").stat().st_size > 100_000


def test_the_lines_of_python_on_the_page(there, capsys):
    """They read a sweep from any process."""
    names = {"forge": forge}
    (block,) = readme.blocks("python", PAGE)
    exec(compile(block, str(PAGE), "exec"), names)
    jobs = names["sweep"].jobs
    assert [job.state for job in jobs].count(State.finished) == 2
    assert len(names["losses"]) == 40
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        [str(job.number), str(job.state), str(job.step)] for job in jobs
    ]
