"""What forge needs of submitit's private parts."""

import subprocess
import sys

import submitit
from contracts import contract

from forge.compat import of_submitit


class Executor(submitit.SlurmExecutor):
    """One that needs no Slurm."""

    @classmethod
    def affinity(cls):
        return 1


def test_sbatch_text(tmp_path):
    """A batch script of ours has submitit's header, with its keys and their meaning."""
    with contract(of_submitit.sbatch_text, of_submitit.slurm_parameters):
        executor = Executor(folder=tmp_path)
        generic = {"mem_gb": 2, "name": "train", "tasks_per_node": 1}
        parameters = of_submitit.slurm_parameters(executor, generic)
        assert parameters == {"mem": "2GB", "job_name": "train", "ntasks_per_node": 1}
        executor.update_parameters(**parameters, time=7, use_srun=False)
        lines = of_submitit.sbatch_text(executor, "echo done").splitlines()
        assert lines[0] == "#!/bin/bash"
        assert {"#SBATCH --mem=2GB", "#SBATCH --job-name=train", "#SBATCH --time=7"} <= set(lines)
        assert lines[-1] == "echo done"


def test_the_module_that_runs_a_job():
    """A LocalExecutor's job is started by it again, with its folder."""
    with contract(of_submitit.sbatch_text):
        command = [sys.executable, "-m", of_submitit.SUBMIT_MODULE, "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "folder" in done.stdout, done.stderr
