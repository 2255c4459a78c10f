"""A node that falls sick while a job trains: it saves, and all ranks leave together."""

import threading

import pytest
import torch
from harness import Job, assert_same_run
from ranked import RankedJob

import forge
from forge.config.schema import CheckAction, CheckConfig, ChecksConfig, HealthConfig
from forge.errors import Reason
from forge.group.group import Solo
from forge.health import attempt
from forge.health.check import Check, Finding, Scope
from forge.jobdir import sick, verdict
from forge.shutdown import stopping

SICK = Finding("3 uncorrected errors", is_failed=True)


def site(directory, action="exclude_node"):
    """A site's own check, which fails once there is a file `sick`."""
    script = f"test ! -e {directory}/sick || {{ echo no fan; exit 3; }}"
    nhc = {"run": ["sh", "-c", script], "timeout_s": 60.0, "action": action}
    return {"every_s": 0.05, "commands": {"nhc": nhc}}


def trained(directory, health):
    """Train in this process, with no end of its own; how it leaves."""
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(directory), "every_steps": None}, "health": health}
    with pytest.raises(forge.Exit) as left, forge.Run(policy, model=model) as run:
        for _ in run.steps(10**9):
            pass
    return left.value, run


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    """A process that leaves keeps its handlers; this one runs the next test."""
    yield
    stopping.uninstall()
    stopping.hold_interrupts(is_held=False)


@pytest.fixture
def planted(monkeypatch):
    """One passive check in place of the built-in ones, which fails from the second look on."""

    def plant(**kind):
        looks = []

        def look(context):
            looks.append(context.is_beside)
            return SICK if context.is_beside and len(looks) > 2 else None

        check = Check("ecc", look, Scope.task, is_passive=True, **kind)
        monkeypatch.setattr(attempt, "CHECKS", (check,))

    return plant


def ecc(action):
    config = CheckConfig(CheckAction[action])
    return {"every_s": 0.01, "checks": {"ecc": {"action": config.action.name}}}


@pytest.mark.parametrize(
    ("action", "reason"),
    [("exclude_node", Reason.unhealthy), ("halt", Reason.halted), ("refuse", Reason.unhealthy)],
)
def test_what_is_found_beside_training_saves_and_ends_it_with_69(action, reason, planted, tmp_path):
    """Not in the middle of a step: what was trained so far is worth keeping."""
    planted()
    left, run = trained(tmp_path, ecc(action))
    assert (left.code, left.reason) == (69, reason)
    assert "Health check `ecc` failed" in left.text
    assert (tmp_path / f"step_{run.step}").is_dir()
    assert verdict.read(tmp_path).reason is reason
    assert [one.action for one in sick.read(tmp_path, 1).values()] == [action]


def test_what_a_doubtful_device_has_computed_is_not_saved(planted, tmp_path):
    """It would be resumed from, on a healthy node."""
    planted(is_doubtful=True)
    left, _ = trained(tmp_path, ecc("halt"))
    assert (left.code, left.reason) == (69, Reason.halted)
    assert list(tmp_path.glob("step_*")) == []
    assert verdict.read(tmp_path).reason is Reason.halted


def test_a_warning_is_in_the_ledger_and_ends_nothing(planted, tmp_path):
    planted()
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(tmp_path), "every_steps": None}, "health": ecc("warn")}
    with forge.Run(policy, model=model) as run:
        for _ in run.steps(10**9):
            events = [e for a in forge.ledger.read(tmp_path).attempts for e in a.events]
            if any(event["kind"] == "health" for event in events):
                break
    (event,) = [event for event in events if event["kind"] == "health"]
    assert (event["check"], event["action"]) == ("ecc", "warn")
    assert "the preset `strict` would exclude this node" in event["text"]


def test_nothing_runs_beside_where_it_is_switched_off(planted, tmp_path):
    planted()
    for health in ({"every_s": None}, {"enabled": False, "every_s": 0.01}):
        seen = attempt.Health(HealthConfig(**health), tmp_path, tmp_path, Solo())
        seen.watch()
        assert seen._thread is None
        seen.close()


def test_a_check_that_still_hangs_is_not_made_again(monkeypatch, tmp_path):
    """Each round would leave one more thread behind."""
    ended, looks = threading.Event(), []

    def look(context):
        looks.append(1)
        ended.wait()

    check = Check("ecc", look, Scope.task, is_passive=True)
    monkeypatch.setattr(attempt, "CHECKS", (check,))
    ecc = CheckConfig(CheckAction.warn, timeout_s=0.01)
    config = HealthConfig(checks=ChecksConfig(ecc=ecc))
    health = attempt.Health(config, tmp_path, tmp_path, Solo())
    assert health._look() is None
    assert health._look() is None
    assert len(looks) == 1
    ended.set()
    health._pending["ecc"].left.join()
    assert health._look() is None
    assert len(looks) == 2


def test_a_sick_node_costs_no_step_and_no_bit(tmp_path):
    """Stopped by the site's own check in the middle, and resumed where that passes again."""
    spec = {"steps": 30, "step_s": 0.03}
    job = Job(tmp_path / "job", policy={"health": site(tmp_path)}, **spec)
    process = job.start()
    job.wait_for_step(process, 5)
    (tmp_path / "sick").touch()
    assert process.wait() == 69, job.output
    assert "Health check `nhc` failed" in job.output
    assert "exit code 3: no fan" in job.output
    (tmp_path / "sick").unlink()
    job.run_to_end()
    assert job.steps_repeated == [0]
    whole = Job(tmp_path / "whole", policy={"health": {"enabled": False}}, **spec | {"step_s": 0})
    whole.run_to_end()
    assert_same_run(job, whole)


def test_all_ranks_leave_a_sick_node_together_and_one_names_it(tmp_path):
    """The first task of the node runs the site's check; the others have nothing to say."""
    job = RankedJob(tmp_path / "job", 2, pause_s=0.03, policy={"health": site(tmp_path)})
    processes = job.start()
    processes[0].wait_for(
        lambda: (forge.ledger.read_progress(job.checkpoints) or (0, 0))[1] >= 4, "step 4"
    )
    (tmp_path / "sick").touch()
    assert [one.wait() for one in processes] == [69, 69], job.output
    assert list(sick.read(job.checkpoints, 2)) == [0]
    verdicts = [verdict.read(job.checkpoints, rank) for rank in range(2)]
    assert verdicts[0].step == verdicts[1].step
    (tmp_path / "sick").unlink()
    job.run_to_end()
