"""A checkpoint of several ranks: each rank stages its files, one rank publishes them all."""

import shutil

import pytest
import torch
from stores import state_of

from forge.checkpoint.format import manifest
from forge.checkpoint.format.names import files_of
from forge.checkpoint.save.staging import StagedPart, stage
from forge.errors import CheckpointError


def snapshot_of(store, value):
    return store.snapshot(
        3, state_of(3) | {"own": torch.full((8,), value)}, is_complete=False, copy=False
    )


@pytest.fixture
def opened(open_store):
    """A store, the directory in which the ranks stage, and the final path of the checkpoint."""
    store = open_store()
    with store._workspace.entered() as work:
        folder = work / "step_3"
        folder.mkdir()
        yield store, folder, store.directory / "step_3"
        shutil.rmtree(folder, ignore_errors=True)


def test_one_rank_publishes_what_each_has_staged(opened):
    """The manifest lists the files of all ranks; if one is missing, nothing can be loaded."""
    store, folder, final = opened
    first = snapshot_of(store, 0.0)
    parts = [stage(folder, first), stage(folder, snapshot_of(store, 1.0), rank=1)]
    assert not (folder / manifest.NAME).exists()
    store.publish(folder, final, parts, first)
    described = manifest.read(final)
    assert described.world_size == 2
    assert described.files.keys() == {*files_of(0), *files_of(1)}
    manifest.check_sizes(final, described)
    assert store.newest() is not None
    (final / files_of(1)[1]).unlink()
    with pytest.raises(CheckpointError, match=r"tensors_rank00001.* is missing"):
        store.newest()


@pytest.mark.parametrize(
    "parts", [[], [(1, 3)], [(0, 3), (2, 3)], [(0, 3), (1, 4)], [(0, 3), (0, 3)]], ids=str
)
def test_parts_that_do_not_belong_together_are_no_checkpoint(opened, parts):
    """Without this check a missing or wrong part would only be noticed at a resume."""
    store, folder, final = opened
    given = [StagedPart(rank, step, {}) for rank, step in parts]
    with pytest.raises(CheckpointError, match="expected one part of each rank"):
        store.publish(folder, final, given, snapshot_of(store, 0.0))
    assert not final.exists()


def test_a_rank_of_an_older_attempt_has_nowhere_to_write(opened):
    """A newer claim has renamed the directory in which the old rank would write."""
    store, folder, _ = opened
    taken = folder.parent.rename(store.directory / ".left_taken")
    with pytest.raises(FileNotFoundError):
        stage(folder, snapshot_of(store, 1.0), rank=1)
    taken.rename(folder.parent)
