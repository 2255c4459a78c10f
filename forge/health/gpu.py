"""Checks of a task's own GPUs by what their driver says of them; none opens a CUDA context.

A GPU or a driver that has no answer to a question has nothing to fail: a consumer's GPU counts no
memory errors, an older driver knows no recovery action. A GPU that answers nothing any more fails
every check. Thresholds and their sources: docs/reference/gpu-checks.md.
"""

from __future__ import annotations

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
    5: "the recovery of its IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the whole system",
}
"""NVML_GPU_RECOVERY_ACTION_…: what each asks for."""

_SLOWED = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat, by the driver",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat, by the hardware",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Reasons that a healthy GPU does not have; those for idling, the power limit and what somebody
has set (application clocks, boost in step) are left out."""


def each(context: Context, look: Callable[[Gpu], Finding | None]) -> Finding | None:
    """Look at each of the task's own GPUs.

    Args:
        context: With the task's devices.
        look: Says what one GPU has, in a few words; None where it has no answer.
    Returns:
        The failures, each with its GPU's name; where there are none, what all have; None where no
        GPU has an answer.
    Raises:
        pynvml.NVMLError: Where nothing has failed, and one could not be asked.
    """
    found, errors = [], []
    try:
        gpus = own_gpus(context.devices)
    except GpuGone as gone:
        return Finding(f"{gone}", is_failed=True, remedy=_RESET)
    for gpu in gpus:
        try:
            found.append((gpu, look(gpu)))
        except GpuGone as gone:
            text = f"does not answer its driver any more ({gone})"
            found.append((gpu, Finding(text, is_failed=True, remedy=_RESET)))
        except gpu.nvml.NVMLError as error:
            errors.append(error)  # another one may have failed for all that
    failed = [(gpu, one) for gpu, one in found if one and one.is_failed]
    if failed:
        return Finding(
            "; ".join(f"{gpu.name}: {one.value}" for gpu, one in failed),
            is_failed=True,
            remedy=" ".join(dict.fromkeys(one.remedy for _, one in failed)),
        )
    if errors:
        raise errors[0]
    values = dict.fromkeys(one.value for _, one in found if one)
    return Finding("; ".join(values)) if values else None


def is_above(value: float, context: Context) -> bool:
    """Whether it is more than the policy allows, where that sets a limit."""
    limit = context.config.threshold
    return limit is not None and value > limit


def ecc(context: Context) -> Finding | None:
    """Whether bits of its memory were lost since its driver was loaded."""

    def look(gpu: Gpu) -> Finding | None:
        kind, since = gpu.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, gpu.nvml.NVML_VOLATILE_ECC
        count = gpu.ask("TotalEccErrors", kind, since)
        if count is None:
            return None
        return Finding(
            f"uncorrected memory errors since the driver was loaded: {count}",
            is_failed=is_above(count, context),
            remedy="What was computed on it may be wrong. Have the GPU reset, then tested.",
        )

    return each(context, look)


def row_remap(context: Context) -> Finding | None:
    """Whether rows of its memory are worn out, and no others have taken their place."""

    def look(gpu: Gpu) -> Finding | None:
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

    return each(context, look)


def retired_pages(context: Context) -> Finding | None:
    """Whether many pages of its memory were given up; GPUs before those with row remapping."""

    def look(gpu: Gpu) -> Finding | None:
        single = gpu.nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
        double = gpu.nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        pages = [gpu.ask("RetiredPages", cause) for cause in (single, double)]
        if None in pages:
            return None
        count = sum(map(len, pages))
        if gpu.ask("RetiredPagesPendingStatus"):
            remedy = "Have the node rebooted: the page is retired then."
            return Finding("a page waits to be retired", is_failed=True, remedy=remedy)
        return Finding(
            f"retired pages: {count}",
            is_failed=is_above(count, context),
            remedy="Its memory wears out: have the GPU tested, and replaced.",
        )

    return each(context, look)


def recovery_action(context: Context) -> Finding | None:
    """Whether the driver wants the GPU reset, the node rebooted or the like; driver 570 and on."""

    def look(gpu: Gpu) -> Finding | None:
        action = gpu.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
        if action is None:
            return None
        if action == gpu.nvml.NVML_GPU_RECOVERY_ACTION_NONE:
            return Finding("none asked for")
        wanted = _RECOVERY.get(action, f"recovery action {action}")
        remedy = (
            "Do so before anything else runs on it; the kernel's log has the XID that led to it."
        )
        return Finding(f"its driver asks for {wanted}", is_failed=True, remedy=remedy)

    return each(context, look)


def throttle(context: Context) -> Finding | None:
    """Whether it slows down for heat, a weak power supply or its hardware."""

    def look(gpu: Gpu) -> Finding | None:
        reasons = gpu.ask("CurrentClocksEventReasons")
        if reasons is None:  # by a driver before 535
            reasons = gpu.ask("CurrentClocksThrottleReasons")
        if reasons is None:
            return None
        found = [text for name, text in _SLOWED.items() if reasons & getattr(gpu.nvml, name)]
        return Finding(
            f"slowed down: {', '.join(found)} ({reasons:#x})" if found else "not slowed down",
            is_failed=bool(found),
            remedy="Have its cooling and its power looked at.",
        )

    return each(context, look)


def temperature(context: Context) -> Finding | None:
    """How hot it is."""

    def look(gpu: Gpu) -> Finding | None:
        celsius = gpu.ask("TemperatureV", gpu.nvml.NVML_TEMPERATURE_GPU)
        if celsius is None:  # by a driver before 570
            celsius = gpu.ask("Temperature", gpu.nvml.NVML_TEMPERATURE_GPU)
        if celsius is None:
            return None
        return Finding(
            f"{celsius} °C",
            is_failed=is_above(celsius, context),
            remedy="Have its cooling looked at.",
        )

    return each(context, look)


def clocks(context: Context) -> Finding | None:
    """How fast it computes, where it does."""

    def look(gpu: Gpu) -> Finding | None:
        mhz = gpu.ask("ClockInfo", gpu.nvml.NVML_CLOCK_SM) if gpu.is_at_work else None
        if mhz is None:
            return None
        return Finding(
            f"{mhz} MHz at work",
            is_failed=mhz < context.threshold,
            remedy="`nvidia-smi -q -d CLOCK,PERFORMANCE` says why; somebody may have set a limit.",
        )

    return each(context, look)


def pcie(context: Context) -> Finding | None:
    """Whether its link to the host has all its lanes, and while it works its full speed."""

    def look(gpu: Gpu) -> Finding | None:
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

    return each(context, look)
