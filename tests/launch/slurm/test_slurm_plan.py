"""`forge plan` prints what would be submitted, without a cluster."""

import os
import shutil
import subprocess
import sys

import pytest
import warm
from harness import FORGE
from rows import few
from sweeps import App

from forge.cli.plan import command_of
from forge.slurm.client import Queued
from forge.slurm.submitted import Submitted

TRAIN = """
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        print("it ran")

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 1
"""


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app", TRAIN, CONF)


def run(app, *command, **environment):
    """Run a command without a cluster; without the empty file Slurm would search for a minute."""
    (app.folder / "none.conf").touch()
    return warm.run(
        [sys.executable, *command],
        cwd=app.folder,
        env=os.environ | {"SLURM_CONF": str(app.folder / "none.conf")} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=120,
        start_new_session=True,
        is_parent=True,
    )


def plan(app, *overrides):
    return run(app, FORGE, "plan", "train.py", *overrides)


def test_the_plan_has_the_script_the_signals_and_every_job(app):
    """Four jobs, of which two each have the same sbatch options, are two arrays."""
    done = plan(
        app,
        "resilience.slurm.timeout_min=10,20",
        "lr=1,2",
        "hydra.launcher.array_parallelism=1",
        "hydra.launcher.mem_gb=4",
        "hydra.launcher.setup=[module load cuda]",
        "hydra.launcher.teardown=[echo over]",
        f"hydra.sweep.dir={app.sweep_dir}",
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for line in ("#SBATCH --mem=4GB", "#SBATCH --requeue", "#SBATCH --signal=USR2@120"):
        assert shown.count(line + "\n") == 2
    assert shown.count("#SBATCH --array=0-1%1\n") == 2
    assert "#SBATCH --time=10\n" in shown
    assert "#SBATCH --time=20\n" in shown
    first = shown.index("module load cuda")
    wrapper = shown.index("forge.slurm.wrapper")
    assert first < wrapper < shown.index("echo over") < shown.rindex('exit "$forge_code"')
    assert "T=10 min:  at T-120 s USR2, saves and requeues · at T-30 s forced exit" in shown
    for number in range(4):
        assert f"{app.sweep_dir}/{number}" in shown
    assert "The cluster did not answer" in shown
    assert "it ran" not in shown
    assert not (app.sweep_dir / ".forge").exists()


@pytest.mark.parametrize("section", few(1, ["", "resilience: {enabled: false}\n"]))
def test_a_job_without_a_policy_is_requeued_as_the_site_has_it_and_gets_no_signal(app, section):
    """Such a job has no signal handlers, so the signal would kill it."""
    (app.folder / "conf.yaml").write_text(f"{section}lr: 1\n")
    done = plan(app, "lr=1")
    assert "#SBATCH --time=60\n" in done.stdout
    assert "#SBATCH --requeue" not in done.stdout
    assert "#SBATCH --no-requeue" not in done.stdout
    assert "--signal" not in done.stdout
    if not section:
        return
    done = plan(app, "lr=1", "+resilience.requeue.enabled=false", "++resilience.enabled=true")
    assert "#SBATCH --no-requeue\n" in done.stdout


def test_a_plan_is_refused_as_the_sweep_would_be(app):
    """The message and the exit code are those of the sweep."""
    done = plan(app, "hydra.launcher.timeout_min=2")
    assert done.returncode == 78
    said = "`resilience.signal.warning_s=120` is not below the time limit of 120 s"
    assert said in done.stdout + done.stderr
    done = plan(app, "lr=1", "+hydra.launcher.additional_parameters.signal=USR1@5")
    assert done.returncode == 78
    assert "resilience.signal.name" in done.stdout + done.stderr


def test_without_m_nothing_is_trained_on_the_login_node(app):
    """Without -m Hydra would ignore the launcher, and run main in this process."""
    done = run(app, "train.py", "hydra/launcher=slurm", "lr=3")
    assert done.returncode == 78
    assert "python train.py -m hydra/launcher=slurm lr=3" in done.stdout + done.stderr
    assert "it ran" not in done.stdout


def test_a_sweeper_that_needs_values_has_to_wait(app):
    """A launcher that does not wait returns None, from which the sweeper cannot choose."""
    plugin = app.folder / "hydra_plugins" / "fussy.py"
    plugin.parent.mkdir()
    text = "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\n"
    plugin.write_text(f"{text}\n\nclass Fussy(BasicSweeper):\n    pass\n")
    done = run(
        app,
        "train.py",
        "-m",
        "hydra/launcher=slurm",
        "hydra.launcher.wait=false",
        "hydra.sweeper._target_=hydra_plugins.fussy.Fussy",
    )
    assert done.returncode != 0
    assert "Fussy" in done.stdout + done.stderr
    assert "the launcher has to wait" in done.stdout + done.stderr


def test_a_cluster_that_does_not_answer_is_told_at_the_submission(app):
    """The error quotes sbatch, and names the folder of the batch script."""
    if shutil.which("sbatch") is None:  # what it says on a machine that has one
        sbatch = app.folder / "sbatch"
        sbatch.write_text("#!/bin/sh\necho sbatch: error: no controller >&2\nexit 1\n")
        sbatch.chmod(0o755)
    path = os.pathsep.join([os.environ["PATH"], str(app.folder)])
    submission = ("train.py", "-m", "hydra/launcher=slurm", f"hydra.sweep.dir={app.sweep_dir}")
    done = run(app, *submission, PATH=path)
    assert done.returncode == 78
    assert "sbatch: " in done.stdout + done.stderr
    assert str(app.sweep_dir / ".forge" / "slurm") in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train.py"], ["train.py", "-m", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]),
        (
            ["-m", "pkg.train", "-m", "lr=1,2", "hydra/launcher=slurm"],
            [
                *("-m", "pkg.train", "-m", "lr=1,2"),
                *("hydra/launcher=slurm", "hydra.launcher.dry_run=true"),
            ],
        ),
    ],
)
def test_the_plan_is_the_app_s_own_command(given, expected):
    """`forge plan` runs the script itself, so the plan cannot differ from the submission."""
    assert command_of(given) == [sys.executable, *expected]


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "-m"], ["plan", "nowhere.py"]])
def test_a_plan_of_no_script_shows_the_usage(arguments, app):
    """The exit code is 2, like argparse's."""
    done = run(app, FORGE, *arguments)
    assert done.returncode == 2
    assert "usage: forge " in done.stderr


