"""The script of docs/how-to/several-ranks.md, started by each command of that page as it stands."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import readme
from harness import Process, assert_same_bits
from repository import ROOT

import forge
from forge.jobdir import ledger

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PAGE = ROOT / "docs/how-to/several-ranks.md"
COMMANDS = readme.blocks("text", PAGE)[0].splitlines()
SCRIPT = readme.blocks("python", PAGE)[0]
MAIN = """
import hydra


@hydra.main(**({"version_base": None} if hydra.__version__ < "1.4" else {}), config_path=None)
def main(cfg):
%s

if __name__ == "__main__":
    main()
"""
"""Around the script, for Hydra's launchers."""


@pytest.fixture
def start(cluster, monkeypatch):
    """A command in a folder of its own, with the commands of this environment and of Slurm."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    path = os.pathsep.join([str(Path(sys.executable).parent), cluster.environment["PATH"]])
    tree = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def start(command, folder):
        folder.mkdir(exist_ok=True)
        text = MAIN % textwrap.indent(SCRIPT, "    ") if " -m " in command else SCRIPT
        (folder / "train.py").write_text(text)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": tree, "PATH": path}
        words = ["sh", "-c", f"exec {command}"]
        return Process(words, folder / "output.txt", folder, **environment)

    yield start
    cluster.clear()


def weights(folder):
    found = forge.load(folder)
    assert found.manifest.is_complete
    return found.state["live"]["states"]["model"]


def stop_torchrun(process, cluster):
    """The agent passes SIGTERM on to both ranks."""
    process.signal(signal.SIGTERM)
    assert process.wait() != 0


def stop_step(process, cluster):
    """As somebody does by hand who wants the nodes."""
    (job,) = cluster.run("squeue", "--noheader", "--format=%i").split()
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    assert process.wait() == 75, process.output


STOPS = {"torchrun": stop_torchrun, "srun": stop_step}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", STOPS)
def test_it_stops_and_goes_on_with_the_same_bits(kind, start, cluster, tmp_path):
    """Whoever started it starts it again; torchrun loses what its workers end with."""
    (command,) = [one for one in COMMANDS if one.startswith(kind)]
    command = command.replace("torchrun", "torchrun --standalone")  # two tests may run at a time
    whole = start(command, tmp_path / "whole")
    assert whole.wait(280) == 0, whole.output
    stopped = start(command, tmp_path / "stopped")

    def has_begun():
        progress = ledger.read_progress(tmp_path / "stopped/checkpoints")
        return progress is not None and progress.step > 20

    stopped.wait_for(has_begun, "step 20", 120)
    STOPS[kind](stopped, cluster)
    assert "stopped by SIG" in stopped.output
    again = start(command, tmp_path / "stopped")
    assert again.wait(280) == 0, again.output
    assert "Training resumes at step" in again.output
    assert_same_bits(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_launcher_starts_the_ranks(kind, start, tmp_path):
    """Two here, four on two nodes; each prints into a log of its own."""
    (command,) = [one for one in COMMANDS if f"hydra/launcher={kind}" in one]
    sweep = start(command, tmp_path / "sweep")
    assert sweep.wait(280) == 0, sweep.output
    logs = {path.name for path in tmp_path.glob("sweep/multirun/*/*/0/output.log*")}
    count = {"local": 2, "slurm": 4}[kind]
    assert logs == {"output.log", *(f"output.log.{rank}" for rank in range(1, count))}
    (job,) = tmp_path.glob("sweep/multirun/*/*/0")
    assert "Training finished at step 500" in (job / "output.log").read_text()
