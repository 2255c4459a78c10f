"""Whose checkpoints these are: true Hydra apps, one after the other, in one directory."""

import json
import math

import forked
import pytest
from hydra_apps import App

from forge.jobdir import ledger

TRAIN = """
import os, signal
from pathlib import Path
import hydra, torch
from hydra.core.hydra_config import HydraConfig
import forge


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    model = torch.nn.Linear(3, 1)
    groups = [{"params": [p]} for p in model.parameters()]
    groups = groups if cfg.groups == 2 else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=cfg.lr, weight_decay=cfg.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.T_max)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with forge.Run(cfg.resilience, **objects) as run:
        for step in run.steps(cfg.steps):
            group = optimizer.param_groups[0]
            run.log(lr=group["lr"], decay=group["weight_decay"])
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            run.update(loss, optimizer, schedule)
            if step == 3 and run.resumed_from is None:
                os.kill(os.getpid(), signal.SIGTERM)
    torch.save(model.state_dict(), Path(HydraConfig.get().runtime.output_dir, "weights.pt"))


if __name__ == "__main__":
    main()
"""
CONF = """
defaults: [{resilience: default}, _self_]
seed: 1
lr: 0.1
decay: 0.0
groups: 1
T_max: 20
steps: 8
stamp: ${now:%H-%M-%S-%f}
title: run-${stamp}
where: ${hydra:runtime.output_dir}
"""


def cosine(lr: float, T_max: int, step: int) -> float:
    return lr * (1 + math.cos(math.pi * step / T_max)) / 2


class Project(App):
    """The app, whose checkpoints go to one place, wherever its output does."""

    def __init__(self, folder):
        super().__init__(folder)
        self.checkpoints = folder / "ck"
        (folder / "train.py").write_text(TRAIN)
        (folder / "train.yaml").write_text(
            CONF + f"resilience: {{checkpoint: {{dir: '{folder}/ck'}}}}\n"
        )

    def begin(self, *overrides: str) -> None:
        begun = self.run("hydra.run.dir=first", *overrides)
        assert begun.returncode == 143, begun.stdout

    def metrics(self, job: str):
        return ledger.read(self.folder / job).metrics

    @property
    def record(self):
        return json.loads((self.checkpoints / "job.json").read_text())["jobs"]


@pytest.fixture
def app(tmp_path):
    return Project(tmp_path / "app")


def test_the_state_of_another_experiment_is_refused_by_key_and_not_trained_on(app):
    """Both runs used to finish, with exit code 0 and the weights of the first."""
    app.begin()
    refused = app.run("hydra.run.dir=second", "lr=0.4", "+extra=1")
    assert refused.returncode == 78, refused.stdout
    assert "lr: 0.1 before, 0.4 now" in refused.stdout
    assert "extra: (not set) before, 1 now" in refused.stdout
    assert f"started in {app.folder}/first" in refused.stdout
    assert not (app.folder / "second/weights.pt").exists()
    assert (app.checkpoints / "latest").resolve().name == "step_4"
    assert [job["config"]["lr"] for job in app.record] == [0.1]


def test_the_same_job_resumes_from_another_output_directory_and_says_so(app):
    """The usual absolute directory on scratch, and the same batch script submitted again."""
    app.begin()
    earlier = app.folder
    app.folder = app.folder.rename(app.folder.with_name("moved"))  # the code's place is no matter
    app.checkpoints.parent.mkdir()
    (app.folder / "ck").rename(app.checkpoints)
    resumed = app.run("hydra.run.dir=second", "steps=8", "lr=0.1")
    assert resumed.returncode == 0, resumed.stdout
    assert f"Resumes the job that was started in {earlier}/first: " in resumed.stdout
    assert list(app.metrics("second")) == [4, 5, 6, 7]


def test_a_changed_config_is_taken_on_by_the_printed_command(app):
    """Hyperparameters, step and weights are the checkpoint's; what differs is listed."""
    app.begin()
    changed = ("lr=0.4", "decay=0.5", "T_max=40", "steps=10")
    refused = app.run("hydra.run.dir=second", *changed)
    assert refused.returncode == 78
    taken = app.resume(refused.stdout)
    assert taken.returncode == 0, taken.stdout
    assert "optimizer.param_groups[0].weight_decay: 0.0 before, 0.5 now" in taken.stdout
    assert "schedule.T_max: 20 before, 40 now" in taken.stdout
    assert taken.stdout.count("- lr: 0.1 before, 0.4 now") == 1
    seen = app.metrics("second")
    assert list(seen) == [4, 5, 6, 7, 8, 9]
    assert [one["decay"] for one in seen.values()] == [0.0] * 6
    assert [one["lr"] for one in seen.values()] == pytest.approx(
        [cosine(0.1, 20, step) for step in seen]
    )
    events = ledger.read(app.folder / "second").attempts[-1].events
    assert [e["after"]["lr"] for e in events if e["kind"] == "changed" and "lr" in e["keys"]] == [
        0.4
    ]
    assert [job["config"]["lr"] for job in app.record] == [0.1, 0.4]
    assert app.run("hydra.run.dir=third").returncode == 78  # it is another job from now on


def test_in_its_own_directory_too_a_change_is_asked_for_or_refused(app):
    """A state that does not fit changes nothing."""
    app.begin()
    refused = app.run("hydra.run.dir=first", "groups=2")
    assert refused.returncode == 78
    assert "groups: 1 before, 2 now" in refused.stdout
    assert "resilience.resume=changed" in refused.stdout
    unfit = app.run("hydra.run.dir=first", "groups=2", "resilience.resume=changed")
    assert unfit.returncode == 74, unfit.stdout
    assert "optimizer.param_groups: 1 groups in the checkpoint, 2" in unfit.stdout
    assert len(app.record) == 1
    assert "groups: 1" in (app.folder / "first/.forge/config.yaml").read_text()
    taken = app.run("hydra.run.dir=first", "decay=0.5", "resilience.resume=changed")
    assert taken.returncode == 0, taken.stdout
    seen = app.metrics("first")
    schedule = [cosine(0.1, 20, step) for step in range(8)]
    assert [one["lr"] for one in seen.values()] == pytest.approx(schedule)
    assert [one["decay"] for one in seen.values()] == [0.0] * 8
    stored = (app.folder / "first/.forge/config.yaml").read_text()
    assert "decay: 0.5" in stored
    assert "resume: same" in stored, "a change is asked for once"
    assert "resume=changed" not in (app.folder / "first/.forge/resume.sh").read_text()


def test_a_kill_between_taking_on_and_the_next_save_takes_on_again(app):
    """job.json knows the new config by then, and the checkpoint is of the old one.

    The environment asks for the change, as the policy does in other tests.
    """
    app.begin()
    script = app.folder / "train.py"
    dies = TRAIN.replace(
        "if step == 3 and",
        "if step == 5:\n                os._exit(9)\n            if step == 3 and",
    )
    script.write_text(dies)
    new = ("lr=0.4", "resilience.checkpoint.every_steps=100")
    command = ["train.py", "hydra.run.dir=second", *new]
    died = forked.completed(command, app.folder, FORGE_RESUME="changed")
    assert died.returncode == 9, died.stdout
    assert [job["config"]["lr"] for job in app.record] == [0.1, 0.4]
    script.write_text(TRAIN)
    assert app.run("hydra.run.dir=second", *new).returncode == 0
    assert app.metrics("second")[4]["lr"] == pytest.approx(cosine(0.1, 20, 4))
