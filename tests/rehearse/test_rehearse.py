"""`forge rehearse` with scripts that resume exactly, that do not, and that cannot be rehearsed."""

import re
import signal
import sys
from pathlib import Path

import pytest
from rehearse_all import CASES, SCRIPTS

from forge.errors import ExitCode
from forge.jobdir.job_files import REHEARSAL
from forge.process import processes
from forge.rehearse import command, verdicts
from forge.rehearse.command import main
from forge.rehearse.verdicts import NO_VERDICT

HEADER = "import random, sys, torch, forge\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1)\n"
LOOP = """
with forge.Run({policy}, model=model) as run:
    for step in run.steps(6):
        with torch.no_grad():
            model.weight += torch.rand(1, 2)
        run.log(weight=model.weight.sum())
"""


# -- whole rehearsals --------------------------------------------------------------------------

PATIENCE_S = 900
"""Seconds for a whole rehearsal (five starts of a script) while other tests run."""


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 30)
@pytest.mark.parametrize(
    "name", ["flat/regression.py", pytest.param("flat/gpt.py", marks=pytest.mark.proofs)]
)
def test_a_script_that_registers_all_its_state_is_identical(rehearsed, name):
    """Scripts with and without Hydra; the interrupted run is stopped once and killed once."""
    (case,) = (case for case in CASES if case.command == name)
    assert rehearsed.run_command(case.argv, timeout_s=PATIENCE_S) == 0, rehearsed.output
    row = re.search(
        r"interrupted 1 .*(SIG\w+) (\d+) → (\d+), (SIG\w+) .* identical", rehearsed.output
    )
    assert row, rehearsed.output
    assert "SIGKILL" in row.groups()
    assert not [path for path in rehearsed.folder.iterdir() if path.name in ("outputs", "multirun")]


@pytest.mark.proofs
@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 30)
@pytest.mark.parametrize("name", ["flat/numpy_batches.py", "flat/semi_supervised.py"])
def test_a_script_that_keeps_state_outside_is_caught(rehearsed, name):
    """The output names the first step and leaf that differ, and a command that repeats the run."""
    (case,) = (case for case in CASES if case.command == name)
    assert rehearsed.run_command(case.argv, timeout_s=PATIENCE_S) == 1, rehearsed.output
    found = re.search(r"^  step (\d+): loss: float \S+ → float \S+$", rehearsed.output, re.M)
    assert found, rehearsed.output
    resumed = re.search(r"interrupted 1 .*? → (\d+)", rehearsed.output)
    assert resumed
    assert int(found[1]) >= int(resumed[1])
    assert re.search(r"^  leaf live\.states\.model\..*\d differ, largest", rehearsed.output, re.M)
    assert (
        f"to repeat it: forge rehearse --times 1 --seed 7 -- {sys.executable} " in rehearsed.output
    )
    assert "DIFFERENT: 1 of 1 interrupted run did not end with the same bits (" in rehearsed.output
    step = int(re.search(r"different after the resume at step (\d+):$", rehearsed.output, re.M)[1])
    assert step in [int(one) for one in re.findall(r"→ (\d+)[, ]", rehearsed.output)]
    assert re.search(rf"^    \S+: `{case.variable}`: ", rehearsed.output, re.M)


def test_every_script_has_a_verdict_that_is_expected():
    """A script that no case rehearses would test nothing."""
    known = {case.command.split()[0] for case in CASES} | {"planted/moments.py"}
    there = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.glob("*/*.py")}
    styles = {path.stem for path in SCRIPTS.glob("*.txt")}
    assert known == there | {f"{one}/{name}.py" for one in styles for name in ("written", "fixed")}


EPOCHS = """
best = float("inf")
loader = torch.utils.data.DataLoader(torch.arange(12.0), 4, shuffle=True)
with forge.Run({"checkpoint": {"every_steps": 2}}, model=model) as run:
    for epoch in run.epochs(4):
        for step, x in run.batches(loader):
            with torch.no_grad():
                model.weight += torch.rand(1, 2) + x.mean()
        value = float(model.weight.sum())
        best = min(best, value)
        print(f"epoch {epoch}: best {best:.4f}")
        run.log(value=value, best=best)
"""


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 30)
def test_of_a_script_that_thinks_in_epochs_what_it_forgets_is_named(rehearsed):
    """`best` is kept between epochs and is named; `value` is computed in each epoch and is not.

    The lines with `best` that the script prints differ, too.
    """
    options = ("--times", "1", "--seed", "5")
    assert rehearsed.run(HEADER + EPOCHS, options=options) == 1, rehearsed.output
    assert re.search(r"^  step \d+: best: float", rehearsed.output, re.M)
    assert re.search(r"^  printed: epoch \d: best ", rehearsed.output, re.M)
    named = re.findall(r"^    train.py: `(\w+)`: inf, but \d", rehearsed.output, re.M)
    assert named == ["best"], rehearsed.output
    assert len(re.findall(r"^    \S+: `", rehearsed.output, re.M)) == 1, rehearsed.output
    assert "  → keep `best` in run.state" in rehearsed.output
    assert (
        "0 steps were trained twice, in 1 run that was stopped by a signal that allows a save"
        in rehearsed.output
    )
    assert "Not tested" not in rehearsed.output
    assert "outlived" not in rehearsed.output


