"""Which GPUs a task's CUDA devices are: no check may look at, or blame, another's."""

import pytest
from nvml_answers import NUMBER, FakeNvml, recorded

from forge.errors import GpuGone
from forge.health import nvml
from forge.health.own_gpus import own_gpus

A, B = "GPU-11111111-aaaa-bbbb-cccc-000000000000", "GPU-22222222-aaaa-bbbb-cccc-000000000000"
MIG = "MIG-44444444-aaaa-bbbb-cccc-000000000000"
LOST, DENIED = ({"error": NUMBER[name]} for name in ("gpu_is_lost", "no_permission"))


@pytest.fixture
def answers(monkeypatch):
    """Of a machine with two GPUs; a test may change them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    found = recorded("made_up_h100")
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(found))
    return found


def handles(devices):
    return [gpu.handle for gpu in own_gpus(devices)]


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, (0, 1), ["gpu0", "gpu1"]),
        (None, (1,), ["gpu1"]),
        ("1", (0,), ["gpu1"]),
        ("1,0", (0, 1), ["gpu1", "gpu0"]),
        ("1,7,0", (0, 1), ["gpu1"]),  # CUDA stops at the first that there is not
        ("1,-1,0", (0, 1), ["gpu1"]),
        ("0,0", (0,), []),
        ("", (0,), []),
        ("-1", (0,), []),
        ("NoDevFiles", (0,), []),
        (f"{B},{A}", (0, 1), ["gpu1", "gpu0"]),
        ("GPU-2", (0,), ["gpu1"]),
        ("GPU-", (0,), []),  # of which is this the beginning?
        ("GPU-2,GPU-3,GPU-1", (0, 1), ["gpu1"]),
    ],
)
def test_cuda_s_numbers_become_gpus(answers, monkeypatch, visible, devices, expected):
    """As CUDA reads its variable; Slurm, people and Kubernetes write it in different ways."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert handles(devices) == expected


def test_gpus_that_the_cgroup_denies_do_not_count(answers):
    """Slurm lets a job open its own alone, and CUDA numbers those from 0."""
    answers["HandleByIndex 0"] = DENIED
    assert handles((0,)) == ["gpu1"]


def test_cuda_s_order_is_known_or_nothing_is_looked_at(answers, monkeypatch):
    """Of different models CUDA numbers the fastest first, NVML the first on the bus."""
    answers["Name gpu1"] = "NVIDIA T400"
    assert handles((0,)) == []
    assert handles((0, 1)) == ["gpu0", "gpu1"]  # whichever is which, both are its own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", B)
    assert handles((0,)) == ["gpu1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert handles((0,)) == []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert handles((0,)) == ["gpu1"]


@pytest.mark.parametrize("question", ["HandleByIndex 1", "UUID gpu1", "MigMode gpu1"])
def test_a_lost_gpu_is_its_owner_s_alone(answers, question):
    """The others keep their numbers, and compute on."""
    answers[question] = LOST
    assert handles((0,)) == ["gpu0"]
    with pytest.raises(GpuGone):
        own_gpus((1,))[0].ask("MigMode")


def test_of_a_mig_instance_the_gpu_is_known(monkeypatch, answers):
    """Its hardware is checked; its memory is others', too."""
    answers.clear()
    answers.update(recorded("made_up_mig"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert [(gpu.handle, gpu.is_split) for gpu in own_gpus((0,))] == [("gpu0", True)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [(gpu.handle, gpu.is_split) for gpu in own_gpus((0,))] == [("gpu0", True)]
    answers[f"HandleByUUID {MIG}"] = {"error": NUMBER["not_found"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert own_gpus((0,)) == []


def test_without_a_device_the_driver_is_not_even_looked_for(monkeypatch):
    """A task on CPUs has no use for it."""
    monkeypatch.setattr(nvml, "driver", lambda: pytest.fail("it was"))
    assert own_gpus(()) == []


def test_without_a_driver_there_is_nothing_to_ask():
    """As on this machine, or the fake would be no fake."""
    if nvml.driver() is not None:
        pytest.skip("there is an NVIDIA driver here")
    assert own_gpus((0,)) == []
