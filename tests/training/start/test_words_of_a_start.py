"""What a start and an end say to a person, and that commands which they print can be typed."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import small_scripts
from forked import completed

SCRIPT = """
import forge, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
with forge.Run({"checkpoint": {"dir": "ck", "every_steps": 4}}, model=model) as run:
    for step in run.steps(8):
        strike(step)
"""


def test_a_finished_script_that_is_started_again_says_one_line(tmp_path):
    """It said five, most of them about how to resume what has nothing left to do."""
    (first,) = small_scripts.starts(tmp_path, SCRIPT)
    assert "Training finished at step 8" in first.stdout
    again = completed(["script.py"], tmp_path)
    (line,) = again.stdout.splitlines()
    assert "Training already finished at step 8: nothing to do" in line
    assert "To train again from step 0, use another directory than" in line


STDIN = small_scripts.STRIKE + SCRIPT


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-"], "its program was read from standard input"),
        ([sys.executable], "its program was read from standard input"),
        ([sys.executable, "ipykernel_launcher.py", "-f", "kernel.json"], "it runs in a notebook"),
    ],
    ids=["dash", "pipe", "notebook"],
)
def test_no_command_is_printed_that_cannot_resume_the_job(command, why, tmp_path):
    """`ipykernel_launcher -f …` starts a kernel, and `python -` waits for a program."""
    (tmp_path / "ipykernel_launcher.py").write_text(STDIN)  # as a kernel has it in sys.argv
    env = {**os.environ, "STRIKE": "5:TERM"}
    done = subprocess.run(
        command, input=STDIN, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.count(f"run the same code again: no command can, since {why}") == 2
    assert "kernel.json" not in done.stderr
    assert not (tmp_path / "ck" / ".forge" / "resume.sh").exists()


def test_variables_of_ranks_that_nobody_started_have_a_cure(tmp_path):
    """They stay in a shell from an earlier command; advice about MASTER_ADDR does not help."""
    (tmp_path / "script.py").write_text(STDIN)
    done = completed(["script.py"], tmp_path, RANK="0", WORLD_SIZE="4", MASTER_ADDR="")
    assert done.returncode == 78
    assert "If no launcher has started ranks: `unset RANK WORLD_SIZE`." in done.stdout


FILLS = """
import os, forge, torch
model = torch.nn.Linear(256, 256)
policy = {"checkpoint": {"dir": "ck", "every_steps": 1, "async_save": False, "keep_last": 1}}
with forge.Run(policy, model=model) as run:
    for step in run.steps(40):
        if step >= 2:  # again: a checkpoint that is removed later makes room
            with open("full", "ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 12))
                except OSError:
                    pass
"""


def test_a_full_disk_says_how_much_a_checkpoint_needs_and_how_much_is_free(disk, tmp_path):
    """The advice named a key, and neither number."""
    (tmp_path / "script.py").write_text(FILLS)
    mount = f"mount -t tmpfs -o size=3M tmpfs {disk} && cd {disk}"
    script = f"{mount} && exec {sys.executable} {tmp_path / 'script.py'}"
    unshare = [str(shutil.which("unshare")), "-m", "sh", "-c", script]
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=200)
    assert done.returncode == 71, done.stderr
    said = r"A checkpoint has 2\d\d,\d{3} bytes, and \S+/ck has 0 bytes free"
    assert re.search(said, done.stderr), done.stderr  # 256 * 257 floats, and some names
