"""Losses and gradients as numbers: whether they are finite, how large they are, and clipping.

A loss is a scalar, or is judged element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean(loss: torch.Tensor | float) -> torch.Tensor:
    """A loss as one number on its device; not finite if any element is not."""
    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    loss = whole(loss.detach())
    if loss.numel() == 1:
        return loss
    return loss.to(widest(loss.device)).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as the tensor that all its ranks have then, a collective; any other as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those that torch can compute with together: plain ones, and the DTensors of each mesh."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients: a scalar tensor, with no host synchronisation.

    Of sharded ones it is that of the whole, a collective.
    """
    values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in grads]
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh(values)]
    return norms[0] if len(norms) == 1 else _norm_of(norms)


def exact_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The same where squares would overflow in the gradients' own dtype."""
    return _norm_of([whole(torch.linalg.vector_norm(g, dtype=widest(g.device))) for g in grads])


def _norm_of(norms: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    return found


def clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor | None = None
) -> None:
    """Scale their gradients to an L2 norm of `max_norm` at most; `norm` is theirs, if known."""
    if norm is None:
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
    for group in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def non_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """The gradients that hold NaN or Inf, each with how many; exact, and one look each.

    Of sharded ones this rank's part: no collective, in which a rank might not come.
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
