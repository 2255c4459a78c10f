"""Studies of Optuna whose launchers and jobs are killed: each trial asked once and told once.

`make proofs` installs the packages below the environment: in `sweepers` Hydra's Optuna sweeper with
the release of Optuna that it needs, in `optuna` the current one.
"""

import contextlib
import random
import shutil
import signal
import sqlite3
import sys
import textwrap
from pathlib import Path

import pytest
import readme
import started
from harness import Process, until, wait_for
from repository import ROOT
from slurm_apps import SlurmApp
from sweeps import App

from forge.jobdir import ledger

TRAIN = """
    import sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import torch
    import forge

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
        out = Path(HydraConfig.get().runtime.output_dir)
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step in run.steps(12):
                while (Path(__file__).parent / f"hold {out.name}").exists() and step == 5:
                    if run.is_stopping:
                        break
                    time.sleep(0.01)
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
        return float(model.weight.detach().square().sum())

    if __name__ == "__main__":
        main()
"""
ENQUEUED = """
    import os, random, signal
    import optuna
    from forge.integrations.optuna import optimize

    class Sampler(optuna.samplers.BaseSampler):
        def __init__(self, number):
            self.seed = number

        def infer_relative_search_space(self, study, trial):
            return {}

        def sample_relative(self, study, trial, search_space):
            return {}

        def sample_independent(self, study, trial, name, distribution):
            return random.Random(self.seed).random()

    def objective(trial):
        lr, x = trial.suggest_float("lr", 0, 1), trial.suggest_float("x", 0, 1)
        print(trial.number, lr, x, flush=True)
        if trial.number == 1 and not os.path.exists("killed"):
            open("killed", "x")
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    study = optuna.create_study(study_name="s", storage="sqlite:///s.db", load_if_exists=True)
    if not study.trials:
        for lr in (0.1, 0.2, 0.3):
            study.enqueue_trial({"lr": lr})
    optimize(study, objective, 3, sampler=Sampler)
"""
CONF = (
    readme.blocks("yaml", ROOT / "docs/how-to/optuna.md")[0]
    + """
gates: ""
resilience:
  shutdown: {timeout_s: 20}
  checkpoint: {every_steps: 4, every_s: null}
  health: {enabled: false}
"""
)
SWEEPERS = {"PYTHONPATH": str(Path(sys.prefix, "sweepers"))}
LOCAL = "hydra.launcher.n_jobs=2"
PATIENCE_S = 400.0
"""For a dozen jobs, one after the other."""


