"""Whether the CUDA devices of a task compute right, and which devices are the task's own."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from forge.health import devices
from forge.health.devices import check_gpu_health, check_nccl_health, own_devices


def test_gpu_health_has_every_key_and_says_what_is_wrong():
    result = check_gpu_health()
    flags = ("cuda_available", "device_accessible", "compute_ok", "memory_ok")
    assert set(result) == {*flags, "error"}
    assert all(isinstance(result[flag], bool) for flag in flags)
    assert isinstance(result["error"], str)
    assert all(result[flag] for flag in flags) == (result["error"] == "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device")
def test_without_a_device_gpu_health_is_an_answer_and_no_exception():
    result = check_gpu_health(3)
    assert result["cuda_available"] is False
    assert result["error"] == "CUDA is not available"


def test_a_device_that_does_not_answer_is_an_answer(monkeypatch):
    """A driver that is there but broken raises from anywhere."""

    def broken(*args):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    result = check_gpu_health(1)
    assert (result["cuda_available"], result["device_accessible"]) == (True, False)
    assert "cuda:1: CUDA error: uncorrectable ECC" in result["error"]


@pytest.mark.parametrize(
    ("count", "environment", "expected"),
    [
        (0, {}, []),
        (4, {}, [0, 1, 2, 3]),
        (4, {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, [2]),
        (1, {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, [0]),
        (8, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "0"}, [4, 5, 6, 7]),
        (2, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, [1]),
        (8, {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4,3"}, [6, 7]),
        (4, {"SLURM_LOCALID": "0"}, [0, 1, 2, 3]),  # a batch script's own process
    ],
)
def test_the_check_leaves_devices_of_other_tasks_alone(monkeypatch, count, environment, expected):
    """A context takes half a GB of the memory that another task trains in."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    for device in own_devices():
        check_gpu_health(device)
    assert [device.index for device in asked] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_asking_for_the_task_s_devices_opens_no_context():
    code = "import torch; from forge.health.devices import own_devices\n"
    code += "print(own_devices() == list(range(torch.cuda.device_count())))\n"
    code += "print(torch.cuda.is_initialized())"
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sane_device_is_healthy():
    result = check_gpu_health(0)
    assert result.pop("error") == ""
    assert all(result.values())
    assert check_gpu_health(99)["device_accessible"] is False


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(("own", "device"), [([3], 3), ([0], 0), ([0, 1], 0), ([], 0)])
def test_a_collective_is_checked_on_a_gpu_of_the_task_itself(backend, own, device, monkeypatch):
    """In a check's thread CUDA's current device is 0, whatever the main thread has chosen."""
    made = []

    def ones(count, device):
        made.append(device)
        return torch.ones(count, device="meta")

    answers = {"is_initialized": True, "get_backend_config": backend, "all_reduce": None}
    for name, answer in answers.items():
        monkeypatch.setattr(devices.dist, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "own_devices", lambda: own)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(**vars(torch) | {"ones": ones}))
    assert check_nccl_health() is False  # there is none here
    assert made == [torch.device("cuda", device)]


def test_collectives_are_healthy_where_there_are_none():
    assert check_nccl_health() is True
