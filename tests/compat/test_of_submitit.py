"""What forge needs of submitit's private parts."""

import subprocess
import sys

from contracts import contract

from forge.compat import of_submitit


def test_the_module_that_runs_a_job():
    """A LocalExecutor's job is started by it again, with its folder."""
    with contract(of_submitit.submit_module):
        command = [sys.executable, "-m", of_submitit.submit_module(), "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "folder" in done.stdout, done.stderr
