"""A health check that fails during training: the job saves, and all ranks stop together."""

import signal
import sys
import threading
from dataclasses import replace

import forked
import pytest
import warm
from harness import Process, assert_same_run
from ranked import RankedJob

import forge
from forge.config.loading import load
from forge.config.schema import HealthConfig
from forge.errors import Reason
from forge.health import attempt
from forge.health.check import Check, Finding, Scope
from forge.jobdir import node_fault, verdict


def site(directory, action="exclude_node"):
    """The config of a site's own check, which fails once the file `sick` exists."""
    script = f"test ! -e {directory}/sick || {{ echo no fan; exit 3; }}"
    nhc = {"run": ["sh", "-c", script], "timeout_s": 60.0, "action": action}
    return {"every_s": 0.05, "commands": {"nhc": nhc}}


def started(config, folder, **given):
    """The health checks of the only rank of a job in this directory."""
    return attempt.Health(config, attempt.here(config, folder, folder), **given)


PLANTED = """
import json, sys
import torch
import forge
from forge.health import attempt
from forge.health.check import Check, Finding, Scope

directory, action, is_doubtful = sys.argv[1], sys.argv[2], sys.argv[3] == "doubtful"
looks = []

def look(context):  # healthy at the start, and at the first check during training
    looks.append(context.is_beside)
    return Finding("3 errors", is_failed=True) if len(looks) > 2 else None

attempt.CHECKS = (Check("gpu", look, Scope.task, is_passive=True, is_doubtful=is_doubtful),)
policy = {
    "checkpoint": {"dir": directory, "every_steps": None},
    "health": {"every_s": 0.01, "checks": {"gpu": action}},
}
with forge.Run(policy, model=torch.nn.Linear(2, 1)) as run:
    for _ in run.steps(10**6):  # ends even if no check ends it
        if len(looks) > 4 and action == "warn":
            break
"""


def planted(directory, action, kind="certain"):
    """Exit code and directory of a job whose check fails from its second round on."""
    (directory / "planted.py").write_text(PLANTED)
    job = directory / "job"
    done = forked.completed(["planted.py", str(job), action, kind], directory)
    return done.returncode, job


@pytest.mark.parametrize(
    ("action", "reason"), [("exclude_node", Reason.unhealthy), ("halt", Reason.halted)]
)
def test_what_is_found_beside_training_saves_and_ends_it_with_69(action, reason, tmp_path):
    """The job stops at a boundary, and not in a step, so that its steps are saved."""
    code, job = planted(tmp_path, action)
    found = verdict.read(job)
    assert (code, found.exit_code, found.reason) == (69, 69, reason)
    assert "Health check `gpu` failed" in found.text
    assert (job / f"step_{found.step}").is_dir()
    assert [one.action for one in node_fault.read_all(job, 1).values()] == [action]


def test_what_a_doubtful_device_has_computed_is_not_saved(tmp_path):
    """Otherwise the job would resume from damaged state on a healthy node."""
    code, job = planted(tmp_path, "halt", "doubtful")
    assert (code, verdict.read(job).reason) == (69, Reason.halted)
    assert list(job.glob("step_*")) == []


def test_a_warning_is_in_the_ledger_once_and_ends_nothing(tmp_path):
    code, job = planted(tmp_path, "warn")
    assert code == 0
    events = [event for one in forge.ledger.read(job).attempts for event in one.events]
    (event,) = [event for event in events if event["kind"] == "health"]
    assert (event["check"], event["action"]) == ("gpu", "warn")


HANGS = """
import os, sys, torch, forge

directory, action = sys.argv[1], "exclude_node"
run = ["sh", "-c", f"touch {directory}/begun; exec sleep 36000"]
nhc = {"run": run, "timeout_s": 3600.0, "action": action}
policy = {"checkpoint": {"dir": directory}, "health": {"commands": {"nhc": nhc}}}
with forge.Run(policy, model=torch.nn.Linear(2, 1)) as run:
    for _ in run.steps(10**6):
        pass
"""


