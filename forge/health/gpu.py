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

_SLOWED = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat, by the driver",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat, by the hardware",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Reasons that a healthy GPU does not have; those for idling, the power limit and what somebody
has set (application clocks, boost in step) are left out."""


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
def retired_pages(gpu: Gpu, context: Context) -> Finding | None:
    """Whether many pages of its memory were given up; GPUs before those with row remapping."""
    single = gpu.nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
    double = gpu.nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
    pages = [gpu.ask("RetiredPages", cause) for cause in (single, double)]
    if None in pages:
        return None
    if gpu.ask("RetiredPagesPendingStatus"):
        remedy = "Have the node rebooted: the page is retired then."
        return Finding("a page waits to be retired", is_failed=True, remedy=remedy)
    count = sum(map(len, pages))
    return Finding(
        f"retired pages: {count}",
        is_failed=context.is_above(count),
        remedy="Its memory wears out: have the GPU tested, and replaced.",
    )


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


@of_each
def throttle(gpu: Gpu, context: Context) -> Finding | None:
    """Whether it slows down for heat, a weak power supply or its hardware; driver 535 and on."""
    reasons = gpu.ask("CurrentClocksEventReasons")
    if reasons is None:
        return None
    found = [text for name, text in _SLOWED.items() if reasons & getattr(gpu.nvml, name)]
    return Finding(
        f"slowed down: {', '.join(found)} ({reasons:#x})" if found else "not slowed down",
        is_failed=bool(found),
        remedy="Have its cooling and its power looked at.",
    )


@of_each
def temperature(gpu: Gpu, context: Context) -> Finding | None:
    """How hot it is."""
    # TemperatureV takes its place, and is only in drivers from 570 on.
    celsius = gpu.ask("Temperature", gpu.nvml.NVML_TEMPERATURE_GPU)
    if celsius is None:
        return None
    remedy = "Have its cooling looked at."
    return Finding(f"{celsius} °C", is_failed=context.is_above(celsius), remedy=remedy)


@of_each
def clocks(gpu: Gpu, context: Context) -> Finding | None:
    """How fast it computes, where it does."""
    mhz = gpu.ask("ClockInfo", gpu.nvml.NVML_CLOCK_SM) if gpu.is_at_work else None
    if mhz is None:
        return None
    return Finding(
        f"{mhz} MHz at work",
        is_failed=context.is_below(mhz),
        remedy="`nvidia-smi -q -d CLOCK,PERFORMANCE` says why; somebody may have set a limit.",
    )


@of_each
def pcie(gpu: Gpu, context: Context) -> Finding | None:
    """Whether its link to the host has all its lanes, and while it works its full speed."""
    width, max_width = gpu.ask("CurrPcieLinkWidth"), gpu.ask("MaxPcieLinkWidth")
    generation, full = gpu.ask("CurrPcieLinkGeneration"), gpu.ask("MaxPcieLinkGeneration")
    if None in (width, max_width, generation, full):
        return None
    is_slow = generation < full and gpu.is_at_work
    return Finding(
        f"PCIe generation {generation} of {full}, {width} of {max_width} lanes",
        is_failed=width < max_width or is_slow,
        remedy="Have the GPU seated anew, or its riser or board replaced.",
    )
