"""How a check is made: bounded, and an error of its own is no verdict."""

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from harness import Process

from forge.config.loading import load
from forge.config.schema import CheckAction, HealthConfig
from forge.errors import DiskFull, Exit
from forge.health import attempt, check
from forge.health.attempt import CHECKS, Health, asked_for
from forge.health.check import Check, Context, Scope, make
from forge.jobdir import node_fault

HERE = Context(Path(), Path())


def test_the_names_of_the_built_in_checks_are_keys_of_the_policy():
    """A check without a key could not be switched off."""
    names = [one.name for one in CHECKS]
    assert len(set(names)) == len(names)
    assert set(names) == set(HealthConfig().checks)


def test_what_the_policy_ignores_is_not_made():
    """Neither a check of forge's nor a site's own."""
    nhc = {"run": ["false"], "action": "ignore"}
    given = {"checks": {"gpu": "ignore"}, "commands": {"nhc": nhc}}
    config = load({"health": given}).health
    made = [check.name for check, _ in asked_for(config, HERE)]
    assert made == [check.name for check in CHECKS if check.name != "gpu"]
    assert asked_for(replace(config, enabled=False), HERE) == []


def test_every_rank_waits_for_the_checks_of_the_first_of_its_node():
    """It has more of them; the others would give it up."""
    first = Health(HealthConfig(), HERE)
    other = Health(HealthConfig(), replace(HERE, is_first_of_node=False))
    assert first.limit_s == other.limit_s == 60.0 * (len(CHECKS) - 1)


def test_a_start_waits_for_a_disk_and_ends_as_a_failure_after_hang_start_s(
    tmp_path, caplog, monkeypatch
):
    """A failover takes minutes; a disk that never answers must not keep the nodes."""
    answers = threading.Event()
    disk = next(check for check in CHECKS if check.name == "disk")
    disk = replace(disk, timeout_s=0.05, look=lambda context: answers.wait())
    context = replace(Context(tmp_path, tmp_path), start_s=0.2)
    with caplog.at_level("WARNING", "forge"), pytest.raises(Exit) as exit_:
        make(disk, context)
    assert exit_.value.code == 70
    assert "has not answered within `resilience.hang.start_s=0.2`" in exit_.value.text
    assert "forge waits for the file system" in caplog.text
    monkeypatch.setattr(check.messages, "warn", lambda text: answers.set())
    assert make(disk, replace(context, start_s=60.0)).finding is True


def test_a_disk_that_does_not_answer_is_no_fault_of_the_node(tmp_path, monkeypatch):
    """All nodes wait for a failover of the file server: each in turn would be left for a day."""
    disk = next(check for check in CHECKS if check.name == "disk")
    monkeypatch.setattr(attempt, "CHECKS", (replace(disk, timeout_s=0.1),))
    answered = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: answered.wait())
    notes = []
    config = HealthConfig(checks=HealthConfig().checks | {"disk": CheckAction.exclude_node})
    context = Context(tmp_path, tmp_path)
    try:
        Health(config, context, lambda kind, **values: notes.append(values)).check_node()
    finally:
        answered.set()
    (note,) = notes
    assert (note["check"], note["action"]) == ("disk", "warn")
    assert node_fault.read(tmp_path, 0) is None
    assert HealthConfig().checks["disk"] is CheckAction.warn


def test_a_check_that_blocks_fails_at_its_timeout():
    """A file system that hangs must not hold up the run."""
    blocked = threading.Event()

    def look(context):
        blocked.wait()

    answer = make(Check("disk", look, Scope.node, timeout_s=0.1), HERE)
    assert answer.finding is not None
    assert answer.finding.is_failed
    assert answer.finding.value == "no answer within 0.1 s"
    blocked.set()


def test_who_has_to_leave_waits_for_no_check():
    """A stop has seconds; a file system that hangs has more."""
    blocked, asked = threading.Event(), []

    def unless():
        asked.append(1)
        return len(asked) > 1

    check = Check("disk", lambda context: blocked.wait() or None, Scope.node, timeout_s=3600.0)
    answer = make(check, HERE, unless)
    assert (answer.finding, answer.error) == (None, "")
    blocked.set()


def test_of_ranks_that_meet_none_is_to_blame_for_a_check_that_blocks():
    """Else every node of the job would be excluded."""
    blocked = threading.Event()
    check = Check("ranks", lambda context: blocked.wait() or None, Scope.ranks, timeout_s=0.05)
    answer = make(check, HERE)
    blocked.set()
    assert answer.finding.culprits == ()


def test_a_check_that_cannot_be_made_is_no_verdict():
    """An unforeseen answer must not exclude a node."""

    def look(context):
        raise ValueError("no such line")

    answer = make(Check("shm", look, Scope.node), HERE)
    assert answer.finding is None
    assert answer.error == "ValueError: no such line"


def test_a_full_disk_is_an_error_of_its_own():
    def look(context):
        raise DiskFull("no room")

    with pytest.raises(DiskFull, match="no room"):
        make(Check("disk", look, Scope.node), HERE)


def test_of_a_rank_that_is_to_stop_only_those_of_all_ranks_are_made(monkeypatch, tmp_path):
    """The rank skips the checks of its node and device, but other ranks wait for it in the rest."""
    made = []
    checks = {
        scope: Check(name, lambda context, name=name: made.append(name), scope)
        for scope, name in ((Scope.node, "disk"), (Scope.task, "gpu"), (Scope.ranks, "ranks"))
    }
    monkeypatch.setattr(attempt, "CHECKS", tuple(checks.values()))
    context = attempt.here(HealthConfig(), tmp_path, tmp_path)
    health = Health(HealthConfig(), context, is_stopping=lambda: True)
    health.check_node()
    health.check_ranks()
    assert made == ["ranks"]


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
