"""The job's wrapper with real trainings: time limits, crashes, budgets.

A time limit of half a minute leaves a loaded machine time to start; then the job sleeps until it.
"""

import json

import pytest
from sweeps import CONF, App, assert_same_job

from forge.jobdir import ledger

FOLDS = """
    import os, signal
    import hydra
    from omegaconf import OmegaConf
    import forge, torch

    RESTARTS = int(os.environ.get("FORGE_RESTART_COUNT", 0))

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        for fold in range(3):
            model = torch.nn.Linear(2, 1)
            named, policy = {"name": f"fold{fold}"}, cfg.resilience
            if cfg.by == "dir":
                named, own = {}, {"checkpoint": {"dir": f"fold{fold}"}}
                policy = OmegaConf.merge(policy, own)
            with forge.Run(policy, **named, model=model) as run:
                for step in run.steps(6):
                    if (fold, step) == (RESTARTS + 1, 4):
                        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        main()
"""
"""Three Runs, and a kill in each of them but the first, after its first save."""


def events(job, kind):
    path = job.directory / ".forge/ledger/job.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def make(tmp_path):
    return lambda misbehave="", **more: App(tmp_path / "app", misbehave=misbehave, **more)


@pytest.mark.slow
def test_the_time_limit_is_announced_and_costs_no_step(make, undisturbed):
    """A job longer than its time limit is saved in time at each limit, and repeats no step."""
    app = make()
    app.finish(
        "lr=0.1",
        "step_s=0.8",
        "hydra.launcher.timeout_min=0.5",
        "resilience.signal.warning_s=10",
        "resilience.shutdown.timeout_s=9",
    )
    job = app.job(0)
    assert_same_job(job, undisturbed["0.1"])
    assert job.state["counts"]["timeouts"] >= 1
    assert job.state["counts"]["failures"] == 0
    starts = [e for a in ledger.read(job.directory).attempts for e in a.events]
    starts = [e for e in starts if e["kind"] == "start"][1:]
    assert starts
    assert [e["previous_step"] - e["step"] for e in starts] == [0] * len(starts)
    assert {e["reason"] for e in events(job, "end")} == {"time_limit", "finished"}


@pytest.mark.slow
def test_a_job_that_swallows_the_signal_of_the_limit_stops_by_itself(make, undisturbed):
    """Even if a library replaces the handler of SIGUSR2, the time limit costs no step."""
    app = make(
        """
        if RESTARTS == 0:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            time.sleep(0.8)
        """
    )
    app.finish(
        "lr=0.1",
        "step_s=0",
        "hydra.launcher.timeout_min=0.5",
        "resilience.signal.warning_s=10",
        "resilience.shutdown.timeout_s=8",
    )
    job = app.job(0)
    assert_same_job(job, undisturbed["0.1"])
    assert [e["reason"] for e in events(job, "end")] == ["time_limit", "finished"]
    assert events(job, "limit near")
    assert not events(job, "limit")
    assert job.state["counts"]["timeouts"] == 1
    first, second = ledger.read(job.directory).attempts
    (stop,) = [e for e in first.events if e["kind"] == "stop"]
    assert stop["reason"] == "time_limit"
    (start,) = [e for e in second.events if e["kind"] == "start"]
    assert start["previous_step"] == start["step"] == stop["step"]


@pytest.mark.slow
def test_at_the_limit_a_task_that_does_not_leave_is_killed(make, undisturbed):
    """The task ignores all signals; it is killed, and the job resumes from the last save."""
    app = make(
        """
        if step == 15 and RESTARTS == 0:
            time.sleep(600)
        """
    )
    app.finish(
        "lr=0.1",
        "hydra.launcher.timeout_min=0.5",
        "resilience.signal.warning_s=2",
        "resilience.shutdown.timeout_s=0",
    )
    job = app.job(0)
    assert_same_job(job, undisturbed["0.1"])
    assert [e["reason"] for e in events(job, "end")] == ["time_limit", "finished"]
    assert events(job, "limit")
    assert job.state["counts"]["timeouts"] == 1


@pytest.mark.proofs  # each end of a task: test_supervisor.py; a kill: test_sweeps.py
@pytest.mark.parametrize(
    "crash", ["os.kill(os.getpid(), signal.SIGSEGV)", "os.abort()", "os._exit(70)"]
)
def test_a_crash_is_gone_on_with_from_the_last_checkpoint(crash, make, undisturbed):
    """The job survives a segfault in a driver, an abort of NCCL, and a forced exit."""
    app = make(f"if step == 17 and RESTARTS == 0:\n    {crash}")
    app.finish("lr=0.1", "step_s=0")
    assert_same_job(app.job(0), undisturbed["0.1"])
    assert app.job(0).attempts == 2
    assert app.job(0).state["counts"]["failures"] == 1


@pytest.mark.slow
def test_a_full_interpreter_lock_is_ended_after_the_deadline(make, undisturbed):
    """The supervisor ends it, with the stacks in its log; the job resumes from its checkpoint."""
    app = make(
        """
        if step == 15 and RESTARTS == 0:
            import ctypes
            os.kill(os.getppid(), signal.SIGUSR2)
            while True:
                ctypes.PyDLL(None).sleep(600)
        """
    )
    app.finish("lr=0.1", "step_s=0", "resilience.shutdown.timeout_s=0.5")
    job = app.job(0)
    assert_same_job(job, undisturbed["0.1"])
    (held, _) = events(job, "end")
    assert held["reason"] == "forced"
    assert "in misbehave" in job.output


def test_a_job_that_makes_progress_in_any_of_its_runs_is_not_given_up(tmp_path):
    """Regression test: the wrapper looked for progress in one checkpoint directory only."""
    conf = CONF.replace("every_steps: 10", "every_steps: 3")
    app = App(tmp_path / "app", FOLDS, f"{conf}    by: name\n")
    app.finish("by=name,dir", "resilience.requeue.max_no_progress=1")
    for number in range(2):
        assert app.job(number).state["counts"]["restarts"] == 2


PLAIN = """
    import os, signal, time
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        if int(os.environ["FORGE_RESTART_COUNT"]) < 3:  # max_no_progress
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(60)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
def test_a_function_without_a_run_has_no_progress_to_lack(tmp_path):
    """A main without a Run is requeued three times, although it never saves a step."""
    app = App(tmp_path / "app", PLAIN)
    app.finish("lr=0.1")
    assert app.job(0).state["counts"]["preemptions"] == 3
