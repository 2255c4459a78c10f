"""Losses and gradients as numbers: finiteness, norms and clipping.

A loss can be a scalar or a tensor; every element of a tensor is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from forge.compat import of_torch


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean(loss: torch.Tensor | float) -> torch.Tensor:
    """A loss as one number on its device; not finite if any element is not finite."""
    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    loss = whole(loss.detach())
    if loss.numel() == 1:
        return loss
    return loss.to(widest(loss.device)).mean()


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types that are no DTensor: to ask each tensor for an attribute that it lacks takes longer."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor (a collective); any other tensor unchanged."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "full_tensor"):
        return tensor
    full: torch.Tensor = tensor.full_tensor()
    return full


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that torch can combine: plain tensors, and the DTensors of each mesh."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        mesh = None if type(tensor) in _PLAIN else getattr(tensor, "device_mesh", None)
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients: a scalar tensor, with no host synchronisation.

    For sharded gradients the norm of the full ones (a collective).
    """
    if _are_alike(grads):  # what torch does, too, once it has found that out
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(of_torch.foreach_norm(grads)))
        return norm
    values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in grads]
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh(values)]
    return norms[0] if len(norms) == 1 else _norm_of(norms)


def _are_alike(grads: list[torch.Tensor]) -> bool:
    """Whether these are plain tensors of one dtype and device."""
    dtype, device = grads[0].dtype, grads[0].device
    for one in grads:  # `all` of a generator would call it for each
        is_plain = type(one) in _PLAIN and one.layout is torch.strided
        if not is_plain or one.dtype is not dtype or one.device != device:
            return False
    return True


def exact_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The same norm, for gradients whose squares overflow in their own dtype."""
    return _norm_of([whole(torch.linalg.vector_norm(g, dtype=widest(g.device))) for g in grads])


def _norm_of(norms: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    return found


def clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor | None = None
) -> None:
    """Scale gradients to an L2 norm of at most `max_norm`; `norm` is their norm, if known."""
    if norm is None:
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
    for group in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def non_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Gradients that contain NaN or Inf, each with the number; exact, one read for each gradient.

    For sharded gradients only this rank's shard: no collective, because not all ranks call it.
    """
    found = []
    for name, given in named:
        grad = given.to_local() if hasattr(given, "to_local") else given
        values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
        num_nan = int(torch.isnan(values).sum().item())
        num_inf = int(torch.isinf(values).sum().item())
        if num_nan or num_inf:
            found.append(f"{name} ({num_nan} NaN, {num_inf} Inf of {values.numel()})")
    return found