def test_an_answer_that_was_never_heard_is_found_in_the_queue(tmp_path):
    """A launcher that is killed while sbatch runs must not submit everything a second time."""
    (tmp_path / ".forge" / "slurm").mkdir(parents=True)
    first, second = tmp_path / "1.sh", tmp_path / "2.sh"
    submitted = Submitted(tmp_path)
    assert submitted.is_empty
    submitted.note_request(first, [0, 1, 2], ["a", "b", "c"])
    submitted.note_answer(first, "12")
    submitted.note_request(second, [3, 5], ["d", "e"])
    again = Submitted(tmp_path)
    assert again.ids == {0: "12_0", 1: "12_1", 2: "12_2"}
    again.find_lost(
        {
            "12_0": Queued("RUNNING", "None", str(first)),
            "13_0": Queued("PENDING", "Priority", str(second)),
            "13_1": Queued("PENDING", "Priority", str(second)),
        }
    )
    assert again.ids == {0: "12_0", 1: "12_1", 2: "12_2", 3: "13_0", 5: "13_1"}
    again.note_request(tmp_path / "3.sh", [5], ["e"])
    again.note_answer(tmp_path / "3.sh", "14")
    assert Submitted(tmp_path).ids[5] == "14"


def test_a_machine_without_sbatch_submits_nothing_and_says_where_to_submit(app):
    """The launcher must not suggest to submit its batch script later on this machine."""
    sweep = ("-m", "hydra/launcher=slurm", f"hydra.sweep.dir={app.sweep_dir}")
    done = run(app, "train.py", *sweep, PATH=str(app.folder))
    assert done.returncode == 78
    assert "sbatch was not found: " in done.stdout
    assert "from a login node of the cluster" in done.stdout
    assert not list(app.sweep_dir.rglob("*.sh"))
