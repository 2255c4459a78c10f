"""What a rank says of its node before it leaves with 69."""

from forge.jobdir import sick
from forge.jobdir.job_files import RANK, forge_dir
from forge.jobdir.sick import Sick


def test_each_rank_says_it_for_itself(tmp_path, monkeypatch):
    """All leave with the same code: only who says so is on a sick node."""
    assert sick.read_all(tmp_path, 3) == {}
    monkeypatch.setenv(RANK, "2")
    sick.write(tmp_path, sick.Sick("n2", "ecc", "3 uncorrected errors", "exclude_node"))
    assert sick.read_all(tmp_path, 3) == {
        2: Sick("n2", "ecc", "3 uncorrected errors", "exclude_node")
    }
    assert sick.read_all(tmp_path, 2) == {}


def test_what_makes_no_sense_says_nothing(tmp_path):
    """Another version's, or damaged; the exit code is there in any case."""
    sick.write(tmp_path, sick.Sick("n1", "ecc", "text", "refuse"))
    for text in ('{"node": "n1"}', "[]", "{", ""):
        (forge_dir(tmp_path) / sick.FILE).write_text(text)
        assert sick.read_all(tmp_path, 1) == {}


def test_a_full_disk_keeps_nobody_from_leaving(tmp_path):
    """The exit code says the same, but not which node."""
    forge_dir(tmp_path).write_text("no directory")
    sick.write(tmp_path, sick.Sick("n1", "ecc", "text", "refuse"))
    assert sick.read_all(tmp_path, 1) == {}
