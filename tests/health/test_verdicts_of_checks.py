"""What the policy makes of a finding: a word, or the end of the job."""

import os
import re
from pathlib import Path

import pytest
import yaml

from forge import messages
from forge.config.loading import load
from forge.config.schema import CheckAction, CheckConfig, ChecksConfig
from forge.config.strict import STRICT
from forge.errors import Reason
from forge.group import facts
from forge.health import host
from forge.health.check import Answer, Check, Context, Finding, Scope
from forge.health.verdicts import Verdicts
from forge.jobdir import sick

CONF = Path(messages.__file__).parents[1] / "conf" / "resilience"
ECC = Check("ecc", lambda context: None, Scope.task, is_doubtful=True)
ROOM = Check("room", lambda context: None, Scope.node)
SKEW = Check("clock_skew", lambda context: None, Scope.ranks)
SITE = Check("nhc", lambda context: None, Scope.node)
BAD = Answer(Finding("3 uncorrected errors", is_failed=True, remedy="Reset the GPU."))


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(messages, "warn", lines.append)
    return lines


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Of rank 1, with what it writes into the ledger."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("FORGE_RANK", "1")
    found = Verdicts(tmp_path, 1, lambda kind, **values: found.events.append((kind, values)))
    found.events = []
    return found


def test_strict_in_the_code_is_strict_in_the_preset():
    """What is logged comes from the code, and what people choose from the file."""
    text = (CONF / "strict.yaml").read_text()
    checks = yaml.safe_load(text)["health"]["checks"]
    assert {name: one["action"] for name, one in checks.items()} == {
        name: action.name for name, action in STRICT.items()
    }
    assert set(STRICT) == set(vars(ChecksConfig()))


def test_a_warning_says_what_was_found_what_to_do_and_what_strict_would_do(judge, logged):
    config = CheckConfig(CheckAction.warn, 0.0)
    assert judge.judge(ECC, config, BAD) is None
    text = (
        "Health check `ecc` failed on n1: 3 uncorrected errors (threshold 0). Reset the GPU. Only"
        " logged; the preset `strict` would exclude this node"
        " (`resilience.health.checks.ecc.action=exclude_node`)."
    )
    assert logged == [text]
    assert judge.events == [
        ("health", {"check": "ecc", "node": "n1", "text": text, "action": "warn"})
    ]


def test_a_warning_is_logged_once_until_the_check_has_passed(judge, logged):
    """Degrees and megabytes change all the time: five minutes later it is no news."""
    hot = Check("temperature", lambda context: None, Scope.task)
    for degrees in (85, 86, None, 85, 80, 87, 88):
        found = degrees and Finding(f"{degrees} °C", is_failed=degrees > 84)
        judge.judge(hot, CheckConfig(CheckAction.warn), Answer(found))
    assert [line.split(": ")[1].partition(". ")[0] for line in logged] == ["85 °C", "87 °C"]


def test_a_site_s_own_check_promises_nothing(judge, logged):
    judge.judge(SITE, CheckConfig(CheckAction.warn), BAD)
    assert logged[0].endswith("Only logged (`resilience.health.commands.nhc.action=warn`).")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (CheckAction.refuse, Reason.unhealthy),
        (CheckAction.exclude_node, Reason.unhealthy),
        (CheckAction.halt, Reason.halted),
    ],
)
def test_a_refusal_names_the_sick_node_and_ends_with_69(action, reason, judge, logged, tmp_path):
    """The wrapper decides by the reason whether, and by the file where, the job starts again."""
    refusal = judge.judge(ROOM, CheckConfig(action), BAD)
    assert (refusal.exit.code, refusal.exit.reason) == (69, reason)
    (found,) = sick.read_all(tmp_path, 2).values()
    assert (found.node, found.check, found.action) == ("n1", "room", action.name)
    assert refusal.fact == facts.StopAsked(69, reason, text=refusal.text)
    assert f"(`resilience.health.checks.room.action={action.name}`)" in refusal.text
    (event,) = judge.events
    assert event[1] | {"text": ""} == {
        **{"check": "room", "node": "n1", "text": "", "action": action.name}
    }
    assert logged == []


def test_what_a_doubtful_gpu_has_computed_is_not_saved(judge):
    refusal = judge.judge(ECC, CheckConfig(CheckAction.exclude_node), BAD)
    assert refusal.fact == facts.Failed(69, refusal.text, Reason.unhealthy)
    assert facts.from_text(facts.to_text(refusal.fact)) == refusal.fact


@pytest.mark.parametrize(("culprits", "is_named"), [((1, 4), True), ((0,), False), ((), False)])
def test_of_ranks_that_differ_only_the_culprit_s_node_is_sick(culprits, is_named, judge, tmp_path):
    """All of them leave; one node is avoided, or none: not that of whoever leaves first."""
    finding = Finding("rank 1 is behind", is_failed=True, culprits=culprits)
    refusal = judge.judge(SKEW, CheckConfig(CheckAction.exclude_node), Answer(finding))
    assert refusal is not None
    (found,) = sick.read_all(tmp_path, 2).values()
    assert found.node == ("n1" if is_named else "")


def test_what_all_ranks_find_is_logged_by_one(judge, logged, tmp_path):
    finding = Answer(Finding("rank 1 is behind", is_failed=True, culprits=(1,)))
    judge.judge(SKEW, CheckConfig(CheckAction.warn), finding)
    assert logged == []
    Verdicts(tmp_path, 0, lambda kind, **values: None).judge(
        SKEW, CheckConfig(CheckAction.warn), finding
    )
    assert len(logged) == 1


def test_what_could_not_be_made_is_logged_and_does_nothing(judge, logged):
    answer = Answer(error="ValueError: no such line")
    for _ in range(2):
        assert judge.judge(ROOM, CheckConfig(CheckAction.halt), answer) is None
    assert logged == ["Health check `room` was not made: ValueError: no such line"]


def blocks(language):
    page = CONF.parents[1] / "docs" / "how-to" / "health.md"
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_page_shows_what_is_logged(judge, logged, monkeypatch, tmp_path):
    """Whoever searches the page for a line of the log finds it."""
    found = os.statvfs_result((4096, 4096, 16384, 15729, 15729, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    config = CheckConfig(CheckAction.warn, 1.0)
    check = Check("shm", host.shm, Scope.node)
    answer = Answer(host.shm(Context(config, tmp_path, tmp_path)))
    judge.judge(check, config, answer)
    assert " ".join(blocks("text")[0].split()) == logged[0]


def test_the_yaml_of_the_page_is_a_good_policy():
    given = yaml.safe_load(blocks("yaml")[0])["resilience"]
    (found,) = load(given).health.commands.values()
    assert (found.run, found.action) == (["nhc", "-a"], CheckAction.exclude_node)


def test_what_is_healthy_or_not_here_is_silent(judge, logged):
    for answer in (Answer(), Answer(Finding("0 errors"))):
        assert judge.judge(ECC, CheckConfig(CheckAction.halt), answer) is None
    assert (logged, judge.events) == ([], [])
