"""Directories and values that have to be quoted for Hydra as well as for the shell."""

import warm
from hydra_apps import App

from forge.jobdir.job_dir import hydra_quoted

ODD = "x\x1b]0;owned\x07\x1b[31m%d\nforge: finished at step 8\u202e\\'"


def test_what_a_terminal_would_obey_is_shown_escaped_and_resumes_the_same_job(tmp_path):
    """An override is often somebody else's, and a terminal does as it is told by it."""
    app = App(tmp_path / "app")
    given = (f"hydra.run.dir={hydra_quoted('job' + ODD)}", f"name={hydra_quoted(ODD)}")
    stopped = app.run(*given, "signal_in=3")
    assert stopped.returncode == 143, stopped.stdout
    assert all(line.isprintable() for line in stopped.stdout.splitlines()), stopped.stdout
    assert not [one for one in stopped.stdout.splitlines() if one.startswith("forge: finished")]
    resumed = app.resume(stopped.stdout, in_shell=True)
    assert resumed.returncode == 0, resumed.stdout
    seen = app.seen(f"job{ODD}")  # two lines for each start
    assert seen[:2] == seen[2:]
    again = warm.run_script(app.folder / f"job{ODD}/.forge/resume.sh")
    assert "already finished at step 8" in again.stdout, again.stdout
