"""Checks of ranks against each other, in threads that play them."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forge.config.schema import CheckConfig
from forge.errors import RankLost
from forge.health import peers
from forge.health.check import Check, Context, Scope, make


class Rank:
    """One of several, whose values meet in a dict."""

    def __init__(self, rank, size, given, changed):
        self.rank, self.size = rank, size
        self._given, self._changed = given, changed

    def gather(self, key, value, timeout_s, unless=None):
        with self._changed:
            self._given[key, self.rank] = value
            self._changed.notify_all()
            keys = [(key, rank) for rank in range(self.size)]
            if not self._changed.wait_for(lambda: self._given.keys() >= set(keys), timeout_s):
                raise RankLost(f"not all have come to {key} within {timeout_s:g} s")
            return [self._given[one] for one in keys]


def found_by(look, folders, threshold=5.0, timeout_s=60.0, only=None):
    """What each rank finds, with a checkpoint directory of its own or the same."""
    given, changed = {}, threading.Condition()
    contexts = [
        Context(
            CheckConfig(threshold=threshold, timeout_s=timeout_s),
            folder,
            folder,
            ranks=Rank(rank, len(folders), given, changed),
        )
        for rank, folder in enumerate(folders)
        if only is None or rank in only
    ]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(look, contexts))


def test_a_directory_that_all_see_passes_and_keeps_nothing(tmp_path):
    found = found_by(peers.shared_directory, [tmp_path] * 3)
    assert not any(one.is_failed for one in found)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_with_a_disk_of_its_own_is_named(tmp_path):
    """Its files of a checkpoint would be missing, hours later."""
    own = tmp_path / "own"
    own.mkdir()
    found = found_by(peers.shared_directory, [tmp_path, tmp_path, own], timeout_s=0.4)
    assert all(one.is_failed for one in found)
    assert {one.culprits for one in found} == {(2,)}
    assert "rank 2 on " in found[0].value
    assert list(own.iterdir()) == []


def test_where_rank_0_cannot_write_it_is_the_one(tmp_path):
    (tmp_path / "file").touch()
    found = found_by(peers.shared_directory, [tmp_path / "file" / "in", tmp_path])
    assert {one.culprits for one in found} == {(0,)}
    assert "rank 0 on " in found[1].value
    assert " cannot write there: [Errno" in found[1].value


@pytest.mark.parametrize("look", [peers.shared_directory, peers.collective])
def test_a_rank_that_does_not_come_is_a_failure_of_nobody_s_node(look, tmp_path):
    check = Check("of all", look, Scope.ranks)
    (answer,) = found_by(
        lambda context: make(check, context), [tmp_path] * 2, timeout_s=0.05, only=[0]
    )
    assert answer.finding.is_failed
    assert answer.finding.value.startswith("not all have come to health/")
    assert answer.finding.culprits == ()
    assert list(tmp_path.iterdir()) == []


def test_a_collective_that_fails_on_some_ranks_names_them(tmp_path, monkeypatch):
    """Where it fails on all of them nobody knows whose fault it is."""
    from forge.resilience import health

    here = threading.local()

    def look(context):
        here.ranks = context.ranks
        return peers.collective(context)

    def is_right(limit_s, bad):
        come = [rank for key, rank in here.ranks._given if key == "health/before the collective"]
        assert len(come) == 6  # else whoever comes late looks like a broken network
        return here.ranks.rank not in bad

    for bad, culprits in (((1,), (1,)), (range(6), ())):
        monkeypatch.setattr(health, "check_nccl_health", functools.partial(is_right, bad=bad))
        found = found_by(look, [tmp_path] * 6)
        assert all(one.is_failed for one in found)
        assert {one.culprits for one in found} == {culprits}
    assert found[0].value.count("had no right answer within 60 s") == 4
    assert found[0].value.endswith("; 2 more")


def test_a_rank_that_is_alone_has_no_peers(tmp_path):
    context = Context(CheckConfig(), tmp_path, tmp_path)
    assert peers.collective(context) is None
    assert peers.shared_directory(context) is None
