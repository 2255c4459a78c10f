"""Private parts of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYER_VERSIONS = "_metadata"
"""The attribute of a module's state_dict with the versions of its layers' formats."""
EXTRA_STATE = "_extra_state"
"""The last part of the key under which a state_dict has what `get_extra_state` returned."""
SCHEDULES = "_schedulers"
"""The key under which a combined schedule's state_dict has those of the schedules it is made of."""


def foreach_copy(
    targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each source into its target: on a GPU in a few kernels, however many tensors there are.

    If it goes: `target.copy_(source, non_blocking=non_blocking)` in a loop, which is slower.
    """
    import torch

    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not.

    If it goes: refuse a tensor that is not coalesced by its path; of others take `indices()`
    and `values()`.
    """
    return tensor._indices(), tensor._values()


def layer_versions(state_dict: Any) -> Mapping[str, Any] | None:
    """The versions of the layers' formats, by which torch converts an old state; None: unknown.

    If it goes: see whether `Module.state_dict` carries the versions elsewhere (its source says
    `local_metadata`), and read them there.
    """
    return getattr(state_dict, LAYER_VERSIONS, None)


def set_layer_versions(state_dict: Any, versions: Mapping[str, Any]) -> None:
    """Give a state_dict the versions that `layer_versions` returned.

    If it goes: as for `layer_versions`; without them BatchNorm warns, or resets a counter.
    """
    setattr(state_dict, LAYER_VERSIONS, versions)


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of this module alone that were registered with `persistent=False`.

    If it goes: those of `named_buffers(recurse=False)` that `state_dict()` lacks; that runs the
    user's hooks.
    """
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: one for name, one in own if name in module._non_persistent_buffers_set}


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of this module alone that its state_dict has, and those that are None.

    If it goes: those of `named_buffers(recurse=False)` that `state_dict()` has. A buffer that is
    None until the first call is then refused when it is made.
    """
    left_out = module._non_persistent_buffers_set
    return {name: one for name, one in module._buffers.items() if name not in left_out}


def loader_of(module: torch.nn.Module | type[torch.nn.Module]) -> Any:
    """The method that loads this module's own part of a state_dict, which layers may override.

    If it goes: find what `Module.load_state_dict` calls for each module now. Until then let
    `own_ways` of `forge/state/module_state.py` return ("",): nothing is checked before loading.
    """
    return module._load_from_state_dict


def has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run as this module's own part of a state_dict is loaded.

    Those of FSDP2 do not count: with them each rank has its shards again, and nothing changes.

    If it goes: see where `register_load_state_dict_pre_hook` keeps them now. Until then return
    True: nothing is checked before loading, and FSDP2 modules cannot be loaded.
    """
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    return any(
        not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
        for hook in (*before.values(), *after.values())
    )


def schedules_within(schedule: Any) -> list[Any] | None:
    """What a SequentialLR or ChainedScheduler is made of; None for other schedules.

    If it goes: see what the two call that list now, and the key of their state_dict (SCHEDULES).
    """
    inner = getattr(schedule, SCHEDULES, None)
    return inner if isinstance(inner, list) else None


def num_yielded(iterator: Any) -> int | None:
    """Batches that an iterator of a DataLoader has yielded; None where it is of something else.

    If it goes: `forge rehearse` no longer names an iterator that a loop keeps to itself; let it
    count the batches instead.
    """
    return getattr(iterator, "_num_yielded", None)


def version(value: Any) -> int | None:
    """How often the values of a tensor were changed; None for all else, and if nothing counts it.

    If it goes: compare a copy of small tensors, as `TransientBuffers` does.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


def set_timeout(timeout_s: float) -> None:
    """How long a collective of the default group may take, from now on.

    If it goes: `forge.distributed.init` keeps its `first_timeout_s`; see what torch's own trainers
    call after their first step.
    """
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def makes_own_iterator(loader: torch.utils.data.DataLoader[Any]) -> bool:
    """Whether a DataLoader's subclass makes its iterator in its own way.

    If it goes: see what `DataLoader.__iter__` calls now. Until then return whether the loader is of
    a subclass at all: its place is then not taken up by another number of ranks.
    """
    from torch.utils.data import DataLoader

    return type(loader)._get_iterator is not DataLoader._get_iterator


def default_store() -> Any:
    """The store in which the ranks of the default process group have met.

    If it goes: `dist.broadcast_object_list` says the same, and waits half an hour for a rank that
    does not come.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def bucket_order(ddp: torch.nn.parallel.DistributedDataParallel) -> list[int]:
    """The numbers of a DDP module's parameters, in the order of the buckets it has made anew.

    None of them before its first backward, and where it never makes any (unused parameters are
    looked for). Collective: what the next forward would do first is done now.

    If it goes: without it a resume with more than two ranks may differ in the last bits. See what
    `DistributedDataParallel.forward` does before the module is called.
    """
    ddp.reducer._rebuild_buckets()
    inner: Any = ddp
    inner.logger.set_runtime_stats_and_log()
    data = inner._get_ddp_logging_data()
    text = str(data.get("rebuilt_per_bucket_param_indices") or "")
    return [int(number) for number in text.replace(",", " ").split()]


def rebuild_buckets(
    ddp: torch.nn.parallel.DistributedDataParallel, order: list[torch.nn.Parameter]
) -> None:
    """Let a DDP module make its buckets by this order; leaves gradients of zeros.

    If it goes: as for `bucket_order`.
    """
    import torch

    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for parameter in order:
        parameter.grad = None
        with torch.enable_grad():  # a gradient that is given makes torch import all of sympy
            zero = (parameter * torch.zeros_like(parameter)).real.sum()
        zero.backward()  # type: ignore[no-untyped-call]
    ddp.reducer._rebuild_buckets()


def shard_offset(
    whole: tuple[int, ...], part: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[int, ...] | None:
    """Where in a whole tensor the part of this rank begins; None where it is no usual chunk.

    Args:
        whole: Its shape.
        part: The shape of this rank's part.
        mesh: A DeviceMesh that this rank is in.
        placements: `Shard` and `Replicate`, one for each dimension of the mesh.

    If it goes: compute it from `placements` and `device_mesh.get_coordinate()`; chunks are those
    of `torch.chunk`, along one mesh dimension after the other.
    """
    from torch.distributed.tensor import _utils

    found, offset = _utils.compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(offset) if tuple(found) == part else None


def unreduced_gradients(module: torch.nn.Module) -> bool:
    """Whether FSDP2 holds gradients that no rank has summed up yet, where no state shows them.

    If it goes: see where `set_requires_gradient_sync(False)` lets it keep them. Until then return
    False: a stop between such a backward and the next loses them.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in getattr(state, "_fsdp_param_groups", ())
        for parameter in group.fsdp_params
    )


def note_found_inf(scaler: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let a GradScaler take what it has unscaled for bad: it skips these steps, and falls.

    If it goes: leave out `scaler.step`, and after `update` set the scale by `load_state_dict`.
    """
    for optimizer in optimizers:
        for found_inf in scaler._found_inf_per_device(optimizer).values():
            found_inf.fill_(1.0)


def on_compilation(
    begins: Callable[..., object], ends: Callable[..., object]
) -> Callable[[], None] | None:
    """Call these around each compilation, from the thread that compiles.

    Returns:
        What ends it; None where torch's compiler is not loaded, which takes seconds: nothing is
        compiled before it is.

    If it goes: return None. A compilation then counts as a part of its step, and one that takes
    longer than `sections.MIN_S`, and is not among the first steps, is taken for a hang.
    """
    callbacks = sys.modules.get("torch._dynamo.callback")
    handler = getattr(callbacks, "callback_handler", None)  # it may be loading, in another thread
    if handler is None:
        return None
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)

    def stop() -> None:
        for found, one in ((handler.start_callbacks, begins), (handler.end_callbacks, ends)):
            if one in found:  # `torch._dynamo.reset` may have cleared them
                found.remove(one)

    return stop
