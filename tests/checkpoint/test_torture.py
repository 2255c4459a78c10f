"""A share of what `all_points.py` does exhaustively, and proof that each part of it can fail.

All of it runs in a process of its own: it forks, and its children die.
"""

import json
import os
from pathlib import Path

import pytest
from forked import completed

SCRIPT = Path(__file__).parents[1] / "proofs/torture/all_points.py"
MEMORY = Path("/dev/shm")


SHARES = {
    "kills": 0.003,
    "power": 0.0012,
    "errors": 0.0015,
    "full": 0.008,
    "damage": 0.008,
    "fuzz": 0.004,
    "zombies": 0.004,
    "ranks": 0.004,
}


def played(parts, directory, ways=""):
    """What each part found; all in one process, since its imports take as long as a part."""
    if os.access(MEMORY, os.W_OK):  # thousands of fsyncs would only wear out a disk
        directory = MEMORY
    only = ",".join(f"{part}={share}" for part, share in parts.items())
    options = ["--only", only, "--ways", ways, "--json", "--directory", str(directory)]
    done = completed([str(SCRIPT), *options], SCRIPT.parent, joins_output=False)
    found = {one["part"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == parts.keys(), done.stderr
    assert done.returncode == any(one["failures"] for one in found.values())
    return found


def numbers_of(found):
    assert found["failures"] == [], "\n\n".join(found["failures"][:5])
    return found["numbers"]


@pytest.fixture(scope="module")
def torture(tmp_path_factory):
    found = played(SHARES, tmp_path_factory.mktemp("torture"))
    return lambda part: numbers_of(found[part])


def test_a_kill_at_any_call_loses_nothing_that_was_committed(torture):
    """Before, after and in the middle of it; the next attempt finds all, and leaves nothing."""
    numbers = torture("kills")
    assert numbers["scenarios"] == 6
    assert numbers["calls"] > 400
    assert numbers["survived"] == numbers["killed"] > 4


def test_a_power_cut_at_any_place_loses_nothing_that_was_committed(torture):
    """On a disk that forgets whatever was not synced, in any order that it likes."""
    numbers = torture("power")
    assert numbers["cuts"] > 10_000
    assert numbers["survived"] == numbers["states"] > 15


def test_a_failure_of_any_call_loses_nothing_and_the_next_try_succeeds(torture):
    """Full, over quota, broken, stale, interrupted, and reads and writes that stop half-way."""
    numbers = torture("errors")
    assert numbers["points"] > 3000
    assert numbers["survived"] == numbers["failures_made"] > 4
    assert numbers["operations_failed"] > 2


def test_a_full_disk_loses_nothing_and_room_is_all_that_it_takes(torture):
    """Not a pretended one: pages and files are counted by the system."""
    numbers = torture("full")
    if "not_possible" in numbers:
        pytest.skip("needs the right to mount in a private namespace (root)")
    assert numbers["survived"] == numbers["filled"] > 5
    assert numbers["operations_failed"] > 0


def test_damage_is_told_or_the_values_are_exact(torture):
    """Nothing is ever read in silence that was not saved; no memory is lost over it."""
    numbers = torture("damage")
    assert numbers["flips"] > 60
    assert numbers["replaced_told"] == 33


def test_what_forge_has_not_written_is_refused_or_read_soon_and_in_little_memory(torture):
    """Checksums that match say who wrote it, not that it makes sense."""
    numbers = torture("fuzz")
    assert min(numbers[f"{file}_told"] for file in ("manifest", "state", "header")) > 5
    assert numbers["state_read"] > 1


def test_an_older_attempt_that_wakes_up_at_any_call_changes_nothing(torture):
    """The check of the token alone would leave an instant between it and the rename."""
    numbers = torture("zombies")
    assert numbers["survived"] == numbers["interleavings"] > 2


def test_a_rank_that_is_killed_at_any_call_of_a_save_of_all_loses_nothing(torture):
    """The others end, and a fresh group reads one checkpoint and saves the next."""
    numbers = torture("ranks")
    assert numbers["points_of_disk"] > 200
    assert numbers["points_of_group"] > 100
    assert numbers["survived"] == numbers["killed"] > 0


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
    numbers = numbers_of(played({"proofs": 0.05}, tmp_path, ",".join(WAYS.values()))["proofs"])
    assert numbers.keys() == {f"{way}_found_by_{part}" for part, way in WAYS.items()}
    assert all(numbers.values())
