"""The check of ranks against each other, in threads that play them."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

from forge.errors import RankLost
from forge.health import peers
from forge.health.check import Check, Context, Scope, make


class Rank:
    """One of several, whose values meet in a dict."""

    def __init__(self, rank, size, given, changed):
        self.rank, self.size = rank, size
        self._given, self._changed = given, changed

    def gather(self, key, value, timeout_s):
        with self._changed:
            self._given[key, self.rank] = value
            self._changed.notify_all()
            keys = [(key, rank) for rank in range(self.size)]
            if not self._changed.wait_for(lambda: self._given.keys() >= set(keys), timeout_s):
                raise RankLost(f"not all have come to {key} within {timeout_s:g} s")
            return [self._given[one] for one in keys]

    def come_to(self, key):
        """The ranks that have given something under it."""
        return [rank for given, rank in self._given if given == key]


def found_by(folders, only=None, look=peers.ranks):
    """What each rank finds, with a checkpoint directory of its own or the same."""
    given, changed = {}, threading.Condition()
    contexts = [
        Context(folder, folder, ranks=Rank(rank, len(folders), given, changed))
        for rank, folder in enumerate(folders)
        if only is None or rank in only
    ]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(look, contexts))


def test_ranks_that_all_see_one_directory_pass_and_keep_nothing_there(tmp_path):
    found = found_by([tmp_path] * 3)
    assert not any(one.is_failed for one in found)
    assert (
        found[0].value
        == "3 ranks read the same directory, and an all-reduce returned the correct sum"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_rank_with_a_disk_of_its_own_is_named(tmp_path, monkeypatch):
    """Its files of a checkpoint would be missing, hours later."""
    monkeypatch.setattr(peers, "_VISIBLE_S", 0.2)
    own = tmp_path / "own"
    own.mkdir()
    found = found_by([tmp_path, tmp_path, own])
    assert all(one.is_failed for one in found)
    assert {one.culprits for one in found} == {(2,)}
    assert "rank 2 on " in found[0].value
    assert list(own.iterdir()) == []


def test_if_rank_0_cannot_write_it_is_the_one(tmp_path):
    (tmp_path / "file").touch()
    found = found_by([tmp_path / "file" / "in", tmp_path])
    assert {one.culprits for one in found} == {(0,)}
    assert "rank 0 on " in found[1].value
    assert " cannot write there: [Errno" in found[1].value


def test_a_rank_that_does_not_come_is_a_failure_of_nobody_s_node(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.05)
    check = Check("ranks", peers.ranks, Scope.ranks)
    (answer,) = found_by([tmp_path] * 2, [0], functools.partial(make, check))
    assert answer.finding.is_failed
    assert answer.finding.value.startswith("not all have come to health/")
    assert answer.finding.culprits == ()
    assert list(tmp_path.iterdir()) == []


def test_a_collective_that_fails_on_some_ranks_names_them(tmp_path, monkeypatch):
    """If it fails on all of them nobody knows whose fault it is."""
    from forge.health import devices

    here = threading.local()

    def look(context):
        here.ranks = context.ranks
        return peers.ranks(context)

    def is_right(limit_s, bad):
        come = here.ranks.come_to("health/the shared file was read")
        assert len(come) == 6  # else whoever comes late looks like a broken network
        return here.ranks.rank not in bad

    for bad, culprits in (((1,), (1,)), (range(6), ())):
        monkeypatch.setattr(devices, "check_nccl_health", functools.partial(is_right, bad=bad))
        found = found_by([tmp_path] * 6, look=look)
        assert all(one.is_failed for one in found)
        assert {one.culprits for one in found} == {culprits}
    assert found[0].value.count("did not get the correct sum within 60 s") == 4
    assert found[0].value.endswith("; 2 more")


def test_a_rank_that_is_alone_has_no_peers(tmp_path):
    assert peers.ranks(Context(tmp_path, tmp_path)) is None
