"""A job keeps the config of its first start, and prints a command that resumes it (real apps)."""

import json
import os
import subprocess
import sys

import pytest
import warm
from harness import assert_same_bits, wait_for
from hydra_apps import App


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "user's project")  # a name that has to be quoted


def test_the_printed_command_goes_on_with_the_bits_of_a_plain_loop(app):
    """A bare `python train.py` would start a new directory and train from the first step.

    They are the bits of the preset `disabled`, a plain loop, which users need for profiling, and to
    find out whether forge causes a bug.
    """
    plain = app.run("hydra.run.dir=whole", "lr=0.2", "resilience=disabled")
    assert plain.returncode == 0, plain.stdout
    assert not (app.folder / "whole/.forge").exists()
    assert not (app.folder / "whole/checkpoints").exists()
    stopped = app.run("hydra.run.dir=cut", "lr=0.2", "+signal_in=3".replace("+", ""))
    assert stopped.returncode == 143, stopped.stdout
    resumed = app.resume(stopped.stdout, in_shell=True, is_forked=False)
    assert resumed.returncode == 0, resumed.stdout
    assert_same_bits(app.weights("whole"), app.weights("cut"))
    assert (app.folder / "cut/.forge/resume.sh").read_text().splitlines()[-1].startswith("cd ")


def test_the_default_output_directory_works_too_and_interpolations_are_resolved_once(app):
    """Most jobs use Hydra's own directory, named after date and time.

    If `${now:…}` were resolved at every start, names would change during a run.
    """
    stopped = app.run("signal_in=3")
    assert stopped.returncode == 143, stopped.stdout
    assert app.resume(stopped.stdout).returncode == 0
    (weights,) = app.folder.glob("outputs/*/*/weights.pt")
    job = weights.parent
    assert len(app.seen(job)) == 2
    assert len(set(app.seen(job))) == 1
    assert "Later changes of config files" not in (job / "train.log").read_text()


def test_an_edited_config_file_does_not_reach_a_running_job(app):
    """The user can edit the files for the next experiment while the job waits in the queue."""
    stopped = app.run("hydra.run.dir=job", "signal_in=3")
    assert stopped.returncode == 143, stopped.stdout
    config = app.folder / "train.yaml"
    config.write_text(config.read_text().replace("lr: 0.1", "lr: 0.7").replace("plain", "other"))
    resumed = app.resume(stopped.stdout)
    assert resumed.returncode == 0, resumed.stdout
    first, second = app.seen("job")
    assert first == second
    assert "lr=0.1 (now 0.7)" in resumed.stdout
    assert "name=plain (now other)" in resumed.stdout


def test_overrides_may_be_left_out_or_repeated_but_not_contradicted(app):
    """A contradicting override must neither change the job silently nor be ignored silently."""
    assert app.run("hydra.run.dir=job", "signal_in=3", "lr=0.3").returncode == 143
    refused = app.run("hydra.run.dir=job", "lr=0.4")
    assert refused.returncode == 78
    assert "lr=0.4" in refused.stdout
    assert "new directory" in refused.stdout
    assert app.run("hydra.run.dir=job", "lr=0.3").returncode == 0
    assert app.seen("job")[0].split()[0] == app.seen("job")[1].split()[0] == "lr=0.3"


def test_another_choice_of_a_group_is_a_contradiction_wherever_its_content_goes(app):
    """Regression test: the values of another experiment file were ignored like an edited file."""
    for name, rate in (("small", 0.2), ("large", 0.4)):
        for group, head in (("experiment", "# @package _global_\n"), ("model", "")):
            (app.folder / group).mkdir(exist_ok=True)
            (app.folder / group / f"{name}.yaml").write_text(f"{head}lr: {rate}\n")
    first = ("+experiment=small", "+model@net=small")
    assert app.run("hydra.run.dir=job", "signal_in=3", *first).returncode == 143
    for other in (("+experiment=large", first[1]), (first[0], "+model@net=large")):
        refused = app.run("hydra.run.dir=job", *other)
        assert refused.returncode == 78, refused.stdout
        assert "lr: 0.2 before, 0.4 now" in refused.stdout
    again = app.run("hydra.run.dir=job", "resilience.nan.action=halt", *first)
    assert again.returncode == 0, again.stdout
    assert "have changed" not in again.stdout


