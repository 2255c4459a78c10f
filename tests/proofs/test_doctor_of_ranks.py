"""`forge doctor` in the tasks of a step on a true cluster, and below torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

from forge.health.attempt import CHECKS

pytestmark = pytest.mark.slow

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]


def doctor(folder, *overrides):
    """Its arguments, after `python`."""
    return ["-m", "forge", "doctor", "-v", "--dir", str(folder), *overrides]


def rows(output):
    """Of the one table, each check's cells."""
    cells = [line.split() for line in output.splitlines()]
    names = {check.name for check in CHECKS} | {"nhc"}
    found = {}
    for row in cells:
        if row and row[0] in names:
            assert row[0] not in found, output
            found[row[0]] = row[1:]
    return found


def assert_between(output):
    """All checks are there, each once; that between two ranks was made, and passes."""
    found = rows(output)
    assert found.keys() >= {check.name for check in CHECKS}, output
    assert found["ranks"][:3] == ["all", "ranks", "ok"], output


def test_below_torchrun_two_processes_print_one_table(tmp_path):
    """The agent hosts the store in which they meet."""
    done = subprocess.run(
        [*TORCHRUN, *doctor(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_between(done.stdout)
    assert done.stdout.endswith("No check fails.\n")


@pytest.mark.slurm
def test_two_tasks_of_a_step_print_one_table_and_name_the_node_that_fails(cluster, tmp_path):
    """Each ends with 69, so that a script of the site's sees it by srun's code."""
    script = 'echo "$SLURMD_NODENAME"; test "$SLURMD_NODENAME" != n2'
    nhc = f"resilience.health.commands.nhc.run=[sh, -c, '{script}']"
    step = ["srun", "-N2", "-n2", sys.executable]
    done = cluster.run(*step, *doctor(tmp_path))
    assert_between(done)
    assert done.endswith("No check fails.\n"), done
    failed = cluster.run(*step, *doctor(tmp_path, nhc), check=False)
    (line,) = [line for line in failed.splitlines() if "  FAILS  " in line]
    assert line.split() == ["nhc", "n2", "FAILS", "exit", "code", "1:", "n2"]
    codes = [line for line in failed.splitlines() if line.startswith("srun: error")]
    assert len(codes) == 2, failed
    assert all(line.endswith("Exited with exit code 69") for line in codes), failed
