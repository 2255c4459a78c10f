"""`resume.sh`: it resumes what it lies in, from anywhere, with the same bits."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from forked import completed
from harness import assert_same_bits
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_apps import App
from omegaconf import OmegaConf

from forge.jobdir import job_dir, ledger
from forge.jobdir.job_files import forge_dir

PLAIN = """
import os, signal, sys
import forge

os.chdir(sys.argv[2])
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # as torch does when it starts
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
policy = {"checkpoint": {"dir": sys.argv[1]}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for step in run.steps(6):
        loss = model(torch.randn(3, 2)).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        if step == 2 and run.resumed_from is None:
            os.kill(os.getpid(), signal.SIGTERM)
open("threads.txt", "w").write(f"{torch.get_num_threads()} {os.environ.get('OMP_NUM_THREADS')}")
open("parent.txt", "w").write(str(os.getppid()))
"""


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app")


def resume(job: Path, **env: str) -> subprocess.CompletedProcess:
    """By a shell and a new Python; `warm.run_script` is faster."""
    return subprocess.run(
        ["sh", forge_dir(job) / "resume.sh"],
        cwd="/",
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | env,
    )


def test_a_directory_that_was_moved_or_copied_is_resumed_where_it_lies_now(app):
    """The resumed job must not train from step 0 in the original directory."""
    own = "resilience.checkpoint.dir='${hydra:runtime.output_dir}/mine'"
    assert app.run("hydra.run.dir=whole", own).returncode == 0
    assert app.run("hydra.run.dir=job", "signal_in=3", own).returncode == 143
    copy = app.folder / "a copy's {x}"
    shutil.copytree(app.folder / "job", copy, symlinks=True)
    (app.folder / "job").rename(app.folder / "moved")
    for job in (copy, app.folder / "moved"):
        resumed = warm.run_script(forge_dir(job) / "resume.sh")
        assert resumed.returncode == 0, resumed.stdout
        (start,) = (e for e in ledger.read(job).attempts[-1].events if e["kind"] == "start")
        assert start["resumed_from"] == "step_4"
        assert_same_bits(app.weights("whole"), app.weights(job.name))
        assert (job / "mine/latest").exists()
    assert not (app.folder / "job").exists()


def test_a_script_that_goes_elsewhere_is_resumed_from_where_it_was_started(tmp_path):
    """The script's path and arguments are relative to the directory in which it was started."""
    (tmp_path / "there").mkdir()
    (tmp_path / "train.py").write_text(PLAIN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", "ck", "there"]
    assert warm.run(command, cwd=tmp_path, env=environment, timeout=120).returncode == 143
    job = tmp_path / "there/ck"
    resumed = resume(job, OMP_NUM_THREADS="2")
    assert resumed.returncode == 0, resumed.stdout
    assert (tmp_path / "there/threads.txt").read_text() == "1 1", "the order of sums"
    parent = int((tmp_path / "there/parent.txt").read_text())
    assert parent == os.getpid(), "a shell in between, which would keep a signal to itself"
    shutil.copytree(job, tmp_path / "copy", symlinks=True)
    refused = resume(tmp_path / "copy")
    assert refused.returncode == 78, refused.stdout
    assert f"started in {job}, but its directory is now {tmp_path}/copy" in refused.stdout


def test_another_number_of_threads_is_put_right_and_named(tmp_path):
    """With another number of threads, sums are computed in another order, with other bits."""
    (tmp_path / "train.py").write_text(PLAIN)
    for threads, code in (("2", 143), ("1", 0)):
        done = completed(["train.py", "ck", "."], tmp_path, OMP_NUM_THREADS=threads)
        assert done.returncode == code, done.stdout
    assert "torch had 1 threads here, but 2 when this job was first started" in done.stdout
    assert (tmp_path / "threads.txt").read_text() == "2 1"


def test_any_directory_is_read_back_by_hydra_from_the_command_and_from_the_script(tmp_path):
    """Quotes, backslashes, and text that looks like an interpolation."""
    parser, chance = OverridesParser.create(), random.Random(1)
    letters = [
        "\\",
        "'",
        '"',
        "$",
        "{",
        "}",
        "${",
        "a",
        " ",
        ",",
        "=",
        "(",
        "[",
        "ü",
        "~",
        "1",
        "`",
    ]
    names = ["/" + "".join(chance.choices(letters, k=chance.randint(0, 6))) for _ in range(500)]
    script = (
        "while IFS= read -r here; do\n" + job_dir.QUOTING + '\nprintf "\'%s\'\\n" "$quoted"\ndone'
    )
    shell = subprocess.run(
        ["sh", "-c", script], input="\n".join(names[:60]) + "\n", text=True, capture_output=True
    )
    by_script = [*shell.stdout.splitlines(), *[None] * len(names)]
    for name, quoted in zip(names, by_script, strict=False):
        for one in filter(None, [job_dir.hydra_quoted(name), quoted]):
            value = parser.parse_override(f"k={one}").value()
            assert OmegaConf.create({"k": str(value)}).k == name