def test_changed_code_is_refused_or_named_and_the_policy_may_be_changed_at_any_start(app):
    """After an edit a requeued job would run the old state with the new code.

    The policy does not affect the results of a job; a changed value is kept from then on.
    """
    where = ("hydra.run.dir=job", "signal_in=3")
    assert app.run(*where, "resilience.requeue.on_code_change=refuse").returncode == 143
    with (app.folder / "train.py").open("a") as file:
        file.write("# edited\n")
    refused = app.run("hydra.run.dir=job")
    assert refused.returncode == 78
    assert "start the job with `resilience.requeue.on_code_change=warn`" in refused.stdout
    assert (app.folder / "job/checkpoints/latest").exists()
    keep = ("resilience.checkpoint.every_steps=1", "~resilience.signal.actions.USR1")
    warned = app.run("hydra.run.dir=job", "resilience.requeue.on_code_change=warn", *keep)
    assert warned.returncode == 0, warned.stdout
    assert "train.py" in warned.stdout
    assert "code changed" in warned.stdout
    assert sorted(p.name for p in app.folder.glob("job/checkpoints/step_*"))[0] == "step_6"
    stored = (app.folder / "job/.forge/config.yaml").read_text()
    assert "on_code_change: warn" in stored
    assert "USR1" not in stored
    assert app.run("hydra.run.dir=job").returncode == 0
    assert app.run("hydra.run.dir=job", "lr=0.4", *keep).returncode == 78


def test_a_signal_before_training_prints_the_command_too(app):
    """Hydra has created the job's directory by then, and the next start should use it again."""
    stopped = app.run("hydra.run.dir=job", "signal_in=building")
    assert stopped.returncode == 143, stopped.stdout
    assert "nothing to save" in stopped.stdout
    assert "hydra.run.dir=" in stopped.stdout


def test_a_policy_problem_ends_the_job_before_anything_is_built(app):
    """The job prints all problems and exits with 78 before it spends minutes on loading data."""
    result = app.run(
        "hydra.run.dir=job",
        "resilience.nan.action=skp",
        "resilience.checkpoint.every_steps=0",
        "resilience.signal.warning_s=0",
    )
    assert result.returncode == 78
    for key in ("nan.action=skp", "checkpoint.every_steps=0", "signal.warning_s=0"):
        assert f"`resilience.{key}`" in result.stdout
    assert not (app.folder / "job/seen.txt").exists()


def test_a_second_job_in_the_directory_of_a_running_one_is_refused(app):
    """Two jobs started in the same second get the same directory from Hydra."""
    config = app.folder / "train.yaml"
    config.write_text(config.read_text().replace("steps: 8", "steps: 100000000"))
    first = warm.Popen(
        [sys.executable, "train.py", "hydra.run.dir=job"],
        cwd=app.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((app.folder / "job/.forge/progress").exists, first, "training")
        second = app.run("hydra.run.dir=job")
        assert second.returncode == 73, second.stdout
        assert f"pid {first.pid}" in second.stdout
    finally:
        first.kill()
        first.wait()


def test_a_sweep_with_hydras_own_launcher_keeps_its_jobs_apart(app):
    """Hydra's basic launcher runs the jobs of `-m` one after the other in one process."""
    result = app.run("-m", "hydra.sweep.dir=sweep", "lr=0.1,0.2")
    assert result.returncode == 0, result.stdout
    assert sorted(p.parent.name for p in app.folder.glob("sweep/*/weights.pt")) == list("01")
    assert [app.seen(f"sweep/{i}")[0].split()[0] for i in range(2)] == ["lr=0.1", "lr=0.2"]


def test_a_job_of_a_sweep_is_resumed_by_itself(app):
    """The printed command names the job's own overrides and directory, not the sweep."""
    stopped = app.run("-m", "hydra.sweep.dir=sweep", "lr=0.1,0.2", "signal_in=3")
    assert stopped.returncode == 143, stopped.stdout
    resumed = app.resume(stopped.stdout)
    assert resumed.returncode == 0, resumed.stdout
    assert (app.folder / "sweep/0/weights.pt").exists()


def test_checkpoints_may_lie_elsewhere(app, tmp_path):
    """Checkpoints can go to a fast scratch disk, while the job's own directory stays small."""
    scratch = tmp_path / "scratch"
    stopped = app.run("hydra.run.dir=job", "signal_in=3", f"resilience.checkpoint.dir={scratch}")
    assert stopped.returncode == 143, stopped.stdout
    assert (scratch / "latest").resolve().name == "step_4"
    assert app.resume(stopped.stdout).returncode == 0
    verdict = json.loads((app.folder / "job/.forge/verdict.json").read_text())
    assert (verdict["reason"], verdict["step"], verdict["exit_code"]) == ("finished", 8, 0)


def test_other_ways_to_start_an_app_are_resumed_too(app):
    """The printed command has to repeat options such as `python -m` and `--config-name`."""
    os.rename(app.folder / "train.yaml", app.folder / "other.yaml")
    command = ["-m", "train", "--config-name", "other", "hydra.run.dir=job", "signal_in=3"]
    stopped = app.python(*command)
    assert stopped.returncode == 143, stopped.stdout
    assert app.resume(stopped.stdout).returncode == 0
