"""The scripts of docs/examples.md and of the two guides for moving to forge run unmodified."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import yaml
from cluster import wait_for
from forked import completed, run
from harness import assert_same_bits
from ranked import RankedJob
from repository import ROOT
from rows import few
from warm import IS_QUICK, QUICK

import forge
from forge.config import load
from forge.jobdir import ledger
from forge.process import world

GALLERY = ROOT / "examples" / "gallery"
HYDRA = {"plain_loop.py": "steps=150", "epochs.py": "epochs=3"}
PLAIN = {
    "own_loop.py": [],
    "without_hydra.py": ["--steps", "300"],
    **{name: [] for name in ("handler_after.py", "loggers.py")},
}


@pytest.fixture
def start(tmp_path):
    """Start a script in its own folder, with signals at given steps; returns its exit code."""

    def start(name, folder, *arguments, **kills):
        if not (tmp_path / folder).exists():
            shutil.copytree(GALLERY, tmp_path / folder)
        output = tmp_path / folder / "output.txt"
        at = {step.removeprefix("at_"): signal for step, signal in kills.items()}
        return run([name, *arguments], tmp_path / folder, output, kills=at, OMP_NUM_THREADS="1")

    return start


def weights(directory):
    return forge.load(directory).state["live"]["states"]["model"]


@pytest.mark.parametrize("name", few(1, [*HYDRA]))
def test_a_script_with_hydra_ends_the_same_when_it_is_stopped(name, start, tmp_path):
    """People copy the script, so its results have to be right, too."""
    shorter = [HYDRA[name], "hydra.run.dir=job"]
    assert start(name, "whole", *shorter) == 0
    assert start(name, "stopped", *shorter, at_80="TERM") == 143
    assert start(name, "stopped", *shorter) == 0
    assert_same_bits(weights(tmp_path / "whole/job"), weights(tmp_path / "stopped/job"))
    one, two = [ledger.read(tmp_path / folder / "job").metrics for folder in ("whole", "stopped")]
    assert one == two


@pytest.mark.parametrize("name", few(1, [*PLAIN]))
def test_a_script_without_hydra_ends_the_same_when_it_is_killed(name, start, tmp_path):
    """The script that replaces the page's signal handler also saves the position in the data."""
    assert start(name, "whole", *PLAIN[name]) == 0
    assert start(name, "killed", *PLAIN[name], at_250="KILL") == -9
    assert start(name, "killed", *PLAIN[name]) == 0
    runs = [next((tmp_path / folder / "runs").iterdir()) for folder in ("whole", "killed")]
    assert_same_bits(*map(weights, runs))
    printed = [(tmp_path / folder / "output.txt").read_text() for folder in ("whole", "killed")]
    assert printed[0].splitlines()[-1] == printed[1].splitlines()[-1]
    if name == "own_loop.py":
        assert printed[0].splitlines()[-1] in (ROOT / "docs/how-to/own-loop.md").read_text()


def test_the_handler_that_is_replaced_works_as_far_as_it_goes(start, tmp_path):
    """The page must not present a broken script as common practice."""
    assert start("handler_before.py", "stopped", at_none="TERM") == 0
    assert "best loss" in (tmp_path / "stopped/output.txt").read_text()


def test_workers_do_not_make_it_another_job(tmp_path):
    """A comment in the script claims it."""
    shutil.copy(GALLERY / "without_hydra.py", tmp_path)
    command = ["without_hydra.py", "--steps", "20"]
    assert completed(command, tmp_path).returncode == 0
    assert completed([*command, "--workers", "1"], tmp_path).returncode == 0
    assert completed([*command, "--lr", "1"], tmp_path).returncode == 78


def test_two_ranks(tmp_path):
    """The test starts the ranks itself; torchrun does in `make proofs`."""
    shorter = (GALLERY / "ddp.py").read_text().replace("EPOCHS = 5", "EPOCHS = 2")
    (tmp_path / "ddp.py").write_text(shorter)
    job = RankedJob(tmp_path / "job", script=tmp_path / "ddp.py")
    assert job.run(MASTER_PORT=str(world.free_port())) == [0, 0], job.output
    assert ledger.read_progress(job.directory / "ddp_checkpoints").step == 128


@pytest.mark.proofs
@pytest.mark.slow
def test_two_ranks_of_torchrun(tmp_path):
    """The page's command, with `--standalone`, since other tests can run at the same time."""
    (command,) = readme.blocks("text", ROOT / "docs/examples.md")
    command = command.replace("torchrun", "torchrun --standalone")
    shutil.copy(GALLERY / "ddp.py", tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    sh = functools.partial(subprocess.run, cwd=tmp_path, env=environment, timeout=250)
    done = sh(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    (printed,) = re.findall(r"^  (cd .*torchrun.*)$", done.stderr, re.MULTILINE)
    again = sh(["sh", "-c", printed], stderr=subprocess.PIPE, text=True)
    assert again.returncode == 0
    assert "already finished at step 320" in again.stderr
    assert "is resumed by 1" not in again.stderr
    assert ledger.read_progress(tmp_path / "ddp_checkpoints").step == 320


@pytest.mark.slurm
@pytest.mark.slow
def test_the_batch_script_runs_as_it_stands(cluster, tmp_path):
    """Only sbatch itself detects a wrong option."""
    shutil.copy(GALLERY / "job.sh", tmp_path)
    script = (GALLERY / "without_hydra.py").read_text()
    shorter = script.replace("default=2000", "default=30")
    assert shorter != script
    (tmp_path / "without_hydra.py").write_text(shorter)
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    modules = os.pathsep.join([*([QUICK] if IS_QUICK else []), str(ROOT)])
    environment = ("env", f"PATH={path}", f"PYTHONPATH={modules}", "OMP_NUM_THREADS=1")
    cluster.run(*environment, "sbatch", "--parsable", "job.sh", cwd=tmp_path)
    log = tmp_path / "first.log"
    wait_for(lambda: log.exists() and "trained 30 steps" in log.read_text(), "its end", 200)
    cluster.clear()


def test_the_config_of_the_cheat_sheet():
    """The keys exist; a comment in the config names their values."""
    (block,) = readme.blocks("yaml", ROOT / "docs/cheat-sheet.md")
    policy = load(yaml.safe_load(block)["resilience"])
    assert policy.slurm["timeout_min"] == 240


def test_the_config_moved():
    """Both sides of the diff from submitit_slurm are YAML, and the new side is a valid policy."""
    (block,) = readme.blocks("diff", ROOT / "docs/how-to/from-submitit-slurm.md")
    lines = block.splitlines()[2:]
    sides = [
        yaml.safe_load("\n".join(line[2:] for line in lines if line[0] in (" ", sign)))
        for sign in "-+"
    ]
    assert sides[0]["hydra"]["launcher"]["max_num_timeout"] == 3
    policy = load(sides[1]["resilience"])
    assert (policy.requeue.max_timeouts, policy.signal.warning_s) == (3, 120)
