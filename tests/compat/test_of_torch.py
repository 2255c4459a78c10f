"""Private parts of torch that forge uses.

One module, since it is one list of contracts.
"""

import os
import subprocess
import sys

import pytest
import torch
import warm
from contracts import contract
from forked import completed
from torch import nn

from forge.compat import of_torch


def test_on_worker_start(tmp_path):
    """So workers of loops that are not forge's outlive what Slurm sends to all processes."""
    loader = torch.utils.data.DataLoader([0, 1], num_workers=2)
    with contract(of_torch.on_worker_start):
        of_torch.on_worker_start(lambda: 1 / 0)
        of_torch.on_worker_start(lambda: (tmp_path / str(os.getpid())).touch())
        assert len(list(loader)) == 2
        assert len(os.listdir(tmp_path)) == 2
        assert str(os.getpid()) not in os.listdir(tmp_path)
        of_torch.on_worker_start(lambda: None)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_foreach_copy(non_blocking):
    """Saves copy tensors with it: the copies must have the same bits."""
    with contract(of_torch.foreach_copy):
        sources = [torch.rand(3), torch.rand(2, 2).t(), torch.tensor(2)]
        targets = [torch.zeros(one.shape, dtype=one.dtype) for one in sources]
        of_torch.foreach_copy(targets, sources, non_blocking=non_blocking)
        assert all(map(torch.equal, targets, sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreach_norm(dtype):
    """forge clips by norms of norms, which have to be those of `clip_grad_norm_`, to the bit."""
    with contract(of_torch.foreach_norm):
        shapes = [(), (0,), (7,), (33, 65), (3, 4, 5), (1, 4097)]
        tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
        norm = torch.linalg.vector_norm(torch.stack(of_torch.foreach_norm(tensors)))
        assert torch.equal(norm, torch.nn.utils.get_total_norm(tensors))


def test_coo_parts():
    """`indices()` rejects tensors that are not coalesced; duplicate entries have to stay two."""
    with contract(of_torch.coo_parts):
        sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
        indices, values = of_torch.coo_parts(sparse)
        assert indices.tolist() == [[1, 1]]
        assert values.tolist() == [2.0, 3.0]


def test_layer_versions():
    """BatchNorm takes a state without versions for a state of 2018."""
    with contract(of_torch.layer_versions, of_torch.set_layer_versions):
        state = nn.BatchNorm1d(2).state_dict()
        versions = of_torch.layer_versions(state)
        assert versions[""]["version"] == 2
        plain = type(state)(state)
        assert of_torch.layer_versions(plain) is None
        of_torch.set_layer_versions(plain, versions)
        assert of_torch.layer_versions(plain) == versions
        assert list(vars(plain)) == [of_torch.LAYER_VERSIONS]
        del plain["num_batches_tracked"]
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            nn.BatchNorm1d(2).load_state_dict(plain)
        of_torch.set_layer_versions(plain, {})
        nn.BatchNorm1d(2).load_state_dict(plain)


def test_non_persistent_buffers():
    """Only buffers that are not in a checkpoint, and only of this module, not of its children."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("saved", torch.zeros(1))
            self.register_buffer("cache", torch.ones(1), persistent=False)
            self.register_buffer("unset", None, persistent=False)

    with contract(of_torch.non_persistent_buffers):
        model = nn.Sequential(Model())
        assert of_torch.non_persistent_buffers(model) == {}
        assert of_torch.non_persistent_buffers(model[0]) == {"cache": model[0].cache}


def test_loader_of():
    """torch calls it for each module; layers of torch override it in modules of torch."""

    class Own(nn.Linear):
        def _load_from_state_dict(self, *args):
            raise NotImplementedError

    with contract(of_torch.loader_of):
        plain = of_torch.loader_of(nn.Module)
        assert of_torch.loader_of(nn.Linear) is plain
        assert of_torch.loader_of(nn.BatchNorm1d) is not plain
        assert of_torch.loader_of(nn.BatchNorm1d(1)).__func__.__module__.startswith("torch.nn.")
        assert of_torch.loader_of(Own(1, 1)).__func__.__module__ == __name__
        with pytest.raises(NotImplementedError):
            nn.Sequential(Own(1, 1)).load_state_dict({})


@pytest.mark.parametrize(
    "register", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"]
)
def test_has_load_hooks(register):
    """A load hook can rename the saved tensors, or resize the live ones."""
    with contract(of_torch.has_load_hooks):
        model = nn.Sequential(nn.Linear(1, 1))
        assert not of_torch.has_load_hooks(model)
        handle = getattr(model, register)(lambda *args: None)
        assert of_torch.has_load_hooks(model)
        assert not of_torch.has_load_hooks(model[0])
        handle.remove()
        assert not of_torch.has_load_hooks(model)


def test_the_key_of_extra_state():
    """The result of `get_extra_state` has this key; forge does not compare its value."""
    with contract(of_torch.layer_versions):

        class Model(nn.Module):
            def get_extra_state(self):
                return 1

        assert list(nn.Sequential(Model()).state_dict()) == [f"0.{of_torch.EXTRA_STATE}"]


@pytest.mark.parametrize("workers", [0, 1])
def test_num_yielded(workers):
    """For DataLoaders with and without workers."""
    with contract(of_torch.num_yielded):
        iterator = iter(torch.utils.data.DataLoader(range(4), num_workers=workers))
        next(iterator)
        assert of_torch.num_yielded(iterator) == 1
        assert of_torch.num_yielded(iter([1])) is None


def test_version():
    """In-place changes count, also through a view; an inference tensor has no version."""
    with contract(of_torch.version):
        values = torch.zeros(4)
        seen = [of_torch.version(values)]
        for change in (values.add_, values[:2].mul_, values.view(2, 2).fill_):
            change(1)
            seen.append(of_torch.version(values))
        assert sorted(set(seen)) == seen
        with torch.inference_mode():
            assert of_torch.version(torch.zeros(1)) is None
        assert of_torch.version([1]) is None


def test_keeps_iterator():
    """Only the first pass of persistent workers draws a seed."""
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
    with contract(of_torch.keeps_iterator):
        assert not of_torch.keeps_iterator(loader)
        iter(loader)
        assert of_torch.keeps_iterator(loader)
        assert not of_torch.keeps_iterator(torch.utils.data.DataLoader(range(4)))


def test_forget_iterator():
    """Persistent workers would continue the pass that the loader was in."""
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
    with contract(of_torch.forget_iterator):
        before = iter(loader)
        assert iter(loader) is before
        of_torch.forget_iterator(loader)
        assert iter(loader) is not before


@pytest.fixture
def alone(tmp_path):
    """A process group with this process only."""
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped():
    """A DDP module whose layers run in another order than they are registered."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    layers.forward = lambda x: layers[0](layers[2](layers[1](x)))
    return nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1e-5)


def test_a_timeout_holds_from_now_on(alone):
    """For collectives of the existing process group."""
    with contract(of_torch.set_timeout):
        of_torch.set_timeout(41.0)
        options = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options
        assert options._timeout.total_seconds() == 41.0


def test_the_default_store_has_what_ranks_tell_each_other(alone):
    """It is the rendezvous store of the process group, and a look-up does not wait."""
    with contract(of_torch.default_store):
        store = of_torch.default_store()
        assert not store.check(["forge"])
        store.set("forge", b"value")
        assert store.check(["forge"])
        assert store.get("forge") == b"value"


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_buckets(steps, alone):
    """The order is known after any number of steps, and can be set in another process."""
    with contract(of_torch.bucket_order), contract(of_torch.rebuild_buckets):
        one, other = wrapped(), wrapped()
        assert of_torch.bucket_order(one) == []
        for _ in range(steps):
            one(torch.ones(1, 4)).sum().backward()
        order = of_torch.bucket_order(one)
        assert sorted(order) == list(range(6))
        assert order != sorted(order, reverse=True)
        parameters = list(other.parameters())
        of_torch.rebuild_buckets(other, [parameters[number] for number in order])
        assert all(p.grad.count_nonzero() == 0 for p in parameters)
        assert of_torch.bucket_order(other) == order
        for _ in range(2):
            other(torch.ones(1, 4)).sum().backward()
        assert of_torch.bucket_order(other) == order


@pytest.fixture(scope="module")
def sharding():
    """Modules whose import takes a second, which one process does for the tests of this file."""
    from torch.distributed import fsdp, tensor

    return fsdp, tensor


@pytest.fixture
def fsdp(alone, sharding):
    """Shards modules with FSDP2, on a mesh of this process only."""
    fsdp, tensor = sharding
    mesh = tensor.init_device_mesh("cpu", (1,))
    return lambda module: fsdp.fully_shard(module, mesh=mesh)


def test_shard_offset(alone, monkeypatch):
    """The offset of a part among chunks of any sizes, on a mesh of one dimension and of two."""
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, init_device_mesh

    def offset_of(rows, shape, place, placements):
        with monkeypatch.context() as patch:  # a mesh of this many ranks
            mesh = init_device_mesh("cpu", (1,) * len(shape))
            patch.setattr(DeviceMesh, "shape", shape)
            patch.setattr(DeviceMesh, "get_coordinate", lambda self: list(place))
            patch.setattr(DeviceMesh, "_sym_get_coordinate", lambda self, i: place[i])
            return of_torch.shard_offset((7, 3), (rows, 3), mesh, placements)

    with contract(of_torch.shard_offset):
        assert [offset_of(2, (4,), (i,), (Shard(0),))[0] for i in range(3)] == [0, 2, 4]
        assert offset_of(1, (4,), (3,), (Shard(0),)) == (6, 0)
        assert offset_of(3, (2, 2), (1, 1), (Replicate(), Shard(0))) == (4, 0)
        assert offset_of(2, (2, 2), (0, 1), (Shard(0), Shard(0))) == (2, 0)
        assert offset_of(3, (4,), (0,), (Shard(0),)) is None


def test_hooks_of_fsdp(fsdp):
    """FSDP2's own hooks do not count; a user's hook on the same module does."""
    model = fsdp(nn.Linear(2, 1))
    with contract(of_torch.has_load_hooks):
        model(torch.ones(1, 2)).sum().backward()
        assert model._load_state_dict_pre_hooks
        assert not of_torch.has_load_hooks(model)
        model.register_load_state_dict_pre_hook(lambda *given: None)
        assert of_torch.has_load_hooks(model)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_unreduced_gradients(reduce_dtype, alone, sharding):
    """Depending on `reduce_dtype`, FSDP2 stores them in different places until they are reduced."""
    fsdp, tensor = sharding
    mesh = tensor.init_device_mesh("cpu", (1,))
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = fsdp.fully_shard(nn.Linear(2, 1), mesh=mesh, mp_policy=policy)
    with contract(of_torch.unreduced_gradients):
        assert not of_torch.unreduced_gradients(nn.Linear(2, 1))
        for is_summed in (True, False, True):
            model.set_requires_gradient_sync(is_summed)
            model(torch.ones(1, 2)).sum().backward()
            assert of_torch.unreduced_gradients(model) is not is_summed


def test_note_found_inf():
    """If another rank has an Inf in its gradients, this rank has to skip the step, too."""
    with contract(of_torch.note_found_inf):
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        of_torch.note_found_inf(scaler, [optimizer])  # nothing is unscaled yet
        scaler.unscale_(optimizer)
        of_torch.note_found_inf(scaler, [optimizer])
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, torch.ones(2))
        assert scaler.get_scale() == 2.0


