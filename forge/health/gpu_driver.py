"""Faults that the driver reports for a task's GPUs: memory errors, worn rows, recovery actions.

A query that the GPU or driver does not support never fails the check: consumer GPUs do not count
memory errors, and older drivers do not report recovery actions.
"""

from __future__ import annotations

from collections.abc import Callable

from forge.errors import GpuGone
from forge.health.check import Context, Finding
from forge.health.nvml import Gpu
from forge.health.own_gpus import own_gpus

_MAX_UNCORRECTED = 0
"""Memory errors since the driver was loaded. Source: Meta's gcm (`ecc_uncorrected`)."""
_RESET = "Have it reset, or the node rebooted; if that does not help, have it replaced."
_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "a reset of the GPU, once all its peer-to-peer traffic has stopped",
    4: "a reset of the GPU, once all work on it has stopped",
}
"""The usual values of NVML_GPU_RECOVERY_ACTION_…."""


def gpu_driver(context: Context) -> Finding | None:
    """Whether the driver reports a fault of a GPU; does not open a CUDA context."""
    return of_each(context, _uncorrected_errors, _remapped_rows, _recovery_action)


def of_each(context: Context, *questions: Callable[[Gpu], Finding | None]) -> Finding | None:
    """Run all queries on each of the task's GPUs.

    Returns the failures, each with the name of its GPU; without failures, the values of all GPUs;
    None if no GPU supports a query. A GPU that no longer answers has failed. Any other NVML error
    is raised if nothing has failed.
    """
    failed, passed, errors = list[tuple[str, Finding]](), list[Finding](), []
    for gpu in own_gpus(context.devices):
        for question in questions:
            try:
                finding = question(gpu)
            except GpuGone as gone:
                text = f"no longer answers its driver ({gone})"
                failed.append((gpu.name, Finding(text, is_failed=True, remedy=_RESET)))
                break
            except gpu.nvml.NVMLError as error:
                errors.append(error)
                continue
            if finding is not None and finding.is_failed:
                failed.append((gpu.name, finding))
            elif finding is not None:
                passed.append(finding)
    if failed:
        return Finding(
            "; ".join(f"{name}: {finding.value}" for name, finding in failed),
            is_failed=True,
            remedy=" ".join(dict.fromkeys(finding.remedy for _, finding in failed)),
        )
    if errors:
        raise errors[0]
    values = dict.fromkeys(finding.value for finding in passed)
    return Finding("; ".join(values)) if values else None


def _uncorrected_errors(gpu: Gpu) -> Finding | None:
    """Whether the GPU lost bits of its memory since the driver was loaded."""
    kind, since = gpu.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, gpu.nvml.NVML_VOLATILE_ECC
    count = gpu.ask("TotalEccErrors", kind, since)
    if count is None:
        return None
    return Finding(
        f"uncorrected memory errors since the driver was loaded: {count}",
        is_failed=count > _MAX_UNCORRECTED,
        remedy="Results of this GPU can be wrong. Have it reset, then tested.",
    )


def _remapped_rows(gpu: Gpu) -> Finding | None:
    """Whether worn rows of its memory are not replaced. Source: Azure (`azure_gpu_ecc`)."""
    rows = gpu.ask("RemappedRows")
    if rows is None:
        return None
    corrected, uncorrected, is_pending, has_failed = rows
    if has_failed:
        remedy = "Its memory has no spare row left: have the GPU replaced."
        return Finding("a memory row could not be remapped", is_failed=True, remedy=remedy)
    if is_pending:
        remedy = "Have the GPU reset, or the node rebooted: this remaps the row."
        return Finding("a memory row waits to be remapped", is_failed=True, remedy=remedy)
    return Finding(f"remapped memory rows: {corrected + uncorrected}, none pending")


def _recovery_action(gpu: Gpu) -> Finding | None:
    """Whether the driver requests a recovery action, such as a reset; from driver 570 on.

    Source: NVIDIA's resiliency extension (`shared_utils/health_check.py`).
    """
    values = gpu.ask("FieldValues", [gpu.nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if not values or values[0].nvmlReturn != gpu.nvml.NVML_SUCCESS:
        return None
    action = values[0].value.uiVal
    if action == gpu.nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return Finding("no recovery action")
    wanted = _RECOVERY.get(action, f"recovery action {action}")
    remedy = (
        "Do this before anything else runs on the GPU; the kernel log has the XID of the cause."
    )
    return Finding(f"its driver asks for {wanted}", is_failed=True, remedy=remedy)
