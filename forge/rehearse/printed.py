"""The numbers that a script prints, compared between an uninterrupted and an interrupted run.

Lines are sorted by their template: their text with a mark for each number. Lines with the same step
or epoch are the same line, and if a resume repeats it, the last one counts. Without such a number
only the last line of a template counts.
Compared are the numbers that two uninterrupted runs print alike, except dates, times of day, and
numbers with a unit of time or memory. Lines that each attempt prints as often as an uninterrupted
run belong to the start of the script (`training from step 0`), and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forge.rehearse.comparing import are_near
from forge.rehearse.rehearsal import RehearsedRun

Template = tuple[str, ...]
Free = Mapping[Template, set[int]]
"""For each template that two uninterrupted runs share, the places of numbers that differ."""

_SEPARATORS = re.compile(r"""([^\s,;:=()\[\]{}|/<>"'`]+)""")
_CLOCK = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?([.,]\d+)?)?|\b\d{1,2}:\d\d(:\d\d([.,]\d+)?)?\b"
)
_UNITS = {
    *("s", "sec", "secs", "second", "seconds", "ms", "us", "min", "mins", "minutes", "h", "hours"),
    *("kB", "MB", "GB", "KiB", "MiB", "GiB", "MHz", "GHz"),
}
_NOT_COMPARED = "~"


class PrintedLine(NamedTuple):
    """A line that has numbers."""

    text: str
    numbers: list[str]


def lines_by_template(text: str) -> dict[Template, list[PrintedLine]]:
    """All lines with numbers, in their order, without those of forge and of progress bars."""
    found: dict[Template, list[PrintedLine]] = {}
    for line in text.split("\n"):
        if "\r" in line or line.startswith("forge: "):
            continue
        words = _SEPARATORS.split(_CLOCK.sub(_NOT_COMPARED, line))
        numbers = []
        for place in range(1, len(words), 2):
            number = words[place].rstrip(".%")
            if not _is_number(number):
                continue
            has_unit = words[place + 1].isspace() and words[place + 2 : place + 3] != []
            if has_unit and words[place + 2] in _UNITS:
                words[place] = _NOT_COMPARED
            else:
                words[place] = words[place].replace(number, "#", 1)
                numbers.append(number)
        if numbers:
            found.setdefault(tuple(words), []).append(PrintedLine(line.strip(), numbers))
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def numbers_to_compare(first: RehearsedRun, second: RehearsedRun, tolerance: float) -> Free:
    """The places of numbers that are not compared, from two uninterrupted runs."""
    ours, theirs = (lines_by_template("\n".join(run.printed())) for run in (first, second))
    return {
        template: {
            place
            for one, other in zip(lines, theirs[template], strict=True)
            for place in _differing(one, other, set(), tolerance)
        }
        for template, lines in ours.items()
        if len(theirs.get(template, ())) == len(lines)
    }


def differing_prints(
    first: RehearsedRun, run: RehearsedRun, free: Free, tolerance: float
) -> Iterator[str]:
    """Each line of an interrupted run that has other numbers, with the one expected."""
    expected = lines_by_template("\n".join(first.printed()))
    attempts = [lines_by_template(text) for text in run.printed()]
    for template, places in free.items():
        lines = expected[template]
        blocks = [one.get(template, []) for one in attempts]
        if len(blocks) > 1 and all(len(block) == len(lines) for block in blocks):
            continue
        key = _key(lines)
        wanted = {_at(line, key): line for line in lines}
        last = {_at(line, key): line for block in blocks for line in block}
        for at, line in wanted.items():
            if at in last and _differing(line, last[at], places, tolerance):
                yield f"printed: {last[at].text}; uninterrupted: {line.text}"


def _key(lines: list[PrintedLine]) -> list[int]:
    """The places of the numbers that tell lines apart, such as an epoch and a step.

    Empty if no whole numbers do: then only the last line counts.
    """
    whole = [
        place
        for place in range(len(lines[0].numbers))
        if all(line.numbers[place].isdigit() for line in lines)
    ]
    for size in range(1, len(whole) + 1):
        if len(lines) > 1 and len({_at(line, whole[:size]) for line in lines}) == len(lines):
            return whole[:size]
    return []


def _at(line: PrintedLine, key: list[int]) -> tuple[str, ...]:
    return tuple(line.numbers[place] for place in key)


def _differing(a: PrintedLine, b: PrintedLine, free: set[int], tolerance: float) -> list[int]:
    pairs = enumerate(zip(a.numbers, b.numbers, strict=True))
    return [
        place
        for place, (x, y) in pairs
        if place not in free and x != y and not are_near(float(x), float(y), tolerance)
    ]
