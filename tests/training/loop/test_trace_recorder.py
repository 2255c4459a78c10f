"""The record of a script's variables, for a rehearsal."""

import json

import torch
from ranked import RankedJob
from updates import a_run

from forge.training.loop import fault_injection, trace_recorder


def test_only_rank_0_records_and_also_where_it_is_stopped(tmp_path):
    """Lines of another rank in the same file would count as those of a process that resumed."""
    file, rehearsal = tmp_path / "traced.jsonl", tmp_path / "rehearsal"
    rehearsal.mkdir()
    job = RankedJob(tmp_path / "job")
    env = {
        "FORGE_REHEARSAL": str(rehearsal),
        trace_recorder.VARIABLE: f"{trace_recorder.AT_STOPS} {file}",
        fault_injection.VARIABLE: "SIGTERM 6 0.0",
    }
    assert job.run(**env) == [143, 143], job.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["pid"] for line in lines}) == 1
    steps = [line["place"][-1] for line in lines]
    assert steps[:3] == [0, 1, 2]
    assert len(steps) == 4
    assert steps[3] > 3


def test_a_leaf_without_data_is_recorded_by_its_type(tmp_path, monkeypatch):
    """A rehearsal of a script with lazy modules, or shards, ended with a traceback."""
    file = tmp_path / "traced.jsonl"
    monkeypatch.setenv("FORGE_REHEARSAL", str(tmp_path))
    monkeypatch.setenv(trace_recorder.VARIABLE, f"1 {file}")
    with a_run(tmp_path / "checkpoints") as run:
        for _ in run.steps(2, [torch.nn.UninitializedParameter(), torch.empty(2, device="meta")]):
            pass
    batches = [json.loads(line)["batch"] for line in file.read_text().splitlines()]
    assert batches[-2:] == ["UninitializedParameter", "Tensor"]
