"""A checkpoint that a newer version of forge has written is neither read, replaced nor removed."""

import json

import pytest
from forked import ForkedJob
from stores import rewrite_manifest

from forge.checkpoint.format.manifest import FORMAT
from forge.errors import CheckpointError


def newer(path):
    """The checkpoint as a newer forge would write it; what it holds, to be compared."""
    rewrite_manifest(path, format=FORMAT + 1)
    return sorted((one.name, one.read_bytes()) for one in path.iterdir())


def test_a_job_does_not_go_on_below_a_checkpoint_of_a_newer_version(tmp_path):
    """It used to go on from the one before, and to replace it."""
    job = ForkedJob(tmp_path / "job", steps=30, kill_at={"15": "TERM"})
    assert job.run() == 143
    step = max(job.checkpoints.glob("step_*"), key=lambda path: int(path.name[5:]))
    content = newer(step)
    assert job.run() == 74, job.output
    assert f"{step} has format {FORMAT + 1}" in job.output
    assert f"reads formats up to {FORMAT}" in job.output
    assert "Skipped" not in job.output
    assert sorted((one.name, one.read_bytes()) for one in step.iterdir()) == content
    step.rename(tmp_path / "aside")
    (job.checkpoints / "latest").unlink()
    assert job.run() == 74  # none is left, so the job is not begun anew by itself either
    assert "no checkpoint is left there" in job.output


def test_an_older_step_of_a_newer_version_counts_too(store, commit):
    """A rollback, or a loop that is begun again, would come to it and replace it."""
    older, _ = commit(store, 15), commit(store, 20)
    newer(older)
    with pytest.raises(CheckpointError, match=f"step_15 has format {FORMAT + 1}"):
        store.newest()


@pytest.mark.parametrize("act", ["commit", "retain", "discard_after"])
def test_one_that_comes_while_a_job_runs_is_not_touched(open_store, commit, act):
    """Put there by hand, or by a process that took no notice of the lock."""
    store = open_store(keep_last=1)
    steps = [commit(store, step) for step in (5, 10, 15)]
    content = newer(steps[1])
    if act == "retain":
        assert store.retain() == ["step_5"]
    else:
        with pytest.raises(CheckpointError, match=f"step_10 has format {FORMAT + 1}"):
            commit(store, 10) if act == "commit" else store.discard_after(5)
    store.wait()
    assert sorted((one.name, one.read_bytes()) for one in steps[1].iterdir()) == content
    assert json.loads(dict(content)["manifest.json"])["format"] == FORMAT + 1
