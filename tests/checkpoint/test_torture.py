"""A share of what `all_points.py` does exhaustively, and proof that each part of it can fail.

Everything runs in a process of its own: it forks, and its children die.
"""

import json
import os
from pathlib import Path

import pytest
from forked import completed

SCRIPT = Path(__file__).parents[1] / "proofs/torture/all_points.py"
MEMORY = Path("/dev/shm")


def torture(part, share, directory, ways=""):
    if os.access(MEMORY, os.W_OK):  # thousands of fsyncs would only wear out a disk
        directory = MEMORY
    options = ["--only", part, "--share", str(share), "--ways", ways, "--json"]
    command = [str(SCRIPT), *options, "--directory", str(directory)]
    done = completed(command, SCRIPT.parent, joins_output=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == [], "\n\n".join(found["failures"][:5])
    assert done.returncode == 0
    return found["numbers"]


def test_a_kill_at_any_call_loses_nothing_that_was_committed(tmp_path):
    """Before, after and in the middle of it; the next attempt finds all, and leaves nothing."""
    numbers = torture("kills", 0.008, tmp_path)
    assert numbers["scenarios"] == 6
    assert numbers["calls"] > 400
    assert numbers["survived"] == numbers["killed"] > 10


def test_a_power_cut_at_any_place_loses_nothing_that_was_committed(tmp_path):
    """On a disk that forgets whatever was not synced, in any order that it likes."""
    numbers = torture("power", 0.004, tmp_path)
    assert numbers["cuts"] > 10_000
    assert numbers["survived"] == numbers["states"] > 40


def test_a_failure_of_any_call_loses_nothing_and_the_next_try_succeeds(tmp_path):
    """Full, over quota, broken, stale, interrupted, and reads and writes that stop half-way."""
    numbers = torture("errors", 0.003, tmp_path)
    assert numbers["points"] > 3000
    assert numbers["survived"] == numbers["failures_made"] > 12
    assert numbers["operations_failed"] > 5


def test_a_full_disk_loses_nothing_and_room_is_all_that_it_takes(tmp_path):
    """Not a pretended one: pages and files are counted by the system."""
    numbers = torture("full", 0.03, tmp_path)
    if "not_possible" in numbers:
        pytest.skip("needs the right to mount in a private namespace (root)")
    assert numbers["survived"] == numbers["filled"] > 10
    assert numbers["operations_failed"] > 1


def test_damage_is_told_or_the_values_are_exact(tmp_path):
    """Nothing is ever read in silence that was not saved; no memory is lost over it."""
    numbers = torture("damage", 0.02, tmp_path)
    assert numbers["flips"] > 150
    assert numbers["replaced_told"] == 33


def test_what_forge_has_not_written_is_refused_or_read_soon_and_in_little_memory(tmp_path):
    """Checksums that match say who wrote it, not that it makes sense."""
    numbers = torture("fuzz", 0.01, tmp_path)
    assert min(numbers[f"{file}_told"] for file in ("manifest", "state", "header")) > 20
    assert numbers["state_read"] > 4


def test_an_older_attempt_that_wakes_up_at_any_call_changes_nothing(tmp_path):
    """The check of the token alone would leave an instant between it and the rename."""
    numbers = torture("zombies", 0.008, tmp_path)
    assert numbers["survived"] == numbers["interleavings"] > 5


def test_a_rank_that_is_killed_at_any_call_of_a_save_of_all_loses_nothing(tmp_path):
    """The others end, and a fresh group reads one checkpoint and saves the next."""
    numbers = torture("ranks", 0.015, tmp_path)
    assert numbers["points_of_disk"] > 200
    assert numbers["points_of_group"] > 100
    assert numbers["survived"] == numbers["killed"] > 2


WAYS = {
    "kills": "no_clean_up",
    "power": "no_directory_sync",
    "full": "no_write_errors",
    "damage": "no_checksums",
    "fuzz": "no_odd_errors",
    "zombies": "no_fence",
    "ranks": "no_wait_for_ranks",
}


@pytest.mark.proofs
@pytest.mark.slow
def test_a_broken_promise_is_noticed_by_each_part(tmp_path):
    """A torture that cannot fail proves nothing.

    `--only proofs` breaks all others as well, with that of the errors, which takes longest.
    """
    numbers = torture("proofs", 0.05, tmp_path, ways=",".join(WAYS.values()))
    assert numbers.keys() == {f"{way}_found_by_{part}" for part, way in WAYS.items()}
    assert all(numbers.values())
