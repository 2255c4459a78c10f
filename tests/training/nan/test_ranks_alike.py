"""Whatever is bad on one rank alone, and however gradients come together, all ranks do the same."""

import json

import pytest
from ranked import RankedJob

CLIPPED, SCALED = {"clip_norm": 1.0}, {"scaled": True}
SYNCED = {  # ranks that have the same weights as long as they do the same
    "quiet": ["ddp", "nothing", CLIPPED],
    "loss": ["ddp", "loss", {}],
    "loss, clipped": ["ddp", "loss", CLIPPED],
    "loss, applied": ["ddp", "loss", CLIPPED | {"action": "warn"}],
    "loss, gradients unchecked": ["ddp", "loss", {"check_gradients": False}],
    "loss, scaled": ["ddp", "loss", SCALED],
    "loss, two optimizers": ["ddp", "loss", CLIPPED | {"optimizers": 2}],
    "loss, guarded": ["ddp", "loss", {"form": "guard"}],
    "input": ["ddp", "input", CLIPPED],
    "input, scaled": ["ddp", "input", CLIPPED | SCALED],
    "input, applied, scaled": ["ddp", "input", SCALED | {"action": "warn"}],
    "gradient": ["ddp", "gradient", {}],
    "gradient, clipped": ["ddp", "gradient", CLIPPED],
    "gradient, scaled": ["ddp", "gradient", CLIPPED | SCALED],
    "gradient, applied, scaled": ["ddp", "gradient", SCALED | {"action": "warn"}],
    "gradient, two optimizers": ["ddp", "gradient", SCALED | {"optimizers": 2}],
    "gradient, guarded": ["ddp", "gradient", {"form": "guard"}],
    "gradient, guarded, scaled": ["ddp", "gradient", SCALED | {"form": "guard"}],
    "gradient, guarded, unscaled": ["ddp", "gradient", SCALED | {"form": "guard, unscaled"}],
    "unused": ["ddp, unused", "input", CLIPPED],
    "sharded, quiet": ["fsdp2", "nothing", CLIPPED],
    "sharded, loss": ["fsdp2", "loss", CLIPPED],
    "sharded, gradient": ["fsdp2", "gradient", CLIPPED],
    "sharded, gradient, halting": ["fsdp2", "gradient", {"action": "halt"}],
    "sharded, huge": ["fsdp2", "huge", CLIPPED],
}
APART = {  # gradients, and so weights, are each rank's own
    "no_sync": ["ddp", "no_sync", CLIPPED],
    "no_sync, scaled": ["ddp", "no_sync", SCALED],
    "hook": ["ddp, hook", "gradient", CLIPPED],
    "hook, rolling back": ["ddp, hook", "gradient", {"action": "rollback"}],
    "alone, quiet": ["plain", "nothing", CLIPPED],
    "alone, loss": ["plain", "loss", CLIPPED],
    "alone, input": ["plain", "input", {}],
    "alone, input, scaled": ["plain", "input", SCALED],
    "alone, gradient": ["plain", "gradient", CLIPPED],
    "alone, gradient, scaled": ["plain", "gradient", CLIPPED | SCALED],
    "alone, huge": ["plain", "huge", CLIPPED],
    "alone, unused": ["plain", "unused", CLIPPED],
}
CASES = SYNCED | APART
BAD = [step for step in range(16) if step == 2 or step > 4]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By rank, what it did in each case."""
    directory = tmp_path_factory.mktemp("alike")
    job = RankedJob(directory, 2, script="alike.py", cases=CASES)
    assert job.run() == [0, 0], job.output
    return [json.loads((directory / f"told_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_decide_alike(name, said):
    """One that went on alone would train another model, or wait for the others."""
    one, other = (dict(each[name]) for each in said)
    if name in APART:
        del one["weights"], other["weights"]
    assert one == other


@pytest.mark.parametrize("name", CASES)
def test_what_is_bad_on_one_rank_is_left_out_by_all(name, said):
    """And nothing else is."""
    _, fact, options = CASES[name]
    is_applied = options.get("action") == "warn" or fact in ("nothing", "huge")
    for one in said:
        left_out = [step for step, done in enumerate(one[name]["updated"]) if not done]
        if options.get("scaled") and is_applied:
            assert {*left_out} <= {*BAD}
        else:
            assert left_out == ([] if is_applied else BAD)
        assert (one[name]["wants"] == "NoneType") == is_applied


@pytest.mark.parametrize("name", [name for name in CASES if "quiet" in name])
def test_a_quiet_update_blocks_in_no_collective(name, said):
    """The one that it begins is on its way while the gradients are clipped."""
    for one in said:
        assert one[name]["order"] == ["begun", "clipped", "waited", "stepped"]
