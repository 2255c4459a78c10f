"""Whether the task's GPUs compute correctly: a product in each of two types, and memory."""

from __future__ import annotations

from forge.health.check import Context, Finding


def gpu(context: Context) -> Finding | None:
    """Whether each device answers, multiplies correctly, and keeps what is written to memory."""
    if not context.devices:
        return None
    import torch

    from forge.health.devices import check_gpu_health

    if not torch.cuda.is_available():
        return None
    results = [check_gpu_health(device) for device in context.devices]
    errors = "; ".join(result["error"] for result in results if result["error"])
    named = ", ".join(f"cuda:{device}" for device in context.devices)
    return Finding(
        errors or f"{named} computed correctly",
        is_failed=bool(errors),
        remedy="Have the GPU tested (`nvidia-smi -q`, `dcgmi diag -r 2`).",
    )