def rows(database):
    """(number, state, lr, value) of each trial of a database."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(
            "select number, state, param_value, value from trials"
            " left join trial_params using (trial_id) left join trial_values using (trial_id)"
            " order by number"
        ).fetchall()


def num_trials(database):
    try:
        return len(rows(database))
    except sqlite3.OperationalError:
        return 0  # not there yet


def trained(sweep_dir):
    """For each job, how often its training began at step 0, and whether it finished.

    A job whose launcher is killed after its last step is started again, and trains nothing.
    """
    found = {}
    for job in sorted(sweep_dir.glob("[0-9]*"), key=lambda path: int(path.name)):
        events = [event for one in ledger.read(job).attempts for event in one.events]
        begun = sum(event["kind"] == "start" and event["step"] == 0 for event in events)
        found[int(job.name)] = begun, any(event["kind"] == "finish" for event in events)
    return found


def swept(app, *overrides, kill_at=()):
    """A sweep whose launcher is killed while the given jobs hold in a step."""
    app.popen = started.Popen
    for job in kill_at:
        hold = app.folder / f"hold {job}"
        hold.touch()
        launcher = app.start(*overrides, **SWEEPERS)
        begun = f"step 5 of job {job}"
        wait_for(lambda job=job: app.job(job).step == 5, launcher.popen, begun, PATIENCE_S)
        launcher.signal(signal.SIGKILL)
        launcher.wait()
        hold.unlink()
    last = app.start(*overrides, **SWEEPERS)
    assert last.wait(PATIENCE_S) == 0, last.output
    return rows(app.folder / "study.db")


def assert_each_once(app, found):
    assert [number for number, *_ in found] == list(range(20))
    assert {state for _, state, *_ in found} == {"COMPLETE"}
    assert len({rate for _, _, rate, _ in found}) == 20
    assert trained(app.sweep_dir) == dict.fromkeys(range(20), (1, True))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_sweep_whose_launcher_is_killed_has_each_trial_once(tmp_path):
    """By itself Optuna adds the trials again, and leaves those that were running for ever."""
    whole, killed = App(tmp_path / "whole", TRAIN, CONF), App(tmp_path / "killed", TRAIN, CONF)
    found = swept(killed, LOCAL, kill_at=(5, 14))
    assert_each_once(killed, found)
    assert found == swept(whole, LOCAL)


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_so_has_a_sweep_on_a_cluster(cluster, tmp_path):
    """The jobs continue without their launcher, and the next launcher finds them."""
    app = SlurmApp(cluster, tmp_path / "app", TRAIN, CONF)
    found = swept(app, "resilience.slurm.partition=low", kill_at=(5, 14))
    assert_each_once(app, found)


def test_another_seed_is_refused_before_a_job_starts(tmp_path):
    """Otherwise each restart would train other points, and tell them as the old trials."""
    app = App(tmp_path / "app", TRAIN, CONF)
    few = ("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2", LOCAL)
    swept(app, *few)
    launcher = app.start(*few, "hydra.sweeper.sampler.seed=2", **SWEEPERS)
    assert launcher.wait() != 0
    assert "Trial 0 of the study `lr` in sqlite:///study.db: expected lr=" in launcher.output
    assert len(list(app.sweep_dir.glob("[0-9]*"))) == 2


def test_options_that_lose_trials_are_named_at_the_start(tmp_path):
    """By default the sampler has no seed, and a database gets each trial again."""
    app = App(tmp_path / "app", TRAIN, CONF.replace("seed: 1", "seed: null"))
    app.popen = started.Popen
    few = ("hydra.sweeper.n_trials=1", "hydra.sweeper.storage=sqlite:///s.db", LOCAL)
    launcher = app.start(*few, **SWEEPERS)
    assert launcher.wait() == 0, launcher.output
    assert "`hydra.sweeper.sampler.seed=null`: if this launcher is killed" in launcher.output
    assert "{_target_: forge.integrations.optuna.Storage, url: sqlite:///s.db}" in launcher.output


@pytest.mark.parametrize("packages", ["optuna", "sweepers"])
def test_a_script_with_a_study_continues_its_trial(tmp_path, packages):
    """The example, killed and stopped in several trials, ends with the same study."""
    kills = [(2, signal.SIGKILL), (5, signal.SIGTERM), (8, signal.SIGKILL)]
    env = {"PYTHONPATH": str(Path(sys.prefix, packages))}
    printed = []
    for plan in ([], kills):
        folder = tmp_path / f"{len(plan)} kills"
        folder.mkdir()
        shutil.copy(ROOT / "examples/gallery/optuna_study.py", folder)
        command = [sys.executable, "optuna_study.py"]
        for number, signum in plan:
            process = Process(command, folder / "output.txt", folder, **env)
            until(
                lambda number=number, f=folder: is_in_trial(f, number), f"trial {number} under way"
            )
            process.signal(signum)
            assert process.wait() == (143 if signum == signal.SIGTERM else -9), process.output
        process = Process(command, folder / "last.txt", folder, **env)
        assert process.wait() == 0, process.output
        printed.append([line for line in process.output.splitlines() if line[0].isdigit()])
    assert len(printed[0]) == 10
    assert printed[0] == printed[1]
    assert any(" PRUNED " in line for line in printed[1])
    states = [event["kind"] for one in ledger.read(folder / "runs/study").attempts
              for event in one.events]  # fmt: skip
    assert states.count("finish") == 10


@pytest.mark.parametrize("packages", ["optuna", "sweepers"])
def test_enqueued_trials_run_and_count_once(tmp_path, packages):
    """They are in the study before they run; one of them is killed and continues."""
    (tmp_path / "train.py").write_text(textwrap.dedent(ENQUEUED))
    env = {"PYTHONPATH": str(Path(sys.prefix, packages))}
    outputs = []
    for code in (-signal.SIGKILL, 0, 0):
        command = [sys.executable, "train.py"]
        process = Process(command, tmp_path / f"{len(outputs)}.txt", tmp_path, **env)
        assert process.wait() == code, process.output
        outputs.append([line for line in process.output.splitlines() if line[0].isdigit()])
    rates = (0.1, 0.2, 0.3)
    whole = [f"{n} {lr} {random.Random(n).random()}" for n, lr in enumerate(rates)]
    assert outputs == [whole[:2], whole[1:], []]


def is_in_trial(folder, number):
    """Whether it is in the middle of its steps."""
    progress = ledger.read_progress(folder / "runs/study") if (folder / "runs").exists() else None
    return num_trials(folder / "study.db") == number + 1 and progress and 1 < progress.step < 150
