"""Ranks that differ do not train together: real ranks, each with its own environment."""

import json

import pytest
from ranked import RankedJob

NAN = {"policy": {"nan": {"action": "warn"}}}


def started(folder, *of_ranks):
    """A job whose ranks differ by `of_ranks`, after one attempt, and its exit codes."""
    job = RankedJob(folder / "job", len(of_ranks), script="differing.py")
    processes = job.start([{"MINE": json.dumps(one)} for one in of_ranks])
    return job, [one.wait() for one in processes]


@pytest.mark.parametrize(
    ("of_ranks", "text"),
    [
        (
            ({}, {**NAN, "slow_after": "what each rank runs"}),
            "`nan.action` is warn on rank 1, but skip on rank 0",
        ),
        (
            ({"every_steps": 5}, {}),
            "`checkpoint.every_steps` is null on rank 1, but 5 on rank 0",
        ),
        (({}, NAN, NAN), "`nan.action` is warn on rank 1, 2, but skip on rank 0"),
        (({"config": {"lr": 1}}, {"config": {"lr": 2}}), "`lr` is 2 on rank 1, but 1 on rank 0"),
        (
            ({"words": ["--seed", "1"]}, {"words": ["--seed=2"]}),
            "`--seed` is 2 on rank 1, but 1 on rank 0",
        ),
        (({}, {"torch": "1.0"}), "`(torch)` is 1.0 on rank 1, but "),
        (({}, {"script": "train()"}), "`(script)` is "),
    ],
)
def test_ranks_that_differ_are_rejected_on_every_rank_before_anything_is_written(
    tmp_path, of_ranks, text
):
    """Otherwise one rank applies a NaN, another skips it, and the checkpoint counts as good."""
    job, codes = started(tmp_path, *of_ranks)
    assert codes == [78] * len(of_ranks), job.output
    assert all(text in " ".join(lines) for lines in job.printed), job.output
    assert not list(job.directory.rglob("step_*"))
    assert not list(job.directory.rglob("job.json"))


def test_a_rank_that_is_slow_at_the_start_fails_as_the_others_do(tmp_path):
    """Rank 0 hosts the store: the others could not leave in order if it left at once."""
    commands = {"site": {"run": ["false"], "action": "halt"}}
    policy = {"policy": {"health": {"commands": commands}}}
    job, codes = started(tmp_path, policy, {**policy, "slow_after": "the health checks"})
    assert codes == [69, 69], job.output


def test_what_each_rank_has_of_its_own_may_differ(tmp_path):
    """The local rank and the working directory; rank 0 decides the checkpoint directory."""
    words = [["--local-rank", "0"], ["--local_rank=1"]]
    mine = [{"words": one, "cwd": f"cwd{rank}"} for rank, one in enumerate(words)]
    job, codes = started(tmp_path, *mine)
    assert codes == [0, 0], job.output
    assert (job.directory / "cwd0/checkpoints/latest").exists()
