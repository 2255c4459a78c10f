"""A rank dies in a step: rank 0 saves the boundary before it for all, where all is at hand."""

import pytest
from ranked import RankedJob

SIZE, STEPS = 3, 14
SPEC = {"n": STEPS, "norm": False, "checkpoint": {"every_steps": 4}, "rate": 0.9, "together": True}


def events(job, kind):
    return [e for a in job.history.attempts for e in a.events if e["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = RankedJob(tmp_path_factory.mktemp("undisturbed"), SIZE, **SPEC)
    job.run_to_end()
    return job


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("exception", marks=pytest.mark.proofs)])
def test_no_step_is_repeated_after_the_death_of_a_rank(how, undisturbed, tmp_path):
    """The others stand in its step, which has changed nothing but the rate it sets: that again."""
    blow = {"exception": [[10, 2]]} if how == "exception" else {"signal": [[10, 1]], "how": how}
    job = RankedJob(tmp_path, SIZE, **SPEC, **blow)
    codes = job.run()
    assert sorted(codes) == sorted([1 if how == "exception" else -9, 70, 70]), job.output
    assert codes[0] == 70
    saves = [(e["step"], e["reason"]) for e in events(job, "save")]
    assert saves[-1] == (10, "emergency"), events(job, "not_saved")
    assert "Rank 0 has saved step 10 for all ranks" in job.output
    job.run_to_end()
    assert [e["step"] for e in events(job, "start")] == [0, 10]
    job.assert_same_run(undisturbed)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"norm": True}, "buffers change while training, as the averages of a BatchNorm do"),
        ({"large": True}, "what a rank has by itself is more than 64 KiB"),
        ({"signal": [], "late": [[6, 1]]}, "rank 1 was not at the boundary"),
        *[
            pytest.param(*row, marks=pytest.mark.proofs)
            for row in [
                ({"checkpoint": {}}, "no checkpoint tells yet what is the same on all ranks"),
                ({"signal": [[1, 1]]}, "this attempt had not yet done 2 steps"),
                ({"wrap": "fsdp2"}, "model, a FSDPNet, is not in DistributedDataParallel"),
            ]
        ],
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_at_hand_is_not_saved_and_the_ledger_says_why(spec, reason, tmp_path):
    """Half of it would be another training; the job resumes from its last periodic save."""
    saved = spec.get("checkpoint", SPEC["checkpoint"])
    spec = {**SPEC, "checkpoint": saved, "signal": [[6, 1]], "how": "SIGKILL", **spec}
    job = RankedJob(tmp_path, 2, **spec)
    assert job.run() == [70, -9], job.output
    assert {e["reason"] for e in events(job, "save")} <= {"periodic"}
    said = [e["text"] for e in events(job, "not_saved")]
    assert len(said) == 1
    assert reason in said[0]
    steps = [e["step"] for e in events(job, "save")]
    job.run_to_end()
    assert [e["step"] for e in events(job, "start")] == [0, max(steps, default=0)]
