"""NumPy scalars and arrays to a JSON description and bytes, and back.

NumPy is imported only if the program has imported it already or a checkpoint has NumPy values.
"""

from __future__ import annotations

import math
import sys
from typing import Any

_KINDS = "biufcmMSU"
"""Kinds of dtype that are plain bytes: numbers, times, strings of fixed length."""


def describe(value: Any) -> tuple[str, list[Any], bytes] | None:
    """(tag, description, content) of a scalar or an array; None if it cannot be saved exactly."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    dtype = value.dtype
    if dtype.kind not in _KINDS:
        return None
    if type(value) is dtype.type:
        return "!numpy_scalar", [dtype.str], value.tobytes()
    if type(value) is numpy.ndarray and dtype.itemsize:
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        notes = ["F"] * by_columns + ["read-only"] * (not value.flags.writeable)
        content = value.tobytes("F" if by_columns else "C")
        return "!ndarray", [dtype.str, list(value.shape), *notes], content
    return None


def scalar(description: list[Any], content: bytes) -> Any:
    """The scalar that was described."""
    import numpy

    (described,) = description
    dtype = numpy.dtype(described)
    if not dtype.itemsize:
        return dtype.type()  # an empty string
    return numpy.frombuffer(content, dtype=dtype).copy()[0]


def array(description: list[Any], content: bytes) -> Any:
    """The array that was described."""
    import numpy

    described, shape, *notes = description
    dtype = numpy.dtype(described)
    count = math.prod(shape)
    if count * dtype.itemsize != len(content):
        raise ValueError(f"expected {count} values of {dtype}, found {len(content)} bytes")
    flat = numpy.frombuffer(content, dtype=dtype) if count else numpy.empty(0, dtype=dtype)
    made = flat.reshape(shape, order="F" if "F" in notes else "C").copy("K")
    made.flags.writeable = "read-only" not in notes
    return made
