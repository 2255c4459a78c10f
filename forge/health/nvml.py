"""Asking the NVIDIA driver about a GPU.

NVML is the driver's own library. Asking it opens no CUDA context and takes no memory of a GPU. Its
binding, nvidia-ml-py, is imported only where a task has GPUs and something is to be asked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from forge.errors import GpuGone

_NO_DRIVER = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
_NO_ANSWER = (
    "NVML_ERROR_NOT_SUPPORTED",  # by this GPU: without ECC, a consumer's, an instance of MIG
    "NVML_ERROR_INVALID_ARGUMENT",  # a handle or a field that this question is not for
    "NVML_ERROR_FUNCTION_NOT_FOUND",  # by this driver, which is older
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU that a task computes on, or on a part of."""

    nvml: Any
    """The module pynvml, initialised."""
    handle: Any
    """None: it no longer answers, not even who it is."""
    name: str
    """As people find it: CUDA's number in this task, the UUID, the address on the PCI bus."""
    is_split: bool = False
    """Whether the task has only a part of it (MIG)."""

    def ask(self, question: str, *args: Any) -> Any:
        """Ask one thing of the GPU.

        Args:
            question: A function of pynvml, without `nvmlDeviceGet`.
            args: What it takes after the handle.
        Returns:
            The answer; None where this GPU, or its driver, has none.
        Raises:
            GpuGone: Where the GPU no longer answers.
            pynvml.NVMLError: For any other error, as "Unknown Error".
        """
        if self.handle is None:
            raise GpuGone("its UUID is not known")
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{question}")(self.handle, *args)
        except self.nvml.NVMLError as error:
            if is_one_of(self.nvml, error, _NO_ANSWER):
                return None
            if is_one_of(self.nvml, error, _GONE):
                raise GpuGone(str(error)) from error
            raise


def is_one_of(nvml: Any, error: Any, names: tuple[str, ...]) -> bool:
    """Whether NVML's error has one of these names, of pynvml's constants."""
    return any(error.value == getattr(nvml, name) for name in names)


@functools.cache
def driver() -> Any:
    """The module pynvml, initialised; None where there is no driver.

    It is never shut down: the first question to a driver that nobody else uses can take seconds.

    Raises:
        pynvml.NVMLError: Where the driver is there, and cannot be asked.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if is_one_of(pynvml, error, _NO_DRIVER):
            return None
        raise
    return pynvml
