"""A training whose parameters FSDP2 shards is one training, too, and ends with the same bits.

The evaluation leaves the outer layers unsharded, as FSDP2 does after each forward without a
backward: what is saved at the same boundary is the shards.
"""

import shutil

import pytest
import torch
from harness import assert_same_bits
from ranked import RankedJob
from rows import few

import forge
from forge.checkpoint.format.manifest import files_of

STEPS = 16


def job_of(directory, size=2, **spec):
    return RankedJob(directory, size, n=STEPS, wrap="fsdp2", **spec)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = job_of(tmp_path_factory.mktemp("undisturbed"))
    job.run_to_end()
    assert len(job.history.metrics) == STEPS
    return job


@pytest.mark.parametrize(
    "signalled",
    [
        pytest.param([[1, 0]], id="first", marks=pytest.mark.proofs),
        pytest.param([[5, -1]], id="all", marks=pytest.mark.proofs),
        pytest.param([[6, 1], [10, 0]], id="two", marks=pytest.mark.proofs),
        pytest.param([[6, 1]], id="one"),
    ],
)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(signalled, undisturbed, tmp_path):
    """Each rank saves its shards, and has them again where they were."""
    job = job_of(tmp_path, signal=signalled)
    job.run_to_end(*[[75, 75] for _ in signalled])
    job.assert_same_run(undisturbed)


@pytest.mark.proofs
@pytest.mark.parametrize("kind", ["signal", "exception"])
def test_a_rank_that_is_killed_or_fails_ends_all_and_the_job_resumes(kind, tmp_path):
    """A dead rank's shards are gone: the others leave with the last periodic save."""
    whole = job_of(tmp_path / "whole", 4)
    whole.run_to_end()
    spec = {kind: [[9, 2]], "how": "SIGKILL", "checkpoint": {"every_steps": 4}}
    job = job_of(tmp_path / "job", 4, **spec)
    codes = job.run()
    assert codes.pop(2) == (-9 if kind == "signal" else 1)
    assert set(codes) <= {1, 70}
    job.run_to_end()
    job.assert_same_run(whole)


@pytest.mark.proofs
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_bad_loss_on_one_rank_is_bad_for_all(action, tmp_path):
    """Clipped by the norm of all shards; all go back to the shards of the same step."""
    policy = {"nan": {"action": action, "max_consecutive": 1 + (action == "skip")}}
    spec = {"policy": policy, "checkpoint": {"every_steps": 3}, "nan_once": [[9, 1]]}
    whole = job_of(tmp_path / "whole", **spec)
    whole.run_to_end()
    one, other = whole.weights
    assert torch.equal(one["last.weight"], other["last.weight"])
    events = [e for a in whole.history.attempts for e in a.events]
    assert [e["step"] for e in events if e["kind"] == "nan"] == [9]
    assert [e["first_bad"] for e in events if e["kind"] == "rollback"] == [9][action == "skip" :]
    stopped = job_of(tmp_path / "stopped", **spec, signal=[[11, 0]])
    stopped.run_to_end([75, 75])
    stopped.assert_same_run(whole)


def test_it_can_be_looked_at_and_each_rank_has_written_its_part(undisturbed):
    """Whole tensors, by the names that the model has; no rank has written all of them."""
    found = forge.load(undisturbed.directory)
    weights = found.state["live"]["states"]["model"]
    for name, value in undisturbed.weights[0].items():
        assert name == "steps" or torch.equal(weights[name], value)
    sizes = [(found.path / files_of(rank)[1]).stat().st_size for rank in range(2)]
    assert min(sizes) > 0.6 * max(sizes)


@pytest.mark.parametrize("size", few(1, [1, 3]))
def test_another_number_of_ranks_resumes_it(size, undisturbed, tmp_path):
    """With the same weights to the last bit; what it would train from there on has others."""
    shutil.copytree(undisturbed.checkpoints, tmp_path / "checkpoints", symlinks=True)
    job = job_of(tmp_path, size)
    job.run_to_end(FORGE_RESUME="changed")  # another directory is another argument
    for weights in job.weights:
        assert_same_bits(weights, undisturbed.weights[0])
    assert f"step_{STEPS} was saved by 2 ranks and is resumed by {size}" in job.output
