"""Sharded state: each rank writes its own shards, and any number of ranks loads the same tensors.

The ranks are real processes (`jobs/shards.py`). The tests compare a digest of each whole tensor.
"""

import json
import shutil
import sys

import pytest
import readme
import torch
import warm
from forked import completed
from ranked import RankedJob
from repository import ROOT
from rows import few
from warm import IS_QUICK

import forge
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import files_of


def ranks(directory, size, wrap="rows", **spec):
    """For each rank: what it loaded, and its state at the end of the job."""
    job = RankedJob(directory, size, script="shards.py", wrap=wrap, **spec)
    codes = job.run()
    assert codes == [0] * size, job.output
    found = [json.loads((directory / f"loaded_{rank}.json").read_text()) for rank in range(size)]
    for one in found:
        assert one["all"] == found[0]["all"]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a job of four ranks with one checkpoint, and the digests of its tensors."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, ranks(directory, 4, steps=3, save=1)[0]["all"]


@pytest.fixture(scope="module")
def continued(saved, tmp_path_factory):
    """The directory of the same job with a second checkpoint, and what each rank said of it."""
    directory = copied(saved, tmp_path_factory.mktemp("continued"))
    return directory, ranks(directory, 4, steps=1, save=2)


def copied(saved, tmp_path):
    shutil.copytree(saved[0] / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    return tmp_path


@pytest.mark.parametrize(
    "size", [*(pytest.param(size, marks=pytest.mark.proofs) for size in (4, 2, 1)), 3]
)
def test_any_number_of_ranks_has_the_same_whole(size, saved, tmp_path):
    """In place, with a fresh optimizer; after another save, four ranks load the same again."""
    directory = copied(saved, tmp_path)
    found = ranks(directory, size, seed=1, save=2)
    for rank, one in enumerate(found):
        assert one["all"] == saved[1]
        assert one["is_in_place"]
        assert one["own"] == [float(rank)] * 3
        assert one["buffers"] == found[0]["buffers"] or size == 4
    again = ranks(directory, 4, seed=2)
    assert again[0]["all"] == saved[1]
    assert [one["own"][0] for one in again] == [*range(size), *[0] * (4 - size)]


@pytest.mark.parametrize("wrap", few(2, ["rows", "replicas", "plain"]))
def test_what_no_other_rank_can_have_is_not_compared(wrap, tmp_path):
    """Digests of the shards would cost as much as for a whole model, and find no duplicates."""
    for one in ranks(tmp_path, 2, wrap, save=1):
        names = [name for name in one["compared"] if name.endswith("weight")]
        assert bool(names) == (wrap != "rows")
        assert "own" in one["compared"]


def test_an_optimizer_whose_state_is_of_another_kind_is_the_same_too(tmp_path):
    """SGD has momentum, but no step counter."""
    whole = ranks(tmp_path, 2, steps=2, save=1, optimizer="SGD")[0]["all"]
    assert ranks(tmp_path, 1, seed=1, optimizer="SGD")[0]["all"] == whole


@pytest.mark.parametrize(
    ("size", "wrap"),
    few(2, [(2, "columns"), (1, "plain"), (4, "replicas"), (3, "columns"), (2, "plain")]),
)
def test_however_it_is_sharded_the_whole_is_the_same(size, wrap, saved, tmp_path):
    """Rows become columns, shards become a plain model, and back: only slices are matched."""
    directory = copied(saved, tmp_path)
    for one in ranks(directory, size, wrap, seed=1, save=2):
        assert one["all"] == saved[1]
    for one in ranks(directory, 2, seed=2):
        assert one["all"] == saved[1]
        assert one["is_in_place"]


def test_a_rank_opens_the_files_that_it_needs(continued):
    """Its own file, and rank 0's file with the values that all ranks share; no other file."""
    _, found = continued
    names = [files_of(rank)[1] for rank in range(4)]
    assert [one["opened"] for one in found] == [sorted({names[0], name}) for name in names]


@pytest.mark.parametrize(
    ("harm", "size"),
    few(1, [("flipped", 2), ("gone", 1), ("gone", 4), ("flipped", 1), ("cut", 1), ("cut", 4)]),
)
def test_one_damaged_shard_is_damage_for_all(harm, size, saved, continued, tmp_path):
    """All ranks take the previous checkpoint, even if fewer ranks than before load it."""
    directory = copied(continued, tmp_path)
    assert continued[1][0]["step"] == 1
    hurt = directory / "checkpoints" / "step_2" / files_of(3)[1]
    content = bytearray(hurt.read_bytes())
    if harm == "gone":
        hurt.unlink()
    elif harm == "cut":
        hurt.write_bytes(content[:-1])
    else:
        content[-3] ^= 1
        hurt.write_bytes(content)
    for one in ranks(directory, size):
        assert one["step"] == 1
        assert one["all"] == saved[1]
        assert "step_2" in one["passed_over"][0]
        assert hurt.name in one["passed_over"][0]


def test_shards_that_leave_a_gap_are_no_checkpoint(saved, tmp_path):
    """A manifest that omits a rank and its files must not shrink or stretch a tensor."""
    directory = copied(saved, tmp_path)
    path = directory / "checkpoints" / "step_1"
    content = json.loads((path / manifest.NAME).read_bytes())
    for name in files_of(3):
        (path / name).unlink()
        del content["files"][name]
    del content["checksum"]
    described = manifest.Manifest(**content | {"world_size": 3})
    (path / manifest.NAME).write_bytes(described.to_bytes())
    job = RankedJob(directory, 2, script="shards.py", wrap="rows")
    assert job.run() == [1, 1]
    assert "elements in the files of all ranks together, found" in job.output


def test_two_checkpoints_are_compared_by_what_they_hold_together(saved, tmp_path):
    """`forge diff` and `forge show` use names and shapes of the model, not of the shards."""
    directory = copied(saved, tmp_path)
    ranks(directory, 2, save=2)
    ranks(directory, 1, steps=1, save=3)
    done = completed(["-m", "forge", "diff", "checkpoints/step_1", "checkpoints/step_2"], directory)
    assert (done.returncode, done.stdout) == (1, "step: int 1 → int 2\n")
    done = completed(["-m", "forge", "diff", "checkpoints/step_2", "checkpoints/step_3"], directory)
    assert done.returncode == 1
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "live.states.model.frozen.weight" not in lines
    assert lines["live.states.model.tied.weight"].startswith("49 of 49 differ, ")
    done = completed(["-m", "forge", "show", "-v", "checkpoints/step_3"], directory)
    shown = dict(line.split()[:2] for line in done.stdout.splitlines() if " float32[" in line)
    assert shown["live.states.model.inner.weight"] == "float32[7,"
    assert shown["live.states.optimizer.state.1.exp_avg"] == "float32[7,"
    assert shown["live.states.model.last.bias"] == "float32[1]"


def test_the_lines_of_the_page_put_shards_together(saved, tmp_path, monkeypatch):
    """Users must be able to read their weights without forge, whatever the number of ranks was."""
    monkeypatch.chdir(copied(saved, tmp_path))
    found = {}
    for block in readme.blocks("python", ROOT / "docs/how-to/inspect.md"):
        exec(block, found)
    expected = forge.load("checkpoints").state["live"]["states"]["model"]
    prefix = "live.states.model."
    whole = {n.removeprefix(prefix): t for n, t in found["whole"].items() if n.startswith(prefix)}
    assert whole.keys() | {"also_tied.weight"} == {n for n in expected if "running" not in n} - {
        "norm.num_batches_tracked"
    }
    assert all(torch.equal(whole[name], expected[name]) for name in whole)


@pytest.mark.skipif(not IS_QUICK, reason="nothing is forked")
def test_its_ranks_are_forked_with_what_they_import(tmp_path):
    """Under pytest-xdist, too: otherwise each rank would take ten times as long to start."""
    path = tmp_path / "modules"
    program = f"import sys; open({str(path)!r}, 'w').write(' '.join(sys.modules))"
    assert warm.Popen([sys.executable, "-c", program], imports=warm.SHARDING).wait() == 0
    assert "torch._dynamo.utils" in path.read_text().split()
