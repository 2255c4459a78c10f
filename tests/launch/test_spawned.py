"""Training in a child process of main: its job's directory, its stops, its exit code."""

import os
import signal
import sys

import pytest
import warm
from forked import completed
from harness import Process, until
from sweeps import CONF, TRAIN, App, SweptJob, assert_same_job

from forge.jobdir import ledger
from forge.jobdir.job_files import TOKEN
from forge.jobdir.ledger_writer import Ledger
from forge.process import processes

MAIN = """
    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        import torch
        out = HydraConfig.get().runtime.output_dir
        if cfg.by == "torch":
            start = torch.multiprocessing.start_processes  # `spawn` takes a second for each
            start(train, (cfg, out), nprocs=cfg.nprocs, start_method="fork")
        elif cfg.by == "program":
            import subprocess
            sys.exit(subprocess.run([sys.executable, "other.py"]).returncode)
        elif cfg.by == "names":
            import multiprocessing
            for cfg.name in cfg.names:
                context = multiprocessing.get_context("fork")  # spawned: a second each
                child = context.Process(target=train, args=(0, cfg, out))
                child.start()
                child.join()
        else:
            import multiprocessing
            child = multiprocessing.get_context(cfg.by).Process(target=train, args=(0, cfg, out))
            child.start()
            child.join()  # its exit code is not looked at
            print("main goes on", flush=True)
"""
OTHER = """
import torch, forge
with forge.Run(model=torch.nn.Linear(1, 1)) as run:
    list(run.steps(3))
"""


def in_a_child(train):
    """The standard script, whose loop runs in a child of main's process."""
    head, _, rest = train.partition("    @hydra.main")
    body, _, tail = rest.partition("    if __name__")
    body = body.partition("def main(cfg):")[2]
    body = body.replace("HydraConfig.get().runtime.output_dir", "out")
    body = body.replace("cfg.resilience, ", "cfg.resilience, name=cfg.name, ")
    head += f"    def train(rank, cfg, out):\n        import torch{body}"
    return f"{head}{MAIN}\n    if __name__{tail}"


@pytest.fixture
def make(tmp_path):
    made = []

    def make(misbehave=""):
        conf = f"{CONF}    by: torch\n    nprocs: 1\n    name: null\n    names: []\n"
        made.append(App(tmp_path / "app", in_a_child(TRAIN), conf, misbehave))
        return made[-1]

    yield make
    made[-1].close()


def alone(app, *overrides):
    """The script without a launcher, and its job."""
    command = [sys.executable, "train.py", "hydra.run.dir=sweep/job", *overrides]
    app.started.append(Process(command, app.folder / "alone.txt", app.folder, warm.Popen))
    return app.started[-1], SweptJob(app.folder / "sweep/job")


def test_each_job_of_a_sweep_trains_in_its_own_directory(make, undisturbed):
    """Regression test: all jobs used `./checkpoints`, so only one trained."""
    app = make(
        """
        if RESTARTS == 0 and step == 15 and cfg.lr == 0.2:
            os.kill(os.getpid(), signal.SIGUSR1)
        """
    )
    app.finish("lr=0.1,0.2", "by=fork", "step_s=0")
    for number, rate in enumerate(("0.1", "0.2")):
        assert_same_job(app.job(number), undisturbed[rate])
        assert app.job(number).state["counts"]["preemptions"] == number
        assert app.job(number).attempts == number + 1
    assert not (app.folder / "checkpoints").exists()


LONG_STEP = "time.sleep(2 if step == 21 else 0)"
"""Longer than a child without a Run gets to end; nothing is saved before that step."""


def test_a_stop_of_the_sweep_waits_for_the_child_to_save(make, undisturbed):
    """Regression test: main's process killed its children after a second, within a step."""
    app = make(LONG_STEP)
    app.hold(0, 21)
    process, job = app.start("lr=0.1", "by=fork"), app.job(0)
    job.wait_for_step(21)
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    assert job.state["state"] == "stopped"
    assert (job.directory / "checkpoints/step_22").is_dir()
    assert app.go_on(process.output).returncode == 0
    assert_same_job(job, undisturbed["0.1"])


@pytest.mark.parametrize("by", [pytest.param("spawn", marks=pytest.mark.proofs), "fork"])
def test_a_signal_to_the_process_of_main_saves_in_the_child(by, make, undisturbed):
    """Without a launcher, `kill` of the pid that the shell shows reaches only main's process."""
    app = make(LONG_STEP)
    app.hold("job", 21)
    process, job = alone(app, "lr=0.1", f"by={by}")
    job.wait_for_step(21)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.output
    assert "main goes on" not in process.output
    assert "nothing to save" not in process.output
    assert (job.directory / "checkpoints/step_22").is_dir()
    assert process.is_session_gone()
    resumed = app.go_on(process.output)
    assert resumed.returncode == 0, resumed.stdout
    assert_same_job(job, undisturbed["0.1"])


