"""The record of a sick node, which a rank writes before it exits with 69."""

from forge.jobdir import node_fault
from forge.jobdir.job_files import RANK, forge_dir
from forge.jobdir.node_fault import NodeFault


def test_each_rank_says_it_for_itself(tmp_path, monkeypatch):
    """All ranks exit with the same code, so only the record shows whose node is sick."""
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
    """A record of another version or a damaged one is ignored; there is still the exit code."""
    node_fault.write(tmp_path, node_fault.NodeFault("n1", "ecc", "text", "refuse"))
    for text in ('{"node": "n1"}', "[]", "{", ""):
        (forge_dir(tmp_path) / node_fault.FILE).write_text(text)
        assert node_fault.read_all(tmp_path, 1) == {}


def test_a_full_disk_keeps_nobody_from_leaving(tmp_path):
    """The exit code still shows that a check failed, but not on which node."""
    forge_dir(tmp_path).write_text("no directory")
    node_fault.write(tmp_path, node_fault.NodeFault("n1", "ecc", "text", "refuse"))
    assert node_fault.read_all(tmp_path, 1) == {}
