"""NumPy's scalars and arrays as a description for JSON and their bytes, and back.

NumPy is used only where the program has imported it already, or a checkpoint holds its values.
"""

from __future__ import annotations

import math
import sys
from typing import Any

_KINDS = "biufcmMSUV"
"""Kinds of dtype that are plain bytes: numbers, times, texts of a fixed length, structures."""


def describe(value: Any) -> tuple[str, list[Any], bytes] | None:
    """(tag, description, content) of a scalar or an array; None for what is not exact."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        dtype = _describe_dtype(value.dtype)
        # `numpy.record` and the like are scalars with more to them than their dtype.
        is_plain = type(value) is value.dtype.type
        return ("!numpy_scalar", [dtype], value.tobytes()) if is_plain and dtype else None
    if type(value) is numpy.ndarray and value.dtype.itemsize:
        dtype = _describe_dtype(value.dtype)
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        order = ["F"] if by_columns else []
        content = value.tobytes("F" if by_columns else "C")
        return ("!ndarray", [dtype, list(value.shape), *order], content) if dtype else None
    return None


def _describe_dtype(dtype: Any) -> Any:
    """A string, or for structures a list of fields; None where that would lose something."""
    described = _fields(dtype)
    try:
        again = _dtype_of(described)
    except (TypeError, ValueError):
        return None
    is_same = again == dtype and again.type is dtype.type and not dtype.hasobject
    return described if is_same and dtype.kind in _KINDS else None


def _fields(dtype: Any) -> Any:
    if dtype.names is None:
        return dtype.str
    fields = [(name, dtype.fields[name][0]) for name in dtype.names]
    return [[name, _fields(field.base), list(field.shape)] for name, field in fields]


def _dtype_of(described: Any) -> Any:
    import numpy

    if isinstance(described, str):
        return numpy.dtype(described)
    return numpy.dtype([(name, _dtype_of(of), tuple(shape)) for name, of, shape in described])


def scalar(description: list[Any], content: bytes) -> Any:
    """The scalar that was described."""
    import numpy

    (described,) = description
    dtype = _dtype_of(described)
    if not dtype.itemsize:
        return dtype.type()  # an empty text
    return numpy.frombuffer(content, dtype=dtype).copy()[0]


def array(description: list[Any], content: bytes) -> Any:
    """The array that was described."""
    import numpy

    described, shape, *order = description
    dtype = _dtype_of(described)
    count = math.prod(shape)
    if count * dtype.itemsize != len(content):
        raise ValueError(f"{count} values of {dtype} in {len(content)} bytes")
    flat = numpy.frombuffer(content, dtype=dtype) if count else numpy.empty(0, dtype=dtype)
    return flat.reshape(shape, order="F" if order == ["F"] else "C").copy("K")
