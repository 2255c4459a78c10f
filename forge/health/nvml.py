"""Queries of the NVIDIA driver about a GPU.

NVML is the driver's own library. A query does not open a CUDA context and uses no GPU memory. Its
Python binding, nvidia-ml-py, is imported only for a query, in a task that has GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from forge.errors import GpuGone

_NO_DRIVER = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
_NO_ANSWER = (
    "NVML_ERROR_NOT_SUPPORTED",  # by this GPU: no ECC, a consumer GPU, a MIG instance
    "NVML_ERROR_INVALID_ARGUMENT",  # a handle or a field that the query does not accept
    "NVML_ERROR_FUNCTION_NOT_FOUND",  # in this driver, which is older
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU of the task; with MIG, the GPU that contains the task's instance."""

    nvml: Any
    """The module pynvml, initialised."""
    handle: Any
    """None: the GPU no longer answers, not even with its UUID."""
    name: str
    """For people: CUDA's number in this task, the UUID, the PCI bus address."""
    is_split: bool = False
    """Whether the task has only a part of it (MIG)."""

    def ask(self, question: str, *args: Any) -> Any:
        """Run a query on the GPU.

        Args:
            question: A function of pynvml, without `nvmlDeviceGet`.
            args: The arguments after the handle.
        Returns:
            The answer; None if this GPU or its driver does not support the query.
        Raises:
            GpuGone: If the GPU no longer answers.
            pynvml.NVMLError: For any other error, such as "Unknown Error".
        """
        if self.handle is None:
            raise GpuGone("its UUID cannot be read")
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{question}")(self.handle, *args)
        except self.nvml.NVMLError as error:
            if is_one_of(self.nvml, error, _NO_ANSWER):
                return None
            if is_one_of(self.nvml, error, _GONE):
                raise GpuGone(str(error)) from error
            raise


def is_one_of(nvml: Any, error: Any, names: tuple[str, ...]) -> bool:
    """Whether an NVML error is one of these constants of pynvml."""
    return any(error.value == getattr(nvml, name) for name in names)


@functools.cache
def driver() -> Any:
    """The module pynvml, initialised; None if there is no driver.

    NVML is never shut down: the first query to an otherwise unused driver can take seconds.

    Raises:
        pynvml.NVMLError: If there is a driver, but a query fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if is_one_of(pynvml, error, _NO_DRIVER):
            return None
        raise
    return pynvml
