"""A module's state: what of it can be saved, and which keys the module loads in its own way.

Torch loads most modules by copying each saved tensor into the tensor of the same name. A load hook,
or a module's own loading method, can do anything instead, for all submodules: resize, rename,
create. For these modules, states are compared after loading instead of before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from forge import messages
from forge.compat import of_torch
from forge.errors import CheckpointError


def own_ways(module: torch.nn.Module) -> tuple[str, ...]:
    """Prefixes of the keys that are not simply copied into the tensor of the same name."""
    if not loads_as(module, torch.nn.Module):
        return ("",)
    return tuple(
        f"{path}." if path else ""
        for path, one in module.named_modules(remove_duplicate=False)
        if _loads_in_its_way(one)
    )


def loads_as(one: Any, kind: Any) -> bool:
    """Whether the `load_state_dict` of `one` is the method of torch's class `kind`."""
    return type(one).load_state_dict is kind.load_state_dict and "load_state_dict" not in vars(one)


def _loads_in_its_way(module: torch.nn.Module) -> bool:
    method = getattr(of_torch.loader_of(module), "__func__", None)
    # Hooks of torch's own layers only add keys that older versions lacked.
    is_known = getattr(method, "__module__", "").startswith("torch.nn.modules.")
    return of_torch.has_load_hooks(module) or not is_known


def check_loadable(name: str, state: Mapping[str, Any]) -> None:
    """Refuse expanded tensors: torch saves them, but cannot copy into them.

    Raises:
        CheckpointError: Names the first.
    """
    for key, leaf in state.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is torch.strided:
            sizes = zip(leaf.shape, leaf.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in sizes):
                raise CheckpointError(
                    f"{name}.{key} is an expanded tensor of shape {list(leaf.shape)}: its elements"
                    " share memory, and torch cannot copy a saved value into it, so a resume would"
                    " fail. Expand the tensor at each use, or register its .clone(); a buffer that"
                    " the script always rebuilds can have persistent=False."
                )


def check_complete(name: str, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a `state_dict` without tensors that torch's `load_state_dict` requires.

    Raises:
        CheckpointError: Names them.
    """
    own, missing = own_ways(module), []
    for path, one in module.named_modules(remove_duplicate=False):
        for key in tensors(one).keys() - of_torch.non_persistent_buffers(one).keys():
            full = f"{path}.{key}" if path else key
            if full not in state and not (own and full.startswith(own)):
                missing.append(f"{name}.{full}")
    if missing:
        raise CheckpointError(
            f"{name}.state_dict() leaves out {messages.truncate_list(sorted(missing), 4)}, which"
            " its load_state_dict requires, so no checkpoint could be loaded. Leave state_dict as"
            " torch has it; or give the module a load_state_dict that accepts less, such as `return"
            " super().load_state_dict(state, strict=False)`."
        )


def check_kind(path: str, module: torch.nn.Module) -> None:
    """Refuse modules whose tensors do not show their shapes, or of which shard they are.

    Raises:
        CheckpointError: Names the module.
    """
    kind = type(module)
    if kind.__name__ == "FullyShardedDataParallel" and "torch.distributed.fsdp" in kind.__module__:
        raise CheckpointError(
            f"{path}: FullyShardedDataParallel (FSDP1) cannot be saved, since its tensors do not"
            " show which shard of which parameter they are. Shard the model with"
            " torch.distributed.fsdp.fully_shard (FSDP2) instead."
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise CheckpointError(
            f"{path}: a {kind.__name__} has no parameters before its first call, so no checkpoint"
            " can be compared with it. Call the model once, for example on a batch of zeros,"
            " before forge.Run and before the optimizer is created."
        )


def check_reduced(path: str, module: torch.nn.Module) -> None:
    """Refuse gradients that FSDP2 has not reduced over the ranks: no state contains them.

    Raises:
        CheckpointError: Names the module.
    """
    if of_torch.unreduced_gradients(module):
        raise CheckpointError(
            f"{path}: at the end of a step it still has gradients from a backward pass under"
            " set_requires_gradient_sync(False). They cannot be saved, since no state_dict contains"
            " them. Do all micro-batches of an update in one step of run.steps, and let the last"
            " backward pass reduce the gradients over the ranks."
        )


def mismatch(leaf: str, saved: str, live: str) -> str:
    """A sentence for a saved value that does not fit the object."""
    return f"{leaf}: {saved} in the checkpoint, {live} in the object"


def describe(value: Any) -> str:
    """A leaf, described for messages."""
    if isinstance(value, torch.Tensor):
        shape = "[nested]" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{shape}"
    return f"a {type(value).__name__}"


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of this module without its submodules, by name."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)
