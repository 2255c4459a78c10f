"""On which device ranks find out by a collective what all of them have to know."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from forge.group import collectives


@pytest.fixture
def reduced(monkeypatch):
    """Devices of what is reduced, in a group of two ranks with a backend for each device."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    def create(common, options):
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size)

    dist.Backend.register_backend("elsewhere", create, extended_api=True, devices=["meta"])
    dist.init_process_group("cpu:fake,meta:elsewhere", store=FakeStore(), rank=0, world_size=2)
    found, all_reduce = [], dist.all_reduce

    def spy(tensor, *args, **kwargs):
        found.append(tensor.device.type)
        return all_reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", spy)
    yield found
    dist.destroy_process_group()


def test_each_value_is_reduced_by_the_backend_of_its_device(reduced):
    """The default on GPUs is `cpu:gloo,cuda:nccl`: the flag of each step went through the host."""
    elsewhere = torch.empty((), dtype=torch.bool, device="meta")
    # torch's own `isfinite` of a meta tensor needs more of torch than these processes import.
    value = SimpleNamespace(device=elsewhere.device, isfinite=lambda: elsewhere)
    collectives.finite_on_all_ranks(value)
    collectives.finite_on_all_ranks(torch.ones(()))
    assert collectives.largest_of_ranks([3, 1]) == [3, 1]
    assert reduced == ["meta", "cpu", "cpu"]


def test_a_backend_that_is_for_all_devices_reduces_on_the_host(reduced, monkeypatch):
    """gloo alone: a value on a GPU is copied once, by us."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert collectives._meeting_device(torch.device("cuda", 1)) == torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    assert collectives._meeting_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
