"""Programs and child processes that a job starts: which of them can train."""

import contextlib

import pytest
from forked import completed
from sweeps import CONF, App

from forge.jobdir.job_files import TOKEN

BY_PROGRAM = """
    import subprocess, sys
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        sys.exit(subprocess.run([sys.executable, "other.py"]).returncode)

    if __name__ == "__main__":
        main()
"""
OTHER = """
import torch, forge
with forge.Run(model=torch.nn.Linear(1, 1)) as run:
    list(run.steps(3))
"""

CHILD = """
import multiprocessing, sys
import torch, forge

def train():
    with forge.Run({"checkpoint": {"dir": "checkpoints"}}, model=torch.nn.Linear(1, 1)) as run:
        list(run.steps(3))

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
sys.exit(child.exitcode)
"""


def test_a_run_in_a_child_of_multiprocessing_is_refused_by_name(tmp_path):
    """No signal reaches it, and its end is not the job's; torchrun starts ranks that can train."""
    (tmp_path / "train.py").write_text(CHILD)
    done = completed(["train.py"], tmp_path)
    assert done.returncode == 78
    said = done.stdout.replace("\n", " ")
    assert "a child process of multiprocessing (torch.multiprocessing.spawn" in said
    assert "start several ranks with torchrun, srun or" in said
    assert not (tmp_path / "checkpoints").exists()


def test_another_program_that_a_job_starts_is_no_part_of_it(tmp_path):
    """The program does not know the job's directory; `./checkpoints` would be shared by all."""
    (tmp_path / "other.py").write_text(OTHER)
    done = completed(["other.py"], tmp_path, **{TOKEN: "a job's"})
    assert done.returncode == 78
    said = done.stdout.replace("\n", " ")
    assert "cannot tell which job of the sweep this program belongs to" in said
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.proofs
def test_another_program_with_a_directory_of_its_own_trains(tmp_path):
    app = App(tmp_path / "app", BY_PROGRAM, CONF)
    own = app.folder / "own"
    text = OTHER.replace("forge.Run(", f"forge.Run({{'checkpoint': {{'dir': {str(own)!r}}}}}, ")
    (app.folder / "other.py").write_text(text)
    with contextlib.closing(app):
        app.finish("lr=0.1")
    assert (own / "step_3").is_dir()
