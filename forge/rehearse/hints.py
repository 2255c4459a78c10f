"""Explains why an interrupted run differs, by the variables that differ right after a resume.

The script runs again uninterrupted and again interrupted, and records its variables at step
boundaries (`forge.training.loop.trace_recorder`). A variable that differs at the boundary at which
a process resumed was not saved. A variable that differs before the first signal is a clock, or the
like.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.messages import truncate_list
from forge.rehearse.plan import Strike
from forge.rehearse.rehearsal import Rehearsal

_MOST = 6
"""Variables that are named at most."""
_ADVICE = {
    "buffer": "make {} a persistent buffer of its module (register_buffer)",
    "generator": "keep the state of {} in run.state",
    "iterator": "give the loader of {} to run.steps, or wrap it in forge.data.resumable",
    "stateful": "pass {} to forge.Run",
    "value": "keep {} in run.state",
}
"""The remedy for a variable, by its kind."""
_OF_FORGE = ("positions", "loaders", "epochs", "due", "planned")
"""Leaves with the position of forge itself: other values can mean the same position."""

Key = tuple[Any, ...]


@dataclass
class TracedBoundary:
    """The variables of a process at a step boundary."""

    pid: int
    key: Key
    """Identifies the boundary within the run."""
    leaves: dict[str, str]
    batch: str | None
    variables: dict[tuple[str, str, str], tuple[str, str, str]]
    """(file, function, path) → (fingerprint, value as text, kind)."""

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.key[-1])


def read(file: Path) -> list[TracedBoundary]:
    """The boundaries of a trace, in order."""
    found = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # the process was killed as it wrote
            continue
        variables = {tuple(one[:3]): tuple(one[3:]) for one in line["variables"]}
        key = tuple(line["place"])
        found.append(TracedBoundary(line["pid"], key, line["leaves"], line["batch"], variables))
    return found


def examine(
    rehearsal: Rehearsal, planned: list[Strike], resumed_at: list[int], free: set[str]
) -> list[str]:
    """Find the state that was not saved, by tracing an interrupted and an uninterrupted run.

    Args:
        rehearsal: Runs the script.
        planned: The signals of the run that differs.
        resumed_at: The steps at which that run resumed.
        free: Leaves that differ between uninterrupted runs.
    """
    steps = sorted({step + n for step in resumed_at for n in range(3)})
    uninterrupted = read(rehearsal.trace("examined uninterrupted", [], steps))
    interrupted = read(rehearsal.trace("examined interrupted", planned, steps))
    return explained(uninterrupted, interrupted, free)


def explained(
    uninterrupted: list[TracedBoundary], interrupted: list[TracedBoundary], free: set[str]
) -> list[str]:
    """The first resume after which values differ, and these values."""
    usual = {one.key: one for one in uninterrupted}
    processes = list(dict.fromkeys(one.pid for one in interrupted))
    measured: set[Any] = set()
    for one in interrupted:
        if one.pid == processes[0] and one.key in usual:
            measured |= set(_other(usual[one.key].variables, one.variables))
    for pid in processes[1:]:
        pairs = [
            (usual[one.key], one) for one in interrupted if one.pid == pid and one.key in usual
        ]
        if pairs:
            found = _at_resume(pairs, usual, free, measured)
            if found:
                return found
    return []


def remarks(uninterrupted: Path, interrupted: list[Path]) -> list[str]:
    """The variables that differ after a resume, although all results are the same.

    Args:
        uninterrupted: The trace of a run without signals.
        interrupted: The traces of runs whose stops were recorded, too.
    """
    usual = {one.key: one for one in read(uninterrupted)}
    pairs: list[tuple[TracedBoundary, TracedBoundary]] = []
    measured: set[Any] = set()
    for file in interrupted:
        seen: dict[Key, TracedBoundary] = {}
        for one in read(file):
            if one.key in seen and seen[one.key].pid != one.pid:
                pairs.append((seen[one.key], one))
            elif one.key in usual:
                measured |= set(_other(usual[one.key].variables, one.variables))
            seen[one.key] = one
    found = [(_unsaved(*pair, measured), *pair) for pair in pairs]
    names, before, after = max(found, key=lambda one: len(one[0]), default=([], None, None))
    if not (names and before and after):
        return []
    return [
        f"Not saved, so different after the resume at step {after.step}, but no result that was"
        " compared depends on it:",
        *_variables(names, before, after),
    ]


def _unsaved(before: TracedBoundary, after: TracedBoundary, measured: set[Any]) -> list[Any]:
    """The variables that differ, without those that are part of another one."""
    names = [one for one in _other(before.variables, after.variables) if one not in measured]
    return [one for one in names if not _is_inside(one, names)]


def _at_resume(
    pairs: list[tuple[TracedBoundary, TracedBoundary]],
    usual: dict[Key, TracedBoundary],
    free: set[str],
    measured: set[Any],
) -> list[str]:
    (before, after), step = pairs[0], pairs[0][0].step
    names = _unsaved(before, after, measured)
    found = list(_variables(names, before, after))
    if found:
        found.insert(0, f"not saved, so different after the resume at step {step}:")
    put_back = _leaves(before, after, free)
    if put_back and not names:
        found.append(
            f"saved, but another value right after the resume at step {step} (does load_state_dict"
            f" restore it?): {truncate_list(put_back, 3)}"
        )
    for a, b in pairs[1:]:
        is_batch_other = b.batch is not None and a.batch != b.batch
        leaves = _leaves(a, b, free)
        if is_batch_other:
            found.append(_of_batch(a.step - 1, b.batch, usual))
        drawn = [one for one in leaves if one.startswith("rng.")]
        if drawn and not (is_batch_other or names):
            kinds = ", ".join(sorted({one.split(".")[1].partition("[")[0] for one in drawn}))
            found.append(
                f"step {a.step - 1} drew other random numbers ({kinds}): perhaps an iterator was"
                " created again, or a module is in another mode (train, eval)"
            )
        if leaves or is_batch_other:
            if not drawn and not is_batch_other and not names:
                found.append(
                    f"batch and random states are the same; different: {truncate_list(leaves, 3)}"
                )
            break
    return found


def _leaves(before: TracedBoundary, after: TracedBoundary, free: set[str]) -> list[str]:
    """Leaves that differ, without those that only follow from others."""
    found = (one for one in _other(before.leaves, after.leaves) if one not in free)
    return [one for one in found if not one.startswith(_OF_FORGE)]


def _variables(names: list[Any], before: TracedBoundary, after: TracedBoundary) -> Iterator[str]:
    kinds: dict[str, list[str]] = {}
    for file, function, path in names[:_MOST]:
        (_, was, kind), (_, now, _) = (
            one.variables[file, function, path] for one in (before, after)
        )
        place = min(os.path.relpath(file), file, key=len)
        values = f"{now}, but {was} without interruption" if was != now else was
        kinds.setdefault(kind, []).append(f"`{path}`")
        yield f"  {place}: `{path}`: {values}"
    if len(names) > _MOST:
        yield f"  and {len(names) - _MOST} more"
    told = [_ADVICE[kind].format(", ".join(paths)) for kind, paths in kinds.items()]
    if told:
        yield f"  → {'; '.join(told)}"


def _of_batch(step: int, batch: str | None, usual: dict[Key, TracedBoundary]) -> str:
    earlier = [one.step - 1 for one in usual.values() if one.batch == batch and one.step <= step]
    if earlier:
        return f"step {step} got the batch of step {earlier[0]}: the loader began again"
    return (
        f"step {step} got another batch: the loader, sampler or dataset depends on state that is"
        " not saved"
    )


def _other(a: dict[Any, Any], b: dict[Any, Any]) -> list[Any]:
    """Keys of both mappings, with different fingerprints."""
    return [key for key in a if key in b and _print(a[key]) != _print(b[key])]


def _print(value: Any) -> Any:
    return value if isinstance(value, str) else value[0]


def _is_inside(one: Any, names: list[Any]) -> bool:
    """Whether a variable is part of another one in `names`."""
    file, function, path = one
    return any((file, function) == other[:2] and path.startswith(f"{other[2]}.") for other in names)
