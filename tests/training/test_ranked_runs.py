"""Several ranks are one training: they stop, save, resume and end together, with the same bits.

With three ranks a sum has more than one order, so that DDP's buckets count.
"""

import shutil

import pytest
import torch
from forked import completed
from harness import assert_same_bits
from ranked import RankedJob
from rows import few

import forge
from forge.checkpoint.format.manifest import files_of

SIZE, STEPS = 3, 16


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = RankedJob(tmp_path_factory.mktemp("undisturbed"), SIZE, n=STEPS)
    job.run_to_end()
    assert len(job.history.metrics) == STEPS
    return job


@pytest.mark.parametrize(
    "signalled",
    [
        pytest.param([[1, 0]], id="first", marks=pytest.mark.proofs),
        pytest.param([[6, 1], [10, 2]], id="two", marks=pytest.mark.proofs),
        pytest.param([[6, 1]], id="one"),
        pytest.param([[5, -1]], id="all", marks=pytest.mark.proofs),
    ],
)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(signalled, undisturbed, tmp_path):
    """They leave with one code, and the resumed job sums its gradients in the order of before."""
    job = RankedJob(tmp_path, SIZE, n=STEPS, signal=signalled)
    job.run_to_end(*[[75] * SIZE for _ in signalled])
    job.assert_same_run(undisturbed)
    stops = [e for a in job.history.attempts for e in a.events if e["kind"] == "stop"]
    starts = [e for a in job.history.attempts for e in a.events if e["kind"] == "start"]
    assert [e["step"] for e in starts[1:]] == [e["step"] for e in stops]


@pytest.mark.proofs
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_the_job_goes_on(rank, undisturbed, tmp_path):
    """Rank 0 hosts what they agree by: its death must not leave the others waiting."""
    job = RankedJob(
        tmp_path, SIZE, n=STEPS, signal=[[9, rank]], how="SIGKILL", checkpoint={"every_steps": 4}
    )
    codes = job.run()
    assert codes[rank] == -9
    assert codes[:rank] + codes[rank + 1 :] == [70] * (SIZE - 1), job.output
    job.run_to_end()
    job.assert_same_run(undisturbed)


@pytest.mark.proofs
def test_a_rank_that_fails_ends_the_others(undisturbed, tmp_path):
    """An error of the user's on one rank, in a step that the others are waiting in."""
    job = RankedJob(tmp_path, SIZE, n=STEPS, exception=[[9, 2]], checkpoint={"every_steps": 4})
    codes = job.run()
    assert codes == [70, 70, 1], job.output
    assert "RuntimeError in step 9; Python shows" in job.output
    job.run_to_end()
    job.assert_same_run(undisturbed)


def test_no_rank_outlives_another_for_long_wherever_it_stands(tmp_path):
    """A rank can hang in a collective without an error, and there is not always a launcher."""
    policy = {"shutdown": {"timeout_s": 2}}
    spec = {"signal": [[6, 1]], "how": "SIGKILL", "stuck": [[6, 0]], "together": True}
    job = RankedJob(tmp_path, 2, n=STEPS, policy=policy, **spec)
    assert job.run() == [70, -9], job.output
    assert "forced exit with code 70; the stacks of all threads are in" in job.output


def test_a_bad_loss_on_one_rank_is_bad_for_all(tmp_path):
    """All leave the update out, or their weights would part."""
    whole = RankedJob(tmp_path / "whole", 2, n=STEPS, nan=[[9, 1]])
    whole.run_to_end()
    one, other = whole.weights
    assert torch.equal(one["module.last.weight"], other["module.last.weight"])
    bad = [e for a in whole.history.attempts for e in a.events if e["kind"] == "nan"]
    assert [(e["step"], e["epoch"], e["batch"]) for e in bad] == [(9, 0, 9)]
    stopped = RankedJob(tmp_path / "stopped", 2, n=STEPS, nan=[[9, 1]], signal=[[8, 0]])
    stopped.run_to_end([75, 75])
    stopped.assert_same_run(whole)


def test_a_rank_that_finishes_ends_the_loop_of_all(tmp_path):
    """Early stopping by what one rank alone has seen, after the same step in every run."""
    whole = RankedJob(tmp_path / "whole", 2, n=STEPS, finish=[[10, 1]])
    whole.run_to_end()
    assert [int(one["steps"]) for one in whole.weights] == [10, 10]
    stopped = RankedJob(tmp_path / "stopped", 2, n=STEPS, finish=[[10, 1]], signal=[[6, 1]])
    stopped.run_to_end([75, 75])
    stopped.assert_same_run(whole)


def test_what_all_ranks_have_is_saved_once_and_can_be_looked_at(undisturbed):
    """Parameters and their averages are the same on all; random states are not."""
    found = forge.load(undisturbed.directory)
    assert found.manifest.world_size == SIZE
    sizes = [(found.path / files_of(rank)[1]).stat().st_size for rank in range(SIZE)]
    assert max(sizes[1:]) < sizes[0] / 2
    weights = found.state["live"]["states"]["model"]["module.last.weight"]
    assert torch.equal(weights, undisturbed.weights[0]["module.last.weight"])
    assert not torch.equal(*(one["module.norm.running_mean"] for one in undisturbed.weights[:2]))


@pytest.mark.parametrize("size", few(1, [SIZE + 1, SIZE - 1]))
def test_another_number_of_ranks_resumes_with_the_weights_of_all(size, undisturbed, tmp_path):
    """With the averages of rank 0, and a word: what follows has other last bits."""
    shutil.copytree(undisturbed.checkpoints, tmp_path / "checkpoints", symlinks=True)
    job = RankedJob(tmp_path, size, n=STEPS)
    job.run_to_end(FORGE_RESUME="changed")  # another directory is another argument
    for weights in job.weights:
        assert_same_bits(weights, undisturbed.weights[0])
    found = [event for a in job.history.attempts for event in a.events]
    assert [(e["before"], e["now"]) for e in found if e["kind"] == "resized"] == [(SIZE, size)]
    text = f"step_{STEPS} was saved by {SIZE} ranks and is resumed by {size}: from now on sums"
    assert text in job.output
    assert " live.states.model.module.norm.running_mean, " in job.output


def test_ranks_that_do_not_know_each_other_are_refused(tmp_path):
    """Otherwise two ranks would each save into one directory as a single process."""
    script = "import forge\nwith forge.Run({'checkpoint': {'dir': 'checkpoints'}}): pass"
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = completed(["-c", script], tmp_path, joins_output=False, **env)
    assert found.returncode == 78
    assert "call forge.distributed.init()" in found.stderr
