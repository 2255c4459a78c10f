"""The command that forge prints for a resume, if another program has started the process."""

import os
import subprocess
import sys

TORCHRUN = """
import os, subprocess, sys
environment = os.environ | {"TORCHELASTIC_RUN_ID": "7"}
subprocess.run([sys.executable, "-u", *sys.argv[2:]], env=environment, check=True)
"""
TRAIN = """
from pathlib import Path
from forge.jobdir import job_dir
print(job_dir.resume_command(Path("job")))
"""


def test_the_ranks_of_torchrun_are_resumed_by_torchrun(tmp_path):
    """Without it, the command of a rank would continue the job on one rank."""
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "train.py").write_text(TRAIN)

    def printed(*command):
        return subprocess.check_output([sys.executable, *command], cwd=tmp_path, text=True)

    own = ["train.py", "--lr", "a b"]
    found = printed("torchrun", "--nproc-per-node=2", *own)
    assert found.startswith(f"cd {os.path.realpath(tmp_path)} && ")
    assert found.endswith(f"{sys.executable} torchrun --nproc-per-node=2 train.py --lr 'a b'\n")
    assert printed(*own).endswith(f"{sys.executable} train.py --lr 'a b'\n")