def test_a_stop_does_not_wait_for_a_check_at_the_start_that_hangs(tmp_path):
    """The wait would use up the grace time; an interrupted check does not count as a failure."""
    (tmp_path / "hangs.py").write_text(HANGS)
    job = tmp_path / "job"
    job.mkdir()
    command = [sys.executable, "hangs.py", str(job)]
    process = Process(command, tmp_path / "output", tmp_path, warm.Popen)
    process.wait_for(lambda: (job / "begun").exists(), "the command")
    process.signal(signal.SIGTERM)
    assert process.wait() == 143, process.output
    assert node_fault.read_all(job, 1) == {}


def test_nothing_runs_beside_where_it_is_switched_off(tmp_path):
    for health in ({"every_s": None}, {"enabled": False, "every_s": 0.01}):
        seen = started(HealthConfig(**health), tmp_path)
        seen.watch()
        assert seen._thread is None
        seen.close()


def test_a_check_that_still_hangs_is_not_made_again(monkeypatch, tmp_path):
    """Otherwise each round would leave another blocked thread."""
    ended, looks = threading.Event(), []

    def look(context):
        looks.append(1)
        ended.wait()

    check = Check("gpu", look, Scope.task, is_passive=True, timeout_s=0.01)
    monkeypatch.setattr(attempt, "CHECKS", (check,))
    health = started(HealthConfig(), tmp_path)
    assert health._look() is None
    assert health._look() is None
    assert len(looks) == 1
    ended.set()
    health._answers["gpu"].left.join()
    assert health._look() is None
    assert len(looks) == 2


def test_what_is_found_once_the_attempt_leaves_is_no_verdict(monkeypatch, tmp_path):
    """The shutdown itself can cause the failure, and the node would be excluded for it."""

    def look(context):
        health.stop()
        return Finding("3 errors", is_failed=True)

    check = Check("gpu", look, Scope.task, is_passive=True)
    monkeypatch.setattr(attempt, "CHECKS", (check, replace(check, name="shm", look=pytest.fail)))
    config = load({"health": {"checks": {"gpu": "exclude_node"}}}).health
    health = started(config, tmp_path)
    assert health._look() is None
    assert node_fault.read_all(tmp_path, 1) == {}


def test_of_a_rank_that_is_to_stop_only_those_of_all_ranks_are_made(monkeypatch, tmp_path):
    """The rank skips the checks of its node and device, but other ranks wait for it in the rest."""
    made = []
    checks = {
        scope: Check(name, lambda context, name=name: made.append(name), scope)
        for scope, name in ((Scope.node, "disk"), (Scope.task, "gpu"), (Scope.ranks, "ranks"))
    }
    monkeypatch.setattr(attempt, "CHECKS", tuple(checks.values()))
    health = started(HealthConfig(), tmp_path, is_stopping=lambda: True)
    health.check_node()
    health.check_ranks()
    assert made == ["ranks"]


def test_a_sick_node_costs_no_step_and_no_bit(tmp_path):
    """The site's check stops the job halfway; it resumes once the check passes again."""
    spec = {"steps": 30, "step_s": 0.03}
    job = forked.ForkedJob(tmp_path / "job", policy={"health": site(tmp_path)}, **spec)
    process = job.start()
    job.wait_for_step(process, 5)
    (tmp_path / "sick").touch()
    assert process.wait() == 69, job.output
    assert "Health check `nhc` failed" in job.output
    assert "exit code 3: no fan" in job.output
    (tmp_path / "sick").unlink()
    job.run_to_end()
    assert job.steps_repeated == [0]
    whole = forked.ForkedJob(
        tmp_path / "whole", policy={"health": {"enabled": False}}, **spec | {"step_s": 0}
    )
    whole.run_to_end()
    assert_same_run(job, whole)


def test_all_ranks_leave_a_sick_node_together_and_one_names_it(tmp_path):
    """Only the first task of a node runs the site's check; the other tasks report nothing."""
    job = RankedJob(tmp_path / "job", 2, pause_s=0.03, policy={"health": site(tmp_path)})
    processes = job.start()
    processes[0].wait_for(
        lambda: (forge.ledger.read_progress(job.checkpoints) or (0, 0))[1] >= 4, "step 4"
    )
    (tmp_path / "sick").touch()
    assert [one.wait() for one in processes] == [69, 69], job.output
    assert list(node_fault.read_all(job.checkpoints, 2)) == [0]
    verdicts = [verdict.read(job.checkpoints, rank) for rank in range(2)]
    assert verdicts[0].step == verdicts[1].step
    (tmp_path / "sick").unlink()
    job.run_to_end()
