"""The reaction of the policy to a failed check: a warning, or the end of the job."""

import os
import re
from pathlib import Path

import pytest
import yaml

from forge import messages
from forge.config.loading import load
from forge.config.schema import CheckAction
from forge.errors import Reason
from forge.health import storage
from forge.health.check import Answer, Check, Context, Finding, Scope
from forge.health.verdicts import Verdicts
from forge.jobdir import node_fault

CONF = Path(messages.__file__).parents[1] / "conf" / "resilience"
GPU = Check("gpu", lambda context: None, Scope.task)
DISK = Check("disk", lambda context: None, Scope.node)
RANKS = Check("ranks", lambda context: None, Scope.ranks)
SITE = Check("nhc", lambda context: None, Scope.node, is_command=True)
BAD = Answer(Finding("3 uncorrected errors", is_failed=True, remedy="Reset the GPU."))


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(messages, "warn", lines.append)
    return lines


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """The `Verdicts` of rank 1; its `events` are the lines for the ledger."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("FORGE_RANK", "1")
    found = Verdicts(tmp_path, 1, lambda kind, **values: found.events.append((kind, values)))
    found.events = []
    return found


def test_a_warning_says_what_was_found_and_what_to_do(judge, logged):
    assert judge.judge(GPU, CheckAction.warn, BAD) is None
    text = (
        "Health check `gpu` failed on n1: 3 uncorrected errors. Reset the GPU. Only logged"
        " (`resilience.health.checks.gpu=warn`)."
    )
    assert logged == [text]
    assert judge.events == [
        ("health", {"check": "gpu", "node": "n1", "text": text, "action": "warn"})
    ]


def test_a_site_s_own_check_names_its_own_key(judge, logged):
    judge.judge(SITE, CheckAction.warn, BAD)
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
    """The wrapper reads the reason to restart the job or not, and the file to avoid the node."""
    exit_ = judge.judge(DISK, action, BAD)
    assert (exit_.code, exit_.reason) == (69, reason)
    (found,) = node_fault.read_all(tmp_path, 2).values()
    assert (found.node, found.check, found.action) == ("n1", "disk", action.name)
    assert f"(`resilience.health.checks.disk={action.name}`)" in exit_.text
    (event,) = judge.events
    assert event[1] | {"text": ""} == {
        **{"check": "disk", "node": "n1", "text": "", "action": action.name}
    }
    assert logged == []


@pytest.mark.parametrize("action", ["refuse", "exclude_node", "halt"])
def test_little_room_is_only_logged_whatever_the_action(action, judge, logged, tmp_path):
    """All nodes have the same file system, so one after the other would be excluded."""
    little = Answer(Finding("space for 1.0 more", is_failed=True, only_warns=True, remedy="Tidy."))
    assert judge.judge(DISK, CheckAction[action], little) is None
    assert logged == [
        "Health check `disk` failed on n1: space for 1.0 more. Tidy. Only logged (whatever"
        " `resilience.health.checks.disk` is)."
    ]
    assert node_fault.read_all(tmp_path, 2) == {}


@pytest.mark.parametrize(("culprits", "is_named"), [((1, 4), True), ((0,), False), ((), False)])
def test_of_ranks_that_differ_only_the_culprit_s_node_is_sick(culprits, is_named, judge, tmp_path):
    """All ranks stop, but only the culprit's node is avoided, or no node if it is not known."""
    finding = Finding("rank 1 is behind", is_failed=True, culprits=culprits)
    exit_ = judge.judge(RANKS, CheckAction.exclude_node, Answer(finding))
    assert exit_ is not None
    (found,) = node_fault.read_all(tmp_path, 2).values()
    assert found.node == ("n1" if is_named else "")


def test_what_all_ranks_find_is_logged_by_one(judge, logged, tmp_path):
    finding = Answer(Finding("rank 1 is behind", is_failed=True, culprits=(1,)))
    judge.judge(RANKS, CheckAction.warn, finding)
    assert logged == []
    Verdicts(tmp_path, 0, lambda kind, **values: None).judge(RANKS, CheckAction.warn, finding)
    assert len(logged) == 1


def test_what_could_not_be_made_is_logged_and_does_nothing(judge, logged):
    answer = Answer(error="ValueError: no such line")
    assert judge.judge(DISK, CheckAction.halt, answer) is None
    assert logged == ["Health check `disk` crashed, and was ignored: ValueError: no such line"]


def blocks(language):
    page = CONF.parents[1] / "docs" / "how-to" / "health.md"
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_page_shows_what_is_logged(judge, logged, monkeypatch, tmp_path):
    """A user who searches the page for a line of the log has to find that line."""
    found = os.statvfs_result((4096, 4096, 16384, 15729, 15729, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    answer = Answer(storage.shm(Context(tmp_path, tmp_path)))
    judge.judge(Check("shm", storage.shm, Scope.node), CheckAction.warn, answer)
    assert " ".join(blocks("text")[1].split()) == logged[0]


def test_the_yaml_of_the_page_is_a_good_policy():
    given = yaml.safe_load(blocks("yaml")[0])["resilience"]
    nhc, dcgm = load(given).health.commands.values()
    assert (nhc.run, nhc.action) == (["nhc", "-a"], CheckAction.exclude_node)
    assert dcgm.run == ["dcgmi", "diag", "-r", "1"]


def test_what_is_healthy_or_not_here_is_silent(judge, logged):
    for answer in (Answer(), Answer(Finding("0 errors"))):
        assert judge.judge(GPU, CheckAction.halt, answer) is None
    assert (logged, judge.events) == ([], [])
