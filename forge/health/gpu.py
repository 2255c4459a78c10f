"""Checks of a task's own GPUs by what their driver says of them; none opens a CUDA context.

A GPU or a driver that has no answer to a question has nothing to fail: a consumer's GPU counts no
memory errors, an older driver knows no recovery action. A GPU that answers nothing any more fails
every check. Thresholds and their sources: docs/reference/gpu-checks.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from forge.errors import GpuGone
from forge.health.check import Context, Finding
from forge.health.nvml import Gpu
from forge.health.own_gpus import own_gpus

_RESET = "Have it reset, or the node rebooted; where it does not help, have it replaced."

_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "the end of all peer-to-peer traffic of the GPU, and a reset then",
    4: "the end of all work on the GPU, and a reset then",
}
"""NVML_GPU_RECOVERY_ACTION_…: what the usual ones ask for."""


def of_each(
    look: Callable[[Gpu, Context], Finding | None],
) -> Callable[[Context], Finding | None]:
    """The check of all of a task's own GPUs that this one of a single GPU makes.

    It finds the failures, each with its GPU's name; where there are none, what all have; nothing
    where no GPU has an answer. An error that says nothing of a GPU is raised where no other fails.
    """

    @functools.wraps(look)
    def check(context: Context) -> Finding | None:
        found, errors = dict[str, Finding](), []
        for gpu in own_gpus(context.devices):
            try:
                one = look(gpu, context)
            except GpuGone as gone:
                text = f"does not answer its driver any more ({gone})"
                one = Finding(text, is_failed=True, remedy=_RESET)
            except gpu.nvml.NVMLError as error:
                errors.append(error)
                continue
            if one is not None:
                found[gpu.name] = one
        failed = {name: one for name, one in found.items() if one.is_failed}
        if failed:
            return Finding(
                "; ".join(f"{name}: {one.value}" for name, one in failed.items()),
                is_failed=True,
                remedy=" ".join(dict.fromkeys(one.remedy for one in failed.values())),
            )
        if errors:
            raise errors[0]
        values = dict.fromkeys(one.value for one in found.values())
        return Finding("; ".join(values)) if values else None

    return check


@of_each
def ecc(gpu: Gpu, context: Context) -> Finding | None:
    """Whether bits of its memory were lost since its driver was loaded."""
    kind, since = gpu.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, gpu.nvml.NVML_VOLATILE_ECC
    count = gpu.ask("TotalEccErrors", kind, since)
    if count is None:
        return None
    return Finding(
        f"uncorrected memory errors since the driver was loaded: {count}",
        is_failed=context.is_above(count),
        remedy="What was computed on it may be wrong. Have the GPU reset, then tested.",
    )


@of_each
def row_remap(gpu: Gpu, context: Context) -> Finding | None:
    """Whether rows of its memory are worn out, and no others have taken their place."""
    rows = gpu.ask("RemappedRows")
    if rows is None:
        return None
    corrected, uncorrected, is_pending, has_failed = rows
    if has_failed:
        remedy = "No spare row is left there: have the GPU replaced."
        return Finding("a row could not be remapped", is_failed=True, remedy=remedy)
    if is_pending:
        remedy = "Have the GPU reset, or the node rebooted: the row is remapped then."
        return Finding("a row waits to be remapped", is_failed=True, remedy=remedy)
    return Finding(f"remapped rows: {corrected + uncorrected}, none waits")


@of_each
def recovery_action(gpu: Gpu, context: Context) -> Finding | None:
    """Whether the driver wants the GPU reset, the node rebooted or the like; driver 570 and on."""
    values = gpu.ask("FieldValues", [gpu.nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if not values or values[0].nvmlReturn != gpu.nvml.NVML_SUCCESS:
        return None
    action = values[0].value.uiVal
    if action == gpu.nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return Finding("none asked for")
    wanted = _RECOVERY.get(action, f"recovery action {action}")
    remedy = "Do so before anything else runs on it; the kernel's log has the XID that led to it."
    return Finding(f"its driver asks for {wanted}", is_failed=True, remedy=remedy)
