"""The output of `--json`: the fields of the dataclasses by name, and the schema's version."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from forge.sweeps.job import SCHEMA


def plain(value: Any) -> Any:
    """A value of dataclasses, enums and paths as JSON has it; NaN and infinities are texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """A JSON object with `schema`, the version of its fields, first."""
    return json.dumps({"schema": SCHEMA, **plain(value)}, indent=1, ensure_ascii=False)
