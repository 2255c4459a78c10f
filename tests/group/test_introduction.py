"""Ranks find each other by a store that is open to everybody, and trust none of what it says."""

import itertools
import json
import os
import threading
import time

import pytest
import torch.distributed as dist
from harness import until

from forge.errors import RankLost
from forge.group import introduction, secret
from forge.group.introduction import Introduction
from forge.group.secret import Secret

LIMIT_S = 60
ENTRY, PLACE = "forge/ranks/0", "forge/ranks/0/place"


@pytest.fixture
def meeting(monkeypatch):
    """What torch's store is, and another one for each test."""
    found = dist.HashStore()
    monkeypatch.setattr(introduction.of_torch, "default_store", lambda: found)
    monkeypatch.setattr(introduction, "_made", itertools.repeat(0))
    return found


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "job" / ".forge"


@pytest.fixture
def first(meeting, folder):
    """Rank 0 of two, in a thread, and how it ended."""
    ended = []

    def run():
        try:
            ended.append(Introduction(0, 2, LIMIT_S, lambda: folder).make(lambda *_: [7, 8]))
        except RankLost as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: meeting.check([ENTRY]), "entry of rank 0")
    yield ended
    meeting.set(f"{ENTRY}/1", "over")
    thread.join()


def second(folder):
    return Introduction(1, 2, LIMIT_S, lambda: folder).make(lambda *_: [])


def test_the_secret_is_in_a_file_that_nobody_else_reads_until_all_have_it(first, folder):
    """Whoever has it speaks for every rank."""
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    found = second(folder)
    until(lambda: first, "rank 0")
    assert (found.address, found.ports) == ("127.0.0.1", [7, 8])
    assert found.secret.code("x") == first[0].secret.code("x")
    assert list(folder.iterdir()) == []


def test_a_place_that_rank_0_has_not_named_is_not_gone_to(first, meeting, folder):
    """Who names another one would be rank 0 for all others."""
    forged = json.dumps(["machine", "192.0.2.1", 1, 2])
    meeting.set(PLACE, Secret("a", b"guessed").seal(PLACE, forged.encode()))
    with pytest.raises(RankLost, match="was not written by one of them"):
        second(folder)


def test_a_secret_that_somebody_else_could_have_written_is_not_used(meeting, tmp_path):
    """An attacker names a directory with a secret of the attacker's own."""
    folder = tmp_path / ".forge"
    drawn = secret.draw(folder)
    (file,) = folder.iterdir()
    file.chmod(0o666)
    at = ["1", "host", str(folder), drawn.attempt]
    meeting.set(ENTRY, json.dumps({"job": {}, "at": at}))
    with pytest.raises(RankLost, match="can be written by everybody"):
        second(folder)


@pytest.mark.parametrize("attempt", ["../../job", "", "0" * 31, "A" * 32])
def test_only_the_name_of_a_secret_is_opened(attempt, meeting, tmp_path):
    """Some other file of the user's has a content that others know."""
    at = ["1", "host", str(tmp_path / ".forge"), attempt]
    meeting.set(ENTRY, json.dumps({"job": {}, "at": at}))
    with pytest.raises(RankLost, match=r"which is not in a job's \.forge folder"):
        second(tmp_path)


@pytest.mark.parametrize(
    "entry", ["", "[]", "garbage", '{"at": []}', '{"at": [1, 2, 3, 4], "job": 5}']
)
def test_garbage_in_the_place_of_an_entry_is_an_end_that_is_restarted(entry, meeting, tmp_path):
    """Anybody can write it."""
    meeting.set(ENTRY, entry)
    with pytest.raises(RankLost, match="was not written by rank 0"):
        second(tmp_path)


def test_garbage_in_the_name_of_another_rank_ends_rank_0(first, meeting):
    """It would wait for that rank, or take its word."""
    meeting.set(f"{ENTRY}/1", "garbage")
    until(lambda: first, "rank 0")
    assert "was not written by one of them" in str(first[0])


def test_a_directory_that_a_rank_does_not_see_is_named_on_both_sides(
    first, meeting, folder, monkeypatch
):
    """Not every node has mounted it."""
    monkeypatch.setattr(secret, "_SHARED_S", 0.0)
    (file,) = folder.iterdir()
    file.rename(folder.parent / "elsewhere")
    with pytest.raises(RankLost, match="file system that is shared by all nodes of the job"):
        second(folder)
    until(lambda: first, "rank 0")
    assert f"Rank 1 of 2 refused to join this job in {folder}" in str(first[0])


def test_a_rank_0_that_cannot_write_its_secret_does_not_let_the_others_wait(meeting, tmp_path):
    """They would, for five minutes."""
    (tmp_path / "job").touch()
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        Introduction(0, 2, LIMIT_S, lambda: tmp_path / "job" / ".forge").make(lambda *_: [])
    with pytest.raises(RankLost, match="see the output of rank 0"):
        second(tmp_path)


def test_secrets_of_attempts_that_were_killed_are_removed(folder):
    """Those of an attempt that begins now are not: its ranks may have yet to read it."""
    secret.draw(folder)
    (old,) = folder.iterdir()
    os.utime(old, (time.time() - 7200,) * 2)
    secret.draw(folder)
    secret.clear(folder)
    assert len(list(folder.iterdir())) == 1
    assert not old.exists()