def test_ctrl_c_in_a_terminal_saves_in_the_child_once(make):
    """Both processes get Ctrl+C; the parent must not forward it, as a second SIGINT kills."""
    app = make(LONG_STEP)
    app.hold("job", 21)
    process, job = alone(app, "lr=0.1", "by=torch")
    job.wait_for_step(21)
    process.signal_session(signal.SIGINT)
    assert process.wait() == 130, process.output
    assert (job.directory / "checkpoints/step_22").is_dir()


def test_a_stop_of_the_child_alone_is_a_stop_of_the_job(make):
    """Regression test: main ignores its child's exit code, and the job counted as finished."""
    app = make(LONG_STEP)
    app.hold("job", 21)
    process, job = alone(app, "lr=0.1", "by=fork")
    job.wait_for_step(21)
    child = ledger.read(job.directory).attempts[0].events[0]["pid"]
    assert processes.send(child, signal.SIGUSR1)
    assert process.wait() == 75, process.output
    assert "main goes on" in process.output


@pytest.mark.parametrize(("names", "code"), [("a,b", 75), ("a,a", 0)])
def test_the_stop_of_a_child_is_forgotten_only_where_its_own_run_is_taken_up(names, code, make):
    """Regression test: the next fold's child cleared the first one's stop."""
    app = make(
        """
        if step == 15 and not Path("was_hit").exists():
            Path("was_hit").touch()
            os.kill(os.getpid(), signal.SIGUSR1)
        """
    )
    process, job = alone(app, "by=names", f"names=[{names}]", "step_s=0")
    assert process.wait() == code, process.output
    assert (job.directory / f"checkpoints/{names[-1]}/step_40").is_dir()
    if code:
        assert app.go_on(process.output).returncode == 0


def test_a_child_that_is_killed_has_not_finished_though_main_returns(make, undisturbed):
    """Regression test: main ignores its child's exit code; half of the training was lost."""
    app = make(
        """
        if RESTARTS == 0 and step == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    output = app.finish("lr=0.1", "by=fork", "step_s=0")
    job = app.job(0)
    assert (job.state["counts"]["failures"], job.attempts) == (1, 2)
    assert "died inside its `with forge.Run(…)` block: its training in checkpoints" in output
    assert_same_job(job, undisturbed["0.1"])


def test_a_run_is_lost_where_the_last_process_in_it_ended_without_a_word(tmp_path, monkeypatch):
    """Trials that end by an exception, and a child that main has replaced, do not count."""

    def run(name, *kinds, of_child=True):
        owner = f"host {os.getpid() + of_child} 7"
        monkeypatch.setattr("forge.jobdir.spawned.owner", lambda: owner)
        opened = Ledger(tmp_path, tmp_path / name)
        for kind in ("start", *kinds):
            opened.write(kind)
        opened.close()

    run("earlier")
    before = ledger.last_attempt(tmp_path)
    assert ledger.lost_run(tmp_path, before) is None
    for kind in ("finish", "stop", "halt", "error"):
        run(kind, kind)
    run("main", of_child=False)
    run("replaced")
    run("replaced", "finish")
    assert ledger.lost_run(tmp_path, before) is None
    run("fold2")
    assert ledger.lost_run(tmp_path, before) == "fold2"
    assert ledger.last_attempt(tmp_path) == before + 8


def test_a_child_whose_parent_is_killed_saves_and_leaves(make):
    """Otherwise the child would train unseen, and block the next start of the job."""
    app = make()
    app.hold("job", 3)
    process, job = alone(app, "lr=0.1", "by=spawn", "step_s=0")
    job.wait_for_step(3)
    process.signal(signal.SIGKILL)
    process.wait()
    until(lambda: not process.session_pids(), "end of the child")
    assert ledger.read(job.directory).attempts[0].events[-1]["kind"] == "stop"


def test_several_children_with_a_run_are_refused(make):
    """The children would be ranks without a process group, and save into one directory."""
    app = make()
    process, _ = alone(app, "lr=0.1", "by=torch", "nprocs=2", "step_s=0.1")
    assert process.wait() == 73, process.output
    assert "call torch.distributed.init_process_group()" in process.output.replace("\n", " ")


def test_another_program_that_a_job_starts_is_no_part_of_it(tmp_path):
    """The program does not know the job's directory; `./checkpoints` would be shared by all."""
    (tmp_path / "other.py").write_text(OTHER)
    done = completed(["other.py"], tmp_path, **{TOKEN: "a job's"})
    assert done.returncode == 78
    said = done.stdout.replace("\n", " ")
    assert "cannot tell which job of the sweep this program belongs to" in said
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.proofs
def test_another_program_with_a_directory_of_its_own_trains(make):
    app = make()
    own = app.folder / "own"
    text = OTHER.replace("forge.Run(", f"forge.Run({{'checkpoint': {{'dir': {str(own)!r}}}}}, ")
    (app.folder / "other.py").write_text(text)
    app.finish("lr=0.1", "by=program")
    assert (own / "step_3").is_dir()
