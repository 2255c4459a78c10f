"""Rows of a test with several parameters: a few for `make test`, all of them for `make proofs`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def few(num_rows: int, rows: Sequence[Any]) -> list[Any]:
    """The rows of a test; `make test` runs the first ones.

    Args:
        num_rows: How many.
        rows: The values of one parameter, or a tuple for each row of several.
    """
    values = [row if isinstance(row, tuple) else (row,) for row in rows]
    marks = [() if n < num_rows else pytest.mark.proofs for n in range(len(rows))]
    return [pytest.param(*row, marks=mark) for row, mark in zip(values, marks, strict=True)]


def each_value(*axes: Sequence[Any], num_rows: int = 0) -> list[Any]:
    """All combinations; `make test` runs a few of them, in which each value occurs.

    Args:
        axes: The values of each parameter, in the order of the test's parameters.
        num_rows: How many rows `make test` runs; by default as many as the longest axis has.
    """
    num_rows = num_rows or max(map(len, axes))
    assert num_rows >= max(map(len, axes)), "a value would have no row"
    diagonal = {tuple(n % len(axis) for axis in axes) for n in range(num_rows)}
    return [
        pytest.param(
            *(axis[n] for axis, n in zip(axes, place, strict=True)),
            marks=() if place in diagonal else pytest.mark.proofs,
        )
        for place in itertools.product(*(range(len(axis)) for axis in axes))
    ]
