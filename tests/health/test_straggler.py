"""A slow rank is named, whatever it is slow in; to find it changes no bit of a training."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from ranked import RankedJob

from forge.compat import of_torch
from forge.config.schema import CheckConfig
from forge.errors import RankLost
from forge.health import pace, straggler
from forge.health.check import Context
from forge.health.pace import NUM_LOOKS, Pace
from forge.jobdir import sick

NEVER = {"policy": {"health": {"every_s": None}}}


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([0.5, 0.5, 0.05, 0.5], [(2, 0.55)]),
        ([0.9, 0.0], [(1, 0.1)]),
        ([0.2, 0.2, 0.05, 0.2], []),  # slower, but not by so much
        ([0.9, 0.9, 0.9, 0.9], []),  # the network is slow, and no rank
        ([0.9, 0.9, 0.5, 0.9], [(2, 0.6)]),
        ([0.6, 0.0, 0.6, 0.6, 0.1], [(1, 0.4), (4, 0.4 / 0.9)]),
        ([0.9, 0.0, 0.9, 0.9, 0.7], [(1, 0.1)]),  # without that one, who knows
        ([None, 0.5, 0.0], [(2, 0.5)]),
        ([None, 0.5, None], []),
        ([None, None], []),
        ([], []),
        ([1.0, 1.0, 0.0], [(2, 0.0)]),
    ],
)
def test_who_waits_least_is_the_slow_one(waiting, expected):
    """The others' time is spent on waiting for it."""
    found = straggler.found([(share, "n1") for share in waiting], 0.75)
    named = [f"rank {rank} on n1 has {speed:.0%}" for rank, speed in expected]
    assert found is None or found.culprits == tuple(rank for rank, _ in expected)
    assert bool(found and found.is_failed) == bool(expected)
    assert not expected or found.value == f"{', '.join(named)} of the median rank's speed"


@pytest.fixture
def measured(monkeypatch):
    """A pace whose model's measurements a test makes up: (step, mean wait in s, begin in s)."""
    found = Pace([torch.nn.Linear(1, 1)])
    found._models = [pace._Model(None)]

    def look(*answer):
        monkeypatch.setattr(of_torch, "gradient_waits", lambda ddp: answer or None)
        return found.waiting()

    return look


def test_a_share_is_the_median_of_several_looks(measured):
    """One save of one rank makes all others wait once; that is no slow rank."""
    waits = {200: 0.2, 300: 0.2, 400: 8.0, 500: 0.2, 600: 0.2}
    total_s, count = 10 * 5.0 + 0.2, 11  # compiled at the first steps, for which others waited
    assert measured(10, 5.0, 50.0) is None
    assert measured(100, total_s / count, 100.0) is None
    for step, wait_s in waits.items():
        total_s, count = total_s + wait_s, count + 1
        found = measured(step, total_s / count, step * 1.0)
        assert (found is None) is (step < 600)
    assert found == pytest.approx(0.2)


def test_what_was_not_measured_anew_is_no_look(measured):
    """Steps of ten seconds are measured once in a quarter of an hour."""
    for _ in range(NUM_LOOKS + 2):
        assert measured(100, 0.2, 100.0) is None
    assert measured() is None


def test_a_clock_that_is_set_back_leaves_out_one_look(measured):
    """What began before it ended took no time."""
    begins = [100.0, 200.0, 300.0, 10.0, 110.0, 210.0, 310.0]
    found = [measured(n * 100 + 100, 0.25, at) for n, at in enumerate(begins)]
    assert found[-1] == pytest.approx(0.25)
    assert found[-2] is None


def test_models_that_do_not_measure_say_nothing():
    """One process, or FSDP2: nobody knows what it waits."""
    assert Pace([torch.nn.Linear(1, 1), object()]).waiting() is None


BROADCAST = """
import os, sys
import torch
from forge.health.pace import Pace

torch.distributed.init_process_group("gloo", init_method="file://meeting", rank=0, world_size=1)
norm = torch.nn.BatchNorm1d(2) if sys.argv[1] == "broadcast" else torch.nn.LayerNorm(2)
net = torch.nn.Sequential(torch.nn.Linear(2, 2), norm)
ddp = torch.nn.parallel.DistributedDataParallel(net)
ddp._set_ddp_runtime_logging_sample_rate(1)
watched, found = Pace([ddp]), []
for _ in range(20):
    ddp(torch.ones(2, 2)).sum().backward()
    found.append(watched.waiting())
print(found[-1] is None, flush=True)
# Gloo's thread may want the GIL for a tensor's end, while who leaves the group has it, and waits.
os._exit(0)
"""