def test_unscales_itself():
    """Without gradients the step of such an optimizer records no check, and `update` fails."""
    with contract(of_torch.unscales_itself):
        for is_fused in (False, True):
            weight = torch.ones(2, requires_grad=True)
            optimizer = torch.optim.AdamW([weight], fused=is_fused)
            assert of_torch.unscales_itself(optimizer) is is_fused
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(weight.sum() * float("inf")).backward()
            scaler.unscale_(optimizer)
            weight.grad = None
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0


ASKED = """
import sys, torch
from forge.compat import of_torch

loaded = "torch._dynamo.callback" in sys.modules
assert loaded or of_torch.on_compilation(int, int) is None
assert loaded or "torch._dynamo.callback" not in sys.modules
"""


def test_who_compiles_nothing_loads_no_compiler(tmp_path):
    """It takes as long as all of torch."""
    done = completed(["-c", ASKED], tmp_path)
    with contract(of_torch.on_compilation):
        assert not done.returncode, done.stdout


COMPILING = """
import torch
import torch._prims  # comes too late where `quick` puts off torch._dynamo
from forge.compat import of_torch

marks = []
begins, ends = (lambda *given: marks.append("begins")), (lambda *given: marks.append("ends"))

def backend(module, inputs):
    marks.append("compiles")
    return module.forward

double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
stop = of_torch.on_compilation(begins, ends)
double(torch.ones(2))
assert marks == ["begins", "compiles", "ends"], marks
double(torch.ones(2))
assert len(marks) == 3, marks
double(torch.ones(3))
assert marks == ["begins", "compiles", "ends"] * 2, marks
stop()
stop()
double(torch.ones(4))
assert marks[6:] == ["compiles"], marks
"""


def test_on_compilation(tmp_path):
    """A long compilation is not a hang; the code after it can hang, and is not a compilation."""
    (tmp_path / "compiling.py").write_text(COMPILING)
    command = [sys.executable, "compiling.py"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = warm.run(command, timeout=200, imports=warm.SHARDING, cwd=tmp_path, **options)
    with contract(of_torch.on_compilation):
        assert not done.returncode, done.stdout
