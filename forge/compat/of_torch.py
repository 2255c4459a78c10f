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
"""Last part of the key of `get_extra_state`'s result in a state_dict."""


def on_worker_start(call: Callable[[], None]) -> None:
    """Call a function in each DataLoader worker that is forked from now on, as it starts.

    It is called once torch has installed its own signal handlers. A second call replaces the
    function.

    If it goes: see where `_worker_loop` installs a handler of SIGTERM now. Without this a SIGTERM
    to all processes of a step kills the workers of loaders that the script iterates itself.
    """
    from torch.utils.data._utils import signal_handling

    module: Any = signal_handling
    installed = module._set_worker_signal_handlers
    own = getattr(installed, "own", installed)

    def set_handlers() -> None:
        own()
        call()

    set_handlers.own = own  # type: ignore[attr-defined]
    module._set_worker_signal_handlers = set_handlers


def foreach_copy(
    targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each source into its target; on a GPU a few kernels copy all tensors.

    If it goes: `target.copy_(source, non_blocking=non_blocking)` in a loop, which is slower.
    """
    import torch

    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The L2 norm of each tensor, without grouping them by device and dtype first.

    If it goes: `[torch.linalg.vector_norm(one) for one in tensors]`, which takes longer.
    """
    import torch

    return list(torch._foreach_norm(tensors))


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not.

    If it goes: reject tensors that are not coalesced, naming their path; for the others use
    `indices()` and `values()`.
    """
    return tensor._indices(), tensor._values()


def layer_versions(state_dict: Any) -> Mapping[str, Any] | None:
    """The versions of the layers' formats, which torch uses to convert an old state; or None.

    If it goes: find where `Module.state_dict` stores the versions now (`local_metadata` in its
    source), and read them there.
    """
    return getattr(state_dict, LAYER_VERSIONS, None)


def set_layer_versions(state_dict: Any, versions: Mapping[str, Any]) -> None:
    """Set the versions of a state_dict to those that `layer_versions` returned.

    If it goes: as for `layer_versions`; without versions BatchNorm warns, or resets a counter.
    """
    setattr(state_dict, LAYER_VERSIONS, versions)


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This module's buffers (not its children's) registered with `persistent=False`.

    If it goes: use `named_buffers(recurse=False)` without the keys of `state_dict()`, which runs
    the user's hooks.
    """
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: one for name, one in own if name in module._non_persistent_buffers_set}


def loader_of(module: torch.nn.Module | type[torch.nn.Module]) -> Any:
    """The method that loads this module's own part of a state_dict; layers can override it.

    If it goes: find out what `Module.load_state_dict` calls for each module now. Until then let
    `own_ways` of `forge/state/module_state.py` return ("",): nothing is checked before loading.
    """
    return module._load_from_state_dict


def has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run when this module's own part of a state_dict is loaded.

    FSDP2's hooks do not count: they only restore each rank's shards.

    If it goes: see where `register_load_state_dict_pre_hook` stores hooks now. Until then return
    True: nothing is checked before loading, and FSDP2 modules cannot be loaded.
    """
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    return any(
        not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
        for hook in (*before.values(), *after.values())
    )


def num_yielded(iterator: Any) -> int | None:
    """Batches that a DataLoader's iterator has yielded; None for other iterators.

    If it goes: `forge rehearse` no longer names an iterator that the script keeps in a variable;
    let it count the batches instead.
    """
    return getattr(iterator, "_num_yielded", None)


def version(value: Any) -> int | None:
    """How often a tensor was changed in place; None for other values and inference tensors.

    If it goes: compare small tensors with a copy.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


def set_timeout(timeout_s: float) -> None:
    """Set the timeout of collectives in the default process group.

    If it goes: `forge.distributed.init` keeps its `first_timeout_s`; see what torch's own trainers
    call after their first step.
    """
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def forget_iterator(loader: Any) -> None:
    """Let the next pass of a DataLoader with persistent workers begin with a new iterator.

    If it goes: give the Position a new DataLoader with the same arguments.
    """
    loader._iterator = None


def keeps_iterator(loader: Any) -> bool:
    """Whether a DataLoader with persistent workers has started them: later passes draw no seed.

    If it goes: note in `iter_with_blocked_signals` for which loaders it was called.
    """
    return getattr(loader, "_iterator", None) is not None


def default_store() -> Any:
    """The rendezvous store of the default process group.

    If it goes: use `dist.broadcast_object_list`, which waits half an hour for a missing rank.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def bucket_order(ddp: torch.nn.parallel.DistributedDataParallel) -> list[int]:
    """Indices of a DDP module's parameters in the order of its rebuilt buckets.

    Empty before the first backward, and with `find_unused_parameters=True`, which never rebuilds
    them. This is a collective: it rebuilds the buckets, as the next forward would.

    If it goes: without it a resume with more than two ranks can differ in the last bits. See what
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
    """Make a DDP module rebuild its buckets in this order; leaves gradients of zeros.

    If it goes: as for `bucket_order`.
    """
    import torch

    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for parameter in order:
        parameter.grad = None
        with torch.enable_grad():  # an explicit gradient would make torch import sympy
            zero = (parameter * torch.zeros_like(parameter)).real.sum()
        zero.backward()  # type: ignore[no-untyped-call]
    ddp.reducer._rebuild_buckets()


def shard_offset(
    whole: tuple[int, ...], part: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[int, ...] | None:
    """Offset of this rank's part in the whole tensor; None if the part is not a usual chunk.

    Args:
        whole: The shape of the whole tensor.
        part: The shape of this rank's part.
        mesh: A DeviceMesh that contains this rank.
        placements: `Shard` and `Replicate`, one for each dimension of the mesh.

    If it goes: compute it from `placements` and `device_mesh.get_coordinate()`, by `torch.chunk`
    along one mesh dimension after the other.
    """
    from torch.distributed.tensor import _utils

    found, offset = _utils.compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(offset) if tuple(found) == part else None


def unreduced_gradients(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has accumulated gradients that are not reduced yet and not in any state.

    If it goes: see where they are stored with `set_requires_gradient_sync(False)`. Until then
    return False: a stop between such a backward and the next loses them.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in getattr(state, "_fsdp_param_groups", ())
        for parameter in group.fsdp_params
    )


def note_found_inf(scaler: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make a GradScaler treat the gradients as infinite: it skips these steps and lowers its scale.

    If it goes: omit `scaler.step`, and after `update` set the scale with `load_state_dict`.
    """
    for optimizer in optimizers:
        for found_inf in scaler._found_inf_per_device(optimizer).values():
            found_inf.fill_(1.0)


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` of an optimizer divides the gradients by the scale of a GradScaler.

    If it goes: see how `GradScaler.step` finds out that an optimizer is fused.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def on_compilation(
    begins: Callable[..., object], ends: Callable[..., object]
) -> Callable[[], None] | None:
    """Call these at the begin and end of each compilation, in the thread that compiles.

    Returns:
        A function that unregisters them; None if torch's compiler is not loaded: then nothing has
        been compiled, and loading it would take seconds.

    If it goes: return None. A compilation then counts as part of its step; if it takes longer than
    `sections.MIN_S`, outside the first steps, it counts as a hang.
    """
    callbacks = sys.modules.get("torch._dynamo.callback")
    handler = getattr(callbacks, "callback_handler", None)  # None while another thread loads it
    if handler is None:
        return None
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)

    def stop() -> None:
        for found, one in ((handler.start_callbacks, begins), (handler.end_callbacks, ends)):
            if one in found:  # `torch._dynamo.reset` clears the list
                found.remove(one)

    return stop