@pytest.mark.parametrize(("kind", "expected"), [("broadcast", "True"), ("none", "False")])
def test_a_model_whose_buffers_are_broadcast_says_nothing(tmp_path, kind, expected):
    """Rank 0 waits there for the slow one, and would be taken for slow itself."""
    (tmp_path / "model.py").write_text(BROADCAST.replace("//meeting", f"//{tmp_path}/meeting"))
    done = forked.completed(["model.py", kind], tmp_path)
    assert done.stdout.splitlines()[-1:] == [expected], done.stdout


class Ranks:
    """Four of them, of which this is the first; what the others give is made up."""

    rank, size = 0, 4

    def __init__(self, others):
        self.others, self.keys, self.forgotten = others, [], []

    def gather(self, key, value, timeout_s, unless=None):
        self.keys.append(key)
        if self.others is None:
            raise RankLost("gone")
        return [] if unless() else [value, *(json.dumps(one).encode() for one in self.others)]

    def forget(self, key):
        self.forgotten.append(key)


class Known(Pace):
    def waiting(self):
        return 0.5


def looked(others, **changed):
    context = Context(
        CheckConfig(threshold=0.75),
        Path(),
        Path(),
        ranks=Ranks(others),
        pace=Known([]),
        is_beside=True,
    )
    context = replace(context, **changed)
    return straggler.straggler(context), context


def test_a_straggler_is_named_with_its_node():
    """Its node alone is excluded."""
    found, _ = looked([[0.5, "n1"], [0.0, "n2"], [0.5, "n2"]])
    assert found.is_failed
    assert found.value == "rank 2 on n2 has 50% of the median rank's speed"
    assert found.culprits == (2,)
    assert looked([[0.5, "n1"]] * 3)[0].is_failed is False


def test_ranks_of_which_nothing_is_known_are_no_stragglers():
    """Who has not been measured yet, or is gone."""
    assert looked([[None, "n1"]] * 3)[0] is None
    assert looked(None)[0] is None


def test_before_the_training_nobody_is_slow():
    """There are no steps yet; nobody is to be waited for."""
    found, context = looked(None, is_beside=False)
    assert (found, context.ranks.keys) == (None, [])


def test_each_round_has_its_own_key_and_forgets_the_last(monkeypatch):
    """A key serves once, and a job that runs for a month is not to fill the store."""
    _, context = looked([[0.5, "n1"]] * 3)
    for _ in range(2):
        straggler.straggler(context)
    assert len(set(context.ranks.keys)) == 3
    assert context.ranks.forgotten == context.ranks.keys[:2]


def test_who_leaves_waits_for_nobody():
    """The end of the attempt comes first."""
    stopped = threading.Event()
    stopped.set()
    assert looked([[0.5, "n1"]] * 3, stopped=stopped)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["data", "forward", "backward"])
def test_a_slow_rank_of_four_is_named_and_its_node_alone_is_sick(tmp_path, how):
    """All ranks take the same time; only one of them is to be excluded."""
    checks = {"straggler": {"action": "exclude_node"}}
    policy = {"health": {"every_s": 0.2, "checks": checks}}
    job = RankedJob(tmp_path, 4, "slow_rank.py", slow=2, how=how, policy=policy)
    assert job.run() == [69] * 4, job.output
    assert "Health check `straggler` failed: rank 2 on " in job.output
    said = sick.read_all(job.checkpoints, 4)
    assert [rank for rank, one in said.items() if one.node] == [2]


def test_looking_for_it_changes_no_bit(tmp_path):
    """Nothing that watches may change what it watches."""
    watched = {"policy": {"health": {"every_s": 0.01}}}
    one, other = (
        RankedJob(tmp_path / name, 2, n=30, norm=False, **spec)
        for name, spec in {"a": watched, "b": NEVER}.items()
    )
    for job in (one, other):
        assert job.run() == [0, 0], job.output
    one.assert_same_run(other)
