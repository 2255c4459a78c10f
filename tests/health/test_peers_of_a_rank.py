"""Checks of ranks against each other, in threads that play them."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("look", [peers.shared_directory, peers.clock_skew, peers.collective])
def test_a_rank_that_does_not_come_is_a_failure_of_nobody_s_node(look, tmp_path):
    check = Check("of all", look, Scope.ranks)
    (answer,) = found_by(
        lambda context: make(check, context), [tmp_path] * 2, timeout_s=0.05, only=[0]
    )
    assert answer.finding.is_failed
    assert answer.finding.value.startswith("not all have come to health/")
    assert answer.finding.culprits == ()
    assert list(tmp_path.iterdir()) == []


def test_clocks_that_agree_pass(tmp_path):
    (one, other) = found_by(peers.clock_skew, [tmp_path, tmp_path])
    assert not one.is_failed
    assert one.value == other.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("clocks", "offsets", "is_failed", "culprits"),
    [
        ([100.0, 100.2, 100.1], [0, 0, 0], False, ()),
        ([100.0, 100.2, 130.1], [0, 0, 30], True, (2,)),
        ([70.0, 100.2, 100.1], [-30, 0, 0], True, (0,)),
        ([100.0, 112.0], [-12, 0], True, (0,)),  # of two the file system knows which is wrong
        ([100.0, 112.0], [0, 0], True, (1,)),
        ([100.0, 100.0], [60, 60], True, ()),  # the server's clock is wrong
        ([100.0], [60], True, None),
        ([100.0], [-4], False, None),
    ],
)
def test_the_clock_that_is_wrong_is_the_one_the_others_contradict(
    clocks, offsets, is_failed, culprits
):
    """Its node is excluded, not its neighbour."""
    given = [
        {"node": f"n{rank}", "clock": clock, "file_s": offset}
        for rank, (clock, offset) in enumerate(zip(clocks, offsets, strict=True))
    ]
    context = Context(CheckConfig(threshold=5.0), Path(), Path())
    found = peers.skew_between(given, context)
    assert (found.is_failed, found.culprits) == (is_failed, culprits)


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


@pytest.mark.parametrize(("stamp", "ahead_s"), [(90, 10), (105, 0), (120, -10)])
def test_the_clock_of_files_is_read_between_two_looks_at_the_own(
    stamp, ahead_s, tmp_path, monkeypatch
):
    """A file system that takes ten seconds is slow, and its clock is right."""
    times = [100, 110]
    found = SimpleNamespace(st_mtime=stamp)
    played = SimpleNamespace(fsync=lambda fd: None, fstat=lambda fd: found)
    monkeypatch.setattr(peers, "os", played)
    monkeypatch.setattr(peers, "time", SimpleNamespace(time=lambda: times.pop(0)))
    assert peers._ahead_of_files_s(tmp_path) == ahead_s


def test_one_rank_of_a_node_asks_for_the_clock_of_files(tmp_path, monkeypatch):
    """All of a node have the same clock; a thousand synced files are a load."""
    monkeypatch.setattr(peers, "_ahead_of_files_s", pytest.fail)
    context = Context(CheckConfig(), tmp_path, tmp_path, is_first_of_node=False)
    assert peers.clock_skew(context).value == "0.0 s from the clock of the file system"


def test_a_rank_that_is_alone_has_no_peers(tmp_path):
    context = Context(CheckConfig(), tmp_path, tmp_path)
    assert peers.collective(context) is None
    assert peers.shared_directory(context) is None
    assert not peers.clock_skew(context).is_failed
