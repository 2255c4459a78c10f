"""`run.finish`: a loop that ends before its `n`, at a boundary, and is not trained again."""

import pytest
import torch
from forked import ForkedJob
from harness import assert_same_run
from rows import few
from sweeps import App

import forge
from forge.checkpoint.format import manifest
from forge.errors import Reason
from forge.jobdir import ledger, verdict


def train(directory, n, calls, *, enabled=True, end=lambda run, step: None):
    """Steps and evaluations of one attempt, in order."""
    policy = {"enabled": enabled, "checkpoint": {"dir": str(directory), "every_steps": 2}}
    with forge.Run(policy) as run:

        @run.every(3)
        def third(step):
            calls.append(f"third {step}")
            end(run, f"third {step}")

        @run.every(at_end=True)
        def end_of_loop(step):
            calls.append(f"end {step}")

        for step in run.steps(n):
            calls.append(step)
            end(run, step)
    return calls


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("place", [2, "third 3"])
def test_the_loop_ends_at_this_boundary_with_all_that_is_due_there(tmp_path, place, enabled):
    """Asked for in a step or by an evaluation: the same, and the same in a plain loop."""

    def end(run, at):
        if at == place:
            run.finish("converged")

    found = train(tmp_path / "job", 9, [], enabled=enabled, end=end)
    assert found == [0, 1, 2, "third 3", "end 3"]


@pytest.mark.parametrize("enabled", [True, False])
def test_outside_the_loop_there_is_nothing_to_end(enabled, tmp_path):
    """A call that does nothing would train on for days."""
    policy = {"enabled": enabled, "checkpoint": {"dir": str(tmp_path / "job")}}
    with forge.Run(policy) as run:
        with pytest.raises(forge.ForgeError, match=r"run\.finish\(\) was called outside the loop"):
            run.finish("converged")
        for _ in run.steps(2):
            pass


def test_it_ends_one_loop_and_the_next_begins(tmp_path):
    """Stages of a training end by themselves; the one that follows has an end of its own."""
    done = []
    with forge.Run({"checkpoint": {"dir": str(tmp_path / "job")}}) as run:
        for n in (5, 8):
            for step in run.steps(n):
                done.append((n, step))
                if (n, step) == (5, 1):
                    run.finish("enough of the first")
    assert done == [(5, 0), (5, 1), *((8, step) for step in range(2, 8))]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_updated", [True, False])
def test_the_step_of_a_break_counts_if_it_changed_anything(tmp_path, enabled, has_updated):
    """The next loop continues from there, in a plain loop, too."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"enabled": enabled, "checkpoint": {"dir": str(tmp_path / "job")}}
    done = []
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(9):
            if step < 2 or has_updated:
                run.update(model(torch.ones(1)).sum(), optimizer)
            if step == 2:
                break
        for step in run.steps(5):
            done.append(step)
    assert done == ([3, 4] if has_updated else [2, 3, 4])


SPEC = {"loop": "stops_early", "policy": {"checkpoint": {"every_steps": 4}}}


def early(path, **spec):
    return ForkedJob(path, script="loops.py", **SPEC, **spec)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = early(tmp_path_factory.mktemp("finish") / "undisturbed")
    assert job.run() == 0, job.output
    return job


def test_a_finished_job_is_complete_and_a_start_finds_it_so(undisturbed):
    """Exit code 0, a complete checkpoint, the reason in verdict and ledger; nothing runs again."""
    directory = undisturbed.directory
    found = manifest.read(directory / "checkpoints" / "step_6")
    assert found.is_complete
    said = verdict.read(directory / "checkpoints")
    assert (said.reason, said.exit_code, said.step) == (Reason.finished, 0, 6)
    assert "loss is low enough" in said.text
    assert "finished at step 6: the loss is low enough" in undisturbed.output
    assert undisturbed.run() == 0
    history = ledger.read(directory / "checkpoints")
    assert [one.events[-1]["kind"] for one in history.attempts] == ["finish"] * 2
    assert list(history.metrics) == list(range(6))
    assert history.attempts[-1].start_step == 6
    assert [one.events[-1]["text"] for one in history.attempts] == ["the loss is low enough"] * 2


HITS = [({"asked": "TERM"}, True, 143), ({"after": "KILL"}, False, -9)]
HITS += [({"step 4": "TERM"}, False, 143), ({"after": "KILL"}, True, -9)]


@pytest.mark.parametrize(("kill_at", "saves", "code"), few(2, HITS), ids=str)
def test_a_job_that_is_hit_ends_at_the_same_step(tmp_path, undisturbed, kill_at, saves, code):
    """A checkpoint of the last boundary has to know that the loop is over.

    In the very step that asks for the end, too: a start later runs what follows the loop.
    """
    job = early(tmp_path / "hit", kill_at=kill_at, saves=saves)
    assert job.run() == code, job.output
    assert job.run() == 0, job.output
    assert "finished at step 6: the loss is low enough" in job.output
    assert_same_run(job, undisturbed)


SWEEP = """
    import hydra
    import forge

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        with forge.Run(cfg.resilience) as run:
            for step in run.steps(50):
                if step == 4:
                    run.finish("nothing more to learn")

    if __name__ == "__main__":
        main()
"""


def test_a_sweep_shows_it_as_finished_with_the_steps_that_were_done(tmp_path):
    """Finished at step 5 of 50 reads like a job that was lost."""
    app = App(tmp_path / "app", SWEEP)
    output = app.finish("lr=0.1")
    assert app.job(0).state["state"] == "finished"
    assert "finished at step 5 of 5 (100%)" in output
