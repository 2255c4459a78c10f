"""NVML without a GPU: pynvml, whose functions answer from a file.

A file maps each question to its answer: `"TotalEccErrors 0 1 0": 0`, where the first word after the
name is the GPU's place. `{"error": 3}` is an NVMLError. `record_nvml.py` writes such a file on a
machine with a GPU; those called `made_up_…` were written by NVML's documentation.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

FOLDER = Path(__file__).parent / "nvml"
NUMBER = {
    name.removeprefix("NVML_ERROR_").lower(): number
    for name, number in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}
"""NVML's errors by name."""


def key(function: str, *args: Any) -> str:
    """The key of a question in a file."""
    return " ".join([function.removeprefix("nvmlDeviceGet"), *map(str, args)])


def recorded(name: str) -> dict[str, Any]:
    """The answers of a file, without its name's `.json`."""
    return json.loads((FOLDER / f"{name}.json").read_text())["answers"]


class FakeNvml:
    """Takes pynvml's place; a question that was never recorded is an error of the test."""

    def __init__(self, answers: dict[str, Any]):
        self.answers = answers
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet"):
            return functools.partial(self._answer, name)
        return getattr(pynvml, name)

    def _answer(self, function: str, *args: Any) -> Any:
        question = key(function, *args)
        self.asked.append(question)
        return decoded(self.answers[question])


def decoded(answer: Any) -> Any:
    """An answer as pynvml gives it."""
    if isinstance(answer, dict) and "error" in answer:
        raise pynvml.NVMLError(answer["error"])
    if isinstance(answer, dict):
        return SimpleNamespace(**{name: decoded(value) for name, value in answer.items()})
    return list(map(decoded, answer)) if isinstance(answer, list) else answer
