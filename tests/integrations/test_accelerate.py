"""forge.integrations.accelerate: struck at any place, a loop ends as it does without forge."""

import pytest
from repository import ROOT
from rows import few
from trained import Trained

GALLERY = ROOT / "examples" / "gallery" / "accelerated.py"
SCRIPTS = ROOT / "tests" / "proofs" / "trainers"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run."""
    run = Trained(tmp_path_factory.mktemp("whole"), SCRIPTS / "accelerated.py")
    run.run_to_end()
    return run


def test_it_ends_as_without_forge(whole, tmp_path):
    """The dataset draws noise, also for the batch that Accelerate reads ahead."""
    plain = Trained(tmp_path, SCRIPTS / "accelerated.py", PLAIN="1")
    plain.run_to_end()
    assert whole.different_ends(plain) == []
    assert whole.losses == plain.losses


@pytest.mark.parametrize(
    ("place", "name", "code"),
    few(
        1,
        [
            ("step 31", "KILL", -9),
            ("step 22", "USR1", 75),
            ("eval 3", "TERM", 143),
            ("step 17", "TERM", 143),
            ("step 44", "TERM", 143),
        ],
    ),
)
def test_a_struck_loop_ends_with_the_same_bits(place, name, code, whole, tmp_path):
    """In an accumulation, in the last batch of a pass, in an evaluation, in the last batch."""
    run = Trained(tmp_path, SCRIPTS / "accelerated.py")
    run.run_to_end(([{place: name}], code))
    assert run.differences(whole) == []
    if name != "KILL":
        assert run.repeated == [0]


def test_a_stateful_loader_counts_its_epochs_by_itself(tmp_path):
    """Its sampler's order is a function of the epoch, which no counter of ours may set back."""
    runs = [Trained(tmp_path / name, SCRIPTS / "seeded.py") for name in ("a", "b")]
    runs[0].run_to_end()
    runs[1].run_to_end(([{"step 21": "TERM"}], 143))
    assert runs[1].differences(runs[0]) == []


def test_two_ranks_end_with_the_same_bits(tmp_path):
    """Each rank has its own place, and its own random state."""
    runs = [Trained(tmp_path / name, SCRIPTS / "accelerated_ddp.py", 2) for name in ("a", "b")]
    runs[0].run_to_end()
    runs[1].run_to_end(([{}, {"step 11": "TERM"}], 143))
    assert runs[1].differences(runs[0]) == []
    assert runs[1].repeated == [0]


def test_the_script_of_the_page(tmp_path):
    """With the NaN policy, in a loop that asks for each update."""
    runs = [Trained(tmp_path / name, GALLERY, checkpoints="runs/accelerated") for name in "ab"]
    runs[0].run_to_end()
    runs[1].run_to_end(([{"step 200": "TERM"}], 143))
    lines = [[line for line in run.output.splitlines() if "bias" in line] for run in runs]
    assert lines[0] == lines[1] != []
