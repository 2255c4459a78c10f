"""`forge.resilience.health`: NaN detection, each minimum of the API."""

import math
import os
import subprocess
import sys

import pytest
import torch
from warm import Popen

import forge.resilience
from forge.resilience import NaNDetector, NaNState

NAN, INF = float("nan"), float("inf")


def test_every_name_of_the_api_is_in_the_package_and_in_its_module():
    homes = {
        "signal_handler": ["ShutdownHandler"],
        "health": ["NaNDetector", "NaNState", "check_gpu_health", "check_nccl_health"],
        "elastic": [
            "SLURMInfo",
            "get_slurm_info",
            "is_slurm_job",
            "is_slurm_requeue",
            "log_job_info",
            "resolve_resume_path",
        ],
    }
    for module, names in homes.items():
        for name in names:
            here = getattr(forge.resilience, name)
            assert here is getattr(getattr(forge.resilience, module), name)
            assert name in dir(forge.resilience)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = forge.resilience.Nothing


# -- NaNDetector ----------------------------------------------------------------------------------


def test_the_state_begins_as_the_api_says():
    expected = NaNState(
        consecutive_nans=0, total_nans=0, last_good_loss=INF, last_good_step=0, nan_steps=[]
    )
    assert NaNDetector().state == expected == NaNState()
    detector = NaNDetector()
    assert (detector.action, detector.max_consecutive, detector.max_history) == ("warn", 5, 100)


@pytest.mark.parametrize("action", ["halt", "", "WARN", None])
def test_an_unknown_action_is_refused(action):
    with pytest.raises(ValueError, match="Invalid NaN action"):
        NaNDetector(action)


@pytest.mark.parametrize(
    "loss", [0.5, 1e300, torch.tensor(0.5), torch.tensor([1.0, 2.0]), torch.tensor(1e38), 3]
)
def test_a_finite_loss_is_good(loss):
    detector = NaNDetector("raise")
    assert detector.check_loss(loss, 7) is True
    assert detector.state.last_good_step == 7
    assert math.isfinite(detector.state.last_good_loss)


@pytest.mark.parametrize(
    "loss",
    [NAN, INF, -INF, torch.tensor(NAN), torch.tensor([1.0, NAN]), torch.tensor([INF, -INF])],
)
@pytest.mark.parametrize("action", ["warn", "skip"])
def test_a_loss_that_is_not_finite_is_bad(loss, action, caplog):
    detector = NaNDetector(action)
    assert detector.check_loss(loss, 7) is False
    assert detector.state.nan_steps == [7]
    assert ("NaN/Inf loss at step 7" in caplog.text) == (action == "warn")


def test_raise_raises_and_counts():
    detector = NaNDetector("raise")
    with pytest.raises(RuntimeError, match="NaN/Inf loss at step 3: nan"):
        detector.check_loss(NAN, 3)
    assert detector.state.total_nans == 1


def model_with_gradient(value):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 1] = value
    return model


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_is_bad_and_named(value, caplog):
    detector = NaNDetector("warn")
    assert detector.check_gradients(model_with_gradient(value), 4) is False
    assert "NaN/Inf gradient at step 4: 1.weight (" in caplog.text
    with pytest.raises(RuntimeError, match=r"NaN/Inf gradient at step 5: 1\.weight"):
        NaNDetector("raise").check_gradients(model_with_gradient(value), 5)


@pytest.mark.parametrize("value", [1.0, 3e38, -3e38])
def test_a_huge_gradient_is_good(value):
    """Its square overflows; it does not."""
    assert NaNDetector("raise").check_gradients(model_with_gradient(value), 1) is True


def test_sparse_gradients_and_none_are_looked_at():
    model = torch.nn.Embedding(5, 2, sparse=True)
    assert NaNDetector("raise").check_gradients(model, 0) is True
    model(torch.tensor([1, 1])).sum().backward()
    assert NaNDetector("raise").check_gradients(model, 0) is True
    model.weight.grad = model.weight.grad * NAN
    assert NaNDetector("skip").check_gradients(model, 0) is False


def test_max_consecutive_bad_steps_in_a_row_ask_for_a_rollback():
    detector = NaNDetector("skip", max_consecutive=3)
    for step in range(3):
        assert not detector.should_rollback
        detector.check_loss(NAN, step)
    assert detector.should_rollback
    detector.check_loss(1.0, 3)
    assert not detector.should_rollback
    assert detector.state == NaNState(0, 3, 1.0, 3, [0, 1, 2])


