"""How a check is made: bounded, and an error of its own is no verdict."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from forge.config.schema import (
    CheckAction,
    CheckConfig,
    ChecksConfig,
    CommandCheckConfig,
    HealthConfig,
)
from forge.errors import DiskFull
from forge.health.attempt import Health, asked_for
from forge.health.check import Check, Context, Scope, make
from forge.health.table import CHECKS


def context(tmp_path=Path(), timeout_s=60.0, **given):
    return Context(CheckConfig(timeout_s=timeout_s), tmp_path, tmp_path, **given)


def test_the_names_of_the_built_in_checks_are_keys_of_the_policy():
    """A check without a key could not be switched off."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert set(names) <= set(vars(ChecksConfig()))


def test_what_the_policy_ignores_is_not_made(tmp_path):
    """Neither a check of forge's nor a site's own."""
    ignored = CheckConfig(CheckAction.ignore)
    nhc = CommandCheckConfig(["false"], action=CheckAction.ignore)
    config = HealthConfig(checks=ChecksConfig(ecc=ignored), commands={"nhc": nhc})
    made = [check.name for check, _ in asked_for(config, context(tmp_path))]
    assert made == [check.name for check in CHECKS if check.name != "ecc"]
    assert asked_for(replace(config, enabled=False), context(tmp_path)) == []


def test_every_rank_waits_for_the_checks_of_the_first_of_its_node(tmp_path):
    """It has more of them; the others would give it up."""
    first = Health(HealthConfig(), context(tmp_path))
    other = Health(HealthConfig(), context(tmp_path, is_first_of_node=False))
    num_together = sum(check.scope is Scope.ranks for check in CHECKS)
    assert first.limit_s == other.limit_s == 60.0 * (len(CHECKS) - num_together)


def test_what_is_at_the_threshold_passes():
    """A disk of which 0 GiB have to be free may be full: that is `room`'s to say."""
    given = Context(CheckConfig(threshold=2.0), Path(), Path())
    assert [given.is_above(value) for value in (1.9, 2, 2.1)] == [False, False, True]
    assert [given.is_below(value) for value in (1.9, 2, 2.1)] == [True, False, False]


def test_what_meets_other_ranks_or_computes_does_not_run_beside_training():
    """A collective between two of the training's own would hang it."""
    for check in CHECKS:
        if check.name in ("gpu", "disk", "shared_directory", "collective"):
            assert not check.is_passive, check.name


def test_a_check_that_blocks_fails_at_its_timeout_and_is_seen_to_run_still():
    """A file system that hangs must not hold up the run, nor be asked again and again."""
    blocked = threading.Event()

    def look(context):
        blocked.wait()

    answer = make(Check("disk", look, Scope.node), context(timeout_s=0.1))
    assert answer.finding is not None
    assert answer.finding.is_failed
    assert answer.finding.value == "no answer within 0.1 s"
    assert answer.is_pending
    blocked.set()
    answer.left.join()
    assert not answer.is_pending


def test_who_has_to_leave_waits_for_no_check():
    """A stop has seconds; a file system that hangs has more."""
    blocked, asked = threading.Event(), []

    def unless():
        asked.append(1)
        return len(asked) > 1

    check = Check("disk", lambda context: blocked.wait() or None, Scope.node)
    answer = make(check, context(timeout_s=3600.0), unless)
    assert (answer.finding, answer.error, answer.is_pending) == (None, "", True)
    blocked.set()
    answer.left.join()


def test_of_ranks_that_meet_none_is_to_blame_for_a_check_that_blocks():
    """Else every node of the job would be excluded."""
    blocked = threading.Event()
    check = Check("collective", lambda context: blocked.wait() or None, Scope.ranks)
    answer = make(check, context(timeout_s=0.05))
    blocked.set()
    assert answer.finding.culprits == ()


def test_a_check_that_cannot_be_made_is_no_verdict():
    """An unforeseen line in /proc must not exclude a node."""

    def look(context):
        raise ValueError("no such line")

    answer = make(Check("memory", look, Scope.node), context())
    assert answer.finding is None
    assert answer.error == "ValueError: no such line"


def test_a_full_disk_is_an_error_of_its_own():
    def look(context):
        raise DiskFull("no room")

    with pytest.raises(DiskFull, match="no room"):
        make(Check("disk", look, Scope.node), context())
