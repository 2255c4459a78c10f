"""Stops for the time limit in real runs with an injected clock."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import warm
from harness import assert_same_bits

from forge.jobdir import ledger

# One process imports torch; each attempt is a child that it forks. A step takes 10 s of the
# injected clock, a poll of an evaluation 5 s.
PLAY = """
import functools, json, os, sys, time, traceback
from pathlib import Path
import torch
import forge, forge.training.attempt
from forge.process.time_limit import TimeLimit

torch.set_num_threads(1)
warm = torch.ones(2, requires_grad=True)
warm.grad = torch.ones(2)
torch.optim.SGD([warm], lr=0.1, momentum=0.9).step()  # imports what every child would import
now = 0.0

def attempt(directory, left_s, spec):
    os.environ["FORGE_END_TIME"] = str(1_800_000_000 + left_s)
    forge.training.attempt.TimeLimit = functools.partial(
        TimeLimit, clock=lambda: now, wall=lambda: 1_800_000_000.0
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    policy = {"checkpoint": {"dir": str(directory)}, "enabled": spec.get("enabled", True)}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        run.on_stop(lambda: (directory / "callback").touch())
        if "evaluates_at" in spec:
            run.every(spec["evaluates_at"])(lambda step: evaluate(run, model))
        for step in run.steps(12):
            train(run, model, optimizer, step, spec)
    torch.save(model.state_dict(), directory / "weights.pt")

def train(run, model, optimizer, step, spec):
    global now
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    run.update(loss, optimizer)
    run.log(loss=loss)
    now += 10
    if step == 2 and "signal" in spec and not run.resumed_from:
        os.kill(os.getpid(), spec["signal"])

def evaluate(run, model):
    global now
    for _ in range(100):
        now += 5
        with torch.no_grad():
            model(torch.randn(4, 3))
        if run.check_stop():
            break

directory, attempts = Path(sys.argv[1]), json.loads(sys.argv[2])
codes = {}
for name, spec, lefts in attempts:
    (directory / name).mkdir()
    codes[name] = []
    for left_s in lefts:
        pid = os.fork()
        if pid == 0:
            try:
                attempt(directory / name, left_s, spec)
            except SystemExit as error:
                os._exit(error.code)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        codes[name].append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""
ENOUGH = 1e6
ATTEMPTS = [
    ("undisturbed", {}, [ENOUGH]),
    ("boundary", {}, [55, ENOUGH]),
    ("one step at a time", {}, [1, 1, ENOUGH]),
    ("disabled", {"enabled": False}, [1]),
    ("evaluation", {"evaluates_at": 6}, [ENOUGH]),
    ("stopped evaluation", {"evaluates_at": 6}, [200, ENOUGH]),
    ("told early", {"signal": signal.SIGUSR2}, [200]),
    ("told in time", {"signal": signal.SIGUSR2}, [115, ENOUGH]),
    ("preempted", {"signal": signal.SIGTERM}, [200, ENOUGH]),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(directory, exit codes) of every attempt above."""
    directory = tmp_path_factory.mktemp("time_limit")
    done = warm.run(
        [sys.executable, "-c", textwrap.dedent(PLAY), str(directory), json.dumps(ATTEMPTS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout.splitlines()[-1]), done.stderr


def stops(directory):
    attempts = ledger.read(directory).attempts
    return [e for attempt in attempts for e in attempt.events if e["kind"] == "stop"]


def assert_same(one, other):
    assert_same_bits(*(torch.load(d / "weights.pt", weights_only=True) for d in (one, other)))
    assert ledger.read(one).metrics == ledger.read(other).metrics


def test_a_run_stops_at_the_last_boundary_in_time_and_goes_on_with_the_same_bits(played):
    """The stop is that of the signal: it saves, calls the callbacks, and exits with 75."""
    directory, codes, said = played
    assert codes["boundary"] == [75, 0]
    # 10 s of margin, 10 s for a step, and 1 s as the estimate of a first save of this size.
    (stop,) = stops(directory / "boundary")
    assert (stop["reason"], stop["code"], stop["step"]) == ("time_limit", 75, 4)
    assert stop["left_s"] == 15
    assert (directory / "boundary" / "callback").exists()
    assert "time limit at step 4, exit code 75" in said
    assert_same(directory / "boundary", directory / "undisturbed")


def test_a_limit_shorter_than_a_step_still_comes_forward(played):
    """Each attempt makes one step; the budgets decide whether the job continues."""
    directory, codes, _ = played
    assert codes["one step at a time"] == [75, 75, 0]
    assert [e["step"] for e in stops(directory / "one step at a time")] == [1, 2]
    assert_same(directory / "one step at a time", directory / "undisturbed")


def test_a_disabled_policy_looks_at_no_clock(played):
    """With a disabled policy forge adds nothing to the loop."""
    directory, codes, _ = played
    assert codes["disabled"] == [0]
    assert not (directory / "disabled" / ".forge").exists()


def test_an_evaluation_is_left_where_it_polls(played):
    """The evaluation can be longer than the time left."""
    directory, codes, _ = played
    assert codes["stopped evaluation"] == [75, 0]
    (stop,) = stops(directory / "stopped evaluation")
    assert stop["step"] == 6
    assert stop["left_s"] <= 25
    assert_same(directory / "stopped evaluation", directory / "evaluation")


def test_a_run_that_is_told_early_trains_on(played):
    """Slurm sends its signal up to a minute early; a stop at once would waste that minute."""
    directory, codes, _ = played
    assert codes["told early"] == [0]
    assert codes["told in time"] == [75, 0]
    assert codes["preempted"] == [143, 0]
    for name in ("told early", "told in time", "preempted"):
        assert_same(directory / name, directory / "undisturbed")