def test_gradients_that_are_bad_in_a_row_ask_for_a_rollback_though_the_losses_are_good():
    """A loss is checked before its gradients: a good one must not end a streak of bad ones."""
    detector = NaNDetector("skip", max_consecutive=3)
    for step in range(3):
        assert detector.check_loss(1.0, step)
        assert not detector.check_gradients(model_with_gradient(NAN), step)
    assert detector.should_rollback
    assert detector.state.nan_steps == [0, 1, 2]
    detector.check_loss(1.0, 3)
    assert detector.check_gradients(model_with_gradient(1.0), 3)
    assert not detector.should_rollback


def test_a_step_whose_loss_and_gradients_are_bad_counts_once():
    detector = NaNDetector("skip", max_consecutive=3)
    for step in range(2):
        detector.check_loss(NAN, step)
        detector.check_gradients(model_with_gradient(NAN), step)
    assert (detector.state.consecutive_nans, detector.state.total_nans) == (2, 2)


def test_only_the_newest_steps_are_remembered():
    detector = NaNDetector("skip", max_history=3)
    for step in range(10):
        detector.check_loss(NAN, step)
    assert detector.state.nan_steps == [7, 8, 9]
    assert detector.state.total_nans == 10
    forgetful = NaNDetector("skip", max_history=0)
    forgetful.check_loss(NAN, 1)
    assert forgetful.state.nan_steps == []


def test_reset_forgets_everything():
    detector = NaNDetector("skip", max_consecutive=1)
    detector.check_loss(NAN, 3)
    detector.reset()
    assert detector.state == NaNState()
    assert not detector.should_rollback


def test_a_check_waits_for_the_device_once(monkeypatch):
    """A wait a step is what it may cost."""
    waits = []
    original = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda t: (waits.append(1), original(t))[1])
    detector = NaNDetector("raise")
    detector.check_loss(torch.tensor(1.0), 0)
    assert len(waits) == 1
    detector.check_gradients(model_with_gradient(1.0), 0)
    assert len(waits) == 2


# -- between ranks --------------------------------------------------------------------------------


RANK = """
import sys, torch, torch.distributed as dist
from forge.resilience import NaNDetector, check_nccl_health

rank, world, file, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=world)
if case == "healthy":
    print(check_nccl_health(60.0))
elif case == "absent":
    # The other rank never takes part: it waits until this one has its answer.
    if rank == 0:
        print(check_nccl_health(0.5), flush=True)
    else:
        sys.stdin.readline()
        print("absent")
else:
    detector = NaNDetector("raise" if case == "raise" else "skip", max_consecutive=2)
    try:
        loss = torch.tensor(float("nan") if rank == 1 else 1.0)
        print(detector.check_loss(loss, 1), end=" ")
        model = torch.nn.Linear(1, 1)
        model.weight.grad = torch.full((1, 1), float("nan") if rank == 0 else 1.0)
        print(detector.check_gradients(model, 2), detector.should_rollback, end=" ")
        print(detector.check_loss(torch.tensor(1.0), 3), detector.state.nan_steps)
    except RuntimeError as error:
        print(error)
sys.stdout.flush()
import os
os._exit(0)  # the process group of an abandoned collective cannot be taken down in order
"""


# The host's own name may not resolve.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}


def start_ranks(tmp_path, case, world=2):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script)]
    return [
        Popen(
            [*command, str(rank), str(world), str(tmp_path / "store"), case],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | LOOPBACK,
        )
        for rank in range(world)
    ]


def answers(ranks):
    found = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return found


def test_a_healthy_all_reduce_is_true_on_every_rank_of_gloo(tmp_path):
    assert answers(start_ranks(tmp_path, "healthy")) == ["True", "True"]


def test_a_rank_that_does_not_answer_is_unhealthy_within_the_timeout(tmp_path):
    """A node that hangs in a collective would otherwise hang the check as well."""
    ranks = start_ranks(tmp_path, "absent")
    assert ranks[0].stdout.readline() == "False\n"
    assert answers(ranks) == ["", "absent"]


def test_one_bad_rank_makes_the_step_bad_on_all(tmp_path):
    """A rank that steps alone has other weights than the rest, forever."""
    expected = "False False True True [1, 2]"
    assert answers(start_ranks(tmp_path, "skip")) == [expected, expected]


def test_all_ranks_raise_together(tmp_path):
    """A rank that continues would hang in its next collective."""
    first, second = answers(start_ranks(tmp_path, "raise"))
    assert first == "NaN/Inf loss at step 1: on another rank"
    assert second == "NaN/Inf loss at step 1: nan"
