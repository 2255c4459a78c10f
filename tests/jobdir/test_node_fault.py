"""What a rank says of its node before it leaves with 69."""

from forge.jobdir import node_fault
from forge.jobdir.job_files import RANK, forge_dir
from forge.jobdir.node_fault import NodeFault


def test_each_rank_says_it_for_itself(tmp_path, monkeypatch):
    """All leave with the same code: only who says so is on a sick node."""
    assert node_fault.read_all(tmp_path, 3) == {}
    monkeypatch.setenv(RANK, "2")
    node_fault.write(
        tmp_path, node_fault.NodeFault("n2", "ecc", "3 uncorrected errors", "exclude_node")
    )
    assert node_fault.read_all(tmp_path, 3) == {
        2: NodeFault("n2", "ecc", "3 uncorrected errors", "exclude_node")
    }
    assert node_fault.read_all(tmp_path, 2) == {}


def test_what_makes_no_sense_says_nothing(tmp_path):
    """Another version's, or damaged; the exit code is there in any case."""
    node_fault.write(tmp_path, node_fault.NodeFault("n1", "ecc", "text", "refuse"))
    for text in ('{"node": "n1"}', "[]", "{", ""):
        (forge_dir(tmp_path) / node_fault.FILE).write_text(text)
        assert node_fault.read_all(tmp_path, 1) == {}


def test_a_full_disk_keeps_nobody_from_leaving(tmp_path):
    """The exit code says the same, but not which node."""
    forge_dir(tmp_path).write_text("no directory")
    node_fault.write(tmp_path, node_fault.NodeFault("n1", "ecc", "text", "refuse"))
    assert node_fault.read_all(tmp_path, 1) == {}