def test_two_uninterrupted_runs_that_differ_are_not_blamed_on_a_resume(rehearsed):
    """With an unseeded random generator the runs differ even without a resume."""
    script = HEADER + "model.weight.data += random.random()\n" + LOOP.format(policy="None")
    assert rehearsed.run(script) == 1, rehearsed.output
    assert "Two uninterrupted runs differ" in rehearsed.output
    assert re.search(r"leaf live\.states\.model\.weight: \d+ of \d+ differ", rehearsed.output)
    assert "step 0: weight: float" in rehearsed.output
    assert "interrupted 1" not in re.sub("uninterrupted", "", rehearsed.output)


def test_a_script_that_fails_uninterrupted_shows_its_last_lines(rehearsed):
    """There is nothing to compare, so the exit code is 3."""
    assert rehearsed.run("print('reading')\nraise ValueError('no such data')") == NO_VERDICT
    assert (
        "Without any interruption, the script exited with code 1. Last lines of "
        in rehearsed.output
    )
    assert "  | ValueError: no such data" in rehearsed.output
    assert f"The files of all runs are in {rehearsed.runs}" in rehearsed.output


def test_a_script_without_a_run_is_an_error(rehearsed):
    """Otherwise two runs without any state would be called identical."""
    assert rehearsed.run("print('done')") == NO_VERDICT
    assert "no forge.Run in it finished" in rehearsed.output


def test_a_script_that_hangs_is_ended_with_all_it_started(rehearsed):
    """A script that hangs must neither block the rehearsal nor leave a process behind."""
    script = "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    script += "print('waits', flush=True)\ntime.sleep(600)"
    process = rehearsed.start(script, options=("--timeout-s", "2"))
    assert rehearsed.ended(process) == NO_VERDICT
    assert "did not end within 2 s" in rehearsed.output
    assert "  | waits" in rehearsed.output
    assert marked(rehearsed.runs) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_a_rehearsal_ends_the_script(rehearsed, number):
    """The script has its own session, which Ctrl+C in the terminal does not reach."""
    process = rehearsed.start("import time\nprint('waits', flush=True)\ntime.sleep(600)")
    log = rehearsed.runs / "uninterrupted_1" / "output.log"
    process.wait_for(lambda: log.exists() and "waits" in log.read_text(), "the script")
    assert len(marked(rehearsed.runs)) == 1
    process.signal(number)
    assert rehearsed.ended(process) == 130
    assert log.exists()
    assert f"The files of all runs are in {rehearsed.runs}" in rehearsed.output
    assert marked(rehearsed.runs) == []


def marked(runs: Path) -> list[int]:
    """Live processes that a rehearsal in this directory has started."""
    return processes.marked(REHEARSAL, str(runs / "uninterrupted_1"))


def test_a_sweep_is_refused(rehearsed):
    """All jobs of the sweep would share one directory."""
    (rehearsed.folder / "train.yaml").write_text("defaults: [resilience: default, _self_]\nx: 1")
    script = (
        "import hydra\n@hydra.main(version_base=None, config_path='.', config_name='train')\n"
        "def main(cfg):\n    print('trains')\nmain()\n"
    )
    assert rehearsed.run(script, "-m", "x=1,2") == NO_VERDICT
    assert "A rehearsal runs a single job: remove -m" in rehearsed.output
    assert "trains" not in rehearsed.output


@pytest.mark.parametrize("arguments", [[], ["--"], ["--times", "0", "--", "true"], ["--x", "true"]])
def test_what_is_no_command_is_refused(arguments, capsys):
    """The error comes before a directory is created."""
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: forge rehearse" in capsys.readouterr().err


def test_a_directory_that_is_there_is_refused(tmp_path, capsys):
    """Otherwise the script would resume from the checkpoints of an earlier rehearsal."""
    with pytest.raises(SystemExit):
        main(["--directory", str(tmp_path), "--", "true"])
    assert f"--directory {tmp_path}: expected a new directory" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_an_error(rehearsed):
    """The exit code is that of `forge exec`, and no file is created."""
    assert rehearsed.run_command(["no-such-python", "train.py"]) == ExitCode.BAD_CONFIG
    assert "no-such-python: expected a program, found none" in rehearsed.output
    assert not rehearsed.runs.exists()


@pytest.mark.parametrize("code", [0, 1])
def test_runs_in_a_temporary_directory_are_kept_only_where_they_differ(
    code, tmp_path, monkeypatch, capsys
):
    """Users need the runs to analyse a difference; other runs would fill the disk."""
    monkeypatch.setattr(verdicts.RehearsalVerdict, "rehearse", lambda self: code)
    monkeypatch.setattr(command.children, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    assert main(["--", "true"]) == code
    kept = list(tmp_path.iterdir())
    assert len(kept) == code
    assert capsys.readouterr().out == "".join(
        f"The files of all runs are in {path}\n" for path in kept
    )
