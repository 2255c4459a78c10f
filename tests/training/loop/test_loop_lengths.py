"""Ranks whose loops or passes would end after different steps: refused before, or at the end."""

from types import SimpleNamespace

import pytest
from ranked import RankedJob
from rows import few

from forge.errors import RankLost
from forge.training.loop.loop_lengths import LoopLengths


def passes(directory, *lengths, **spec):
    return RankedJob(directory, len(lengths), "rank_passes.py", lengths=lengths, **spec)


def test_ranks_that_want_other_numbers_of_steps_or_epochs_are_refused_at_once(tmp_path):
    """Otherwise the ranks with more steps would hang in a collective until torch's timeout."""
    job = RankedJob(tmp_path / "steps", 2, n=9, n_by_rank={"1": 12})
    assert job.run() == [78, 78]
    longer = passes(tmp_path / "epochs", 5, 5, longer=[1])
    assert longer.run() == [78, 78]
    for one, call in (
        (job, "run.steps(n): n is 9 on rank 0, but 12"),
        (longer, "run.epochs(n): n"),
    ):
        for lines in one.printed:
            assert any(call in line and "on rank 1" in line for line in lines)
        assert one.history.attempts[0].events[-1]["step"] == 0


def test_loaders_of_different_lengths_are_refused_before_the_first_step(tmp_path):
    """Otherwise one rank would wait after the pass, and the others for it in a step."""
    job = passes(tmp_path, 5, 4, 5)
    assert job.run() == [78] * 3
    for lines in job.printed:
        (line,) = [one for one in lines if "differ in length" in one]
        assert "rank 1 has 4 batches, rank 2 has 5" in line
        assert "GlobalBatchSampler" in line
    assert job.history.attempts[0].events[-1]["step"] == 0


@pytest.mark.parametrize("is_stream", few(1, [True, False]))
def test_passes_of_one_length_stop_and_end_together(is_stream, tmp_path):
    """For loaders with and without a length; a resume in a pass compares the lengths again."""
    whole = passes(tmp_path / "whole", 12, 12, is_stream=is_stream)
    whole.run_to_end()
    stopped = passes(tmp_path / "stopped", 12, 12, is_stream=is_stream, signal=[3, 1])
    stopped.run_to_end([75, 75])
    stopped.assert_same_run(whole)
    assert [int(one["steps"]) for one in whole.weights] == [24, 24]


def test_streams_that_end_one_after_the_other_are_refused_at_the_end(tmp_path):
    """The steps have no collective, so the rank with the longer stream did not hang in one."""
    job = passes(tmp_path, 3, 4, is_stream=True, is_quiet=True)
    assert job.run() == [78, 78]
    for lines in job.printed:
        assert any("rank 0 has 3 batches, rank 1 has 4" in one for one in lines)


def test_a_stream_that_ends_while_others_are_in_a_step_is_named(tmp_path):
    """The error comes when their collective times out; code after the pass must not answer it."""
    job = passes(tmp_path, 3, 4, is_stream=True, timeout_s=2)
    codes = job.run()
    assert codes[0] == 70
    assert codes[1] not in (0, 75)
    assert "The loader of this rank has ended after 3 batches" in job.output
    assert "a step of another rank has answered" not in job.output


LEAVES = {"policy": {"shutdown": {"timeout_s": 4}}, "leaves": [[3, 1]]}
STEPS, PUSHED = {"steps": 12}, {"steps": 12, "pushed": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    few(
        4,
        [
            *(STEPS, STEPS | {"is_error": True, "then": "loop"}, PUSHED, {}),
            *({"is_error": True}, STEPS | {"then": "save"}),
        ],
    ),
    ids=["break", "error", "end_loop", "pass", "epochs", "save"],
)
def test_a_rank_that_leaves_its_loop_alone_ends_all_ranks(spec, tmp_path):
    """The others wait for it in a collective, until torch's timeout."""
    job = passes(tmp_path, 12, 12, **LEAVES, **spec)
    assert job.run() == [70, 78], job.output
    (line,) = [one for one in job.printed[1] if "has left its loop after 4 steps" in one]
    assert "rank 1 has left" in line
    assert "waiting for rank 0 (there are 2 ranks)" in line


class RankZeroIsKilled:
    """The connection to rank 0 fails a moment before the liveness monitor names the rank."""

    rank, size = 1, 2

    def publish(self, key, value):
        pass

    def gather(self, key, value, timeout_s):
        raise RankLost("Connection reset by peer")

    def lost(self, timeout_s):
        return "Rank 0 of 2 is gone" if timeout_s else ""


def test_a_rank_that_is_killed_at_the_end_of_a_loop_is_lost():
    """It has not made a mistake: the job has to be started again, with exit code 70 and not 78."""
    loops, policy = SimpleNamespace(step=24), SimpleNamespace(stop_s=60.0)
    given = {"group": RankZeroIsKilled(), "exchange": None, "shutdown": None}
    lengths = LoopLengths(SimpleNamespace(loops=loops, policy=policy, **given))
    lengths.note_left()
    with pytest.raises(RankLost):
        lengths.check_left()


def test_ranks_that_leave_after_different_steps_are_named(tmp_path):
    """Without a collective in their steps, they would save states of different steps together."""
    job = passes(tmp_path, 12, 12, **STEPS, is_quiet=True, leaves=[[3, 1], [5, 0]])
    assert job.run() == [78, 78], job.output
    for lines in job.printed:
        assert any("rank 0 after 5 steps, rank 1 after 3 steps" in one for one in lines)


@pytest.mark.parametrize("spec", [STEPS, PUSHED, {}], ids=["steps", "pushed", "passes"])
def test_ranks_that_leave_after_the_same_step_go_on(spec, tmp_path):
    """However long one of them takes until it meets the others again."""
    leaves = [[3, 0], [3, 1], [7, 0], [7, 1]]
    job = passes(tmp_path, 8, 8, leaves=leaves, left_s=0 if spec == STEPS else 30, **spec)
    job.spec["then"] = "meet"
    job.run_to_end()
    assert [int(one["steps"]) for one in job.weights] == [4 if spec else 8] * 2


def test_a_loop_over_steps_takes_loaders_of_any_length(tmp_path):
    """Each rank begins its next epoch by itself, and all ranks end after the same step."""
    job = passes(tmp_path, 3, 4, steps=10)
    job.run_to_end()
    assert [int(one["steps"]) for one in job.weights] == [10, 10]
