"""Checkpoints on the terminal: the output of `forge show` and `forge diff`, in 80 columns.

The most important facts come first: step, time, size, whether the files are intact, how to resume.
Paths are never cut, so that they can be copied; only lines with a path can be wider.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from forge import messages
from forge.checkpoint.format.leaves import Leaf, differences, leaves
from forge.checkpoint.reading import Checkpoint
from forge.jobdir.job_files import forge_dir, step_dirs
from forge.messages import escape, truncate_list

WIDTH = 80
_TITLE, _PATH, _KIND = 12, 40, 25
_SIZE = WIDTH - _PATH - _KIND - 2
_CHECKED = {
    "full": "intact: all checksums match",
    "size": "sizes match (`--verify size` does not check the checksums)",
    "none": "not checked (--verify none)",
}
_OBJECTS = "live.states."
"""Before the name of an object that was given to `forge.Run`."""
_OTHERS = "random states, position, metrics, …"
_PARENTS = 3
"""Directories above a checkpoint in which `.forge` can be: checkpoint.dir, and a name in it."""


def describe(
    checkpoint: Checkpoint, verify: str = "full", *, is_verbose: bool = False
) -> Iterator[str]:
    """A checkpoint's facts, the most important first; then its content.

    Args:
        checkpoint: The checkpoint.
        verify: The verification with which it was loaded.
        is_verbose: Show its files, and each tensor and value, instead of a line for each object.
    """
    about = checkpoint.manifest
    num_bytes = sum(int(entry["size"]) for entry in about.files.values())
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about.versions.items()))
    yield f"{'checkpoint':{_TITLE}}{_near(checkpoint.path)}"
    yield from _fact("step", str(about.step))
    yield from _fact("saved", f"{_when(about.created)}, by attempt {about.attempt}")
    yield from _fact("size", f"{messages.size(num_bytes)} in {len(about.files)} files")
    yield from _fact("state", _CHECKED[verify])
    yield from _resume(checkpoint)
    if about.metrics:
        values = (f"{name}={_number(value)}" for name, value in sorted(about.metrics.items()))
        yield from _fact("last logged", truncate_list(values, 4))
    yield from _fact("versions", versions)
    yield from _fact("job", about.job[:12] or "none")
    yield ""
    if not is_verbose:
        yield from _objects(leaves(checkpoint.state))
        return
    for name, entry in sorted(about.files.items()):
        yield f"{_cut(name, _PATH):<{_PATH}} {messages.size(entry['size']):>{_KIND + 1 + _SIZE}}"
    yield ""
    found = list(leaves(checkpoint.state))
    for leaf in found:
        size = messages.size(leaf.num_bytes) if leaf.num_bytes else ""
        kind = _cut_end(leaf.kind, _KIND)
        yield f"{_cut(leaf.path, _PATH):<{_PATH}} {kind:<{_KIND}} {size:>{_SIZE}}".rstrip()
    yield ""
    yield f"{len(found)} tensors and values"


def damaged(path: Path, error: str) -> Iterator[str]:
    """The error of a checkpoint that cannot be used, and the effect on a resume."""
    yield f"{'checkpoint':{_TITLE}}{_near(path)}"
    yield from _fact("state", "DAMAGED: no job can resume from this checkpoint")
    for line in error.splitlines():
        yield from _fact("", line)
    yield from _fact(
        "resume",
        "A job resumes from the newest intact checkpoint of its directory: `forge show` with the"
        " path of the directory shows that checkpoint.",
    )


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Each leaf in which two checkpoints differ; nothing if they are the same."""
    for path, difference in differences(a.state, b.state):
        shown = _cut_end(difference, WIDTH - 16)
        yield f"{_cut(path, WIDTH - 2 - len(shown))}: {shown}"


def _objects(found: Iterable[Leaf]) -> Iterator[str]:
    """A line for each object given to `forge.Run`, and one for all that forge itself saves."""
    groups: dict[str, list[Leaf]] = {}
    rest: list[Leaf] = []
    for leaf in found:
        name = leaf.path.removeprefix(_OBJECTS)
        is_object = name != leaf.path
        (groups.setdefault(re.split(r"[.\[]", name)[0], []) if is_object else rest).append(leaf)
    others = {_OTHERS: rest} if rest else {}
    for name, own in (groups | others).items():
        num_tensors = sum(1 for leaf in own if leaf.num_bytes)
        counts = f"{num_tensors} tensors, {len(own) - num_tensors} values"
        size = messages.size(sum(leaf.num_bytes for leaf in own))
        yield f"{_cut(name, _PATH):<{_PATH}} {counts:<{_KIND}} {size:>{_SIZE}}"
    yield ""
    yield "forge show -v lists the files, and each tensor and value."


def _resume(checkpoint: Checkpoint) -> Iterator[str]:
    directory = checkpoint.path.parent
    if checkpoint.manifest.is_complete:
        yield from _fact("resume", "nothing to resume: training has finished")
        return
    newest = next(iter(step_dirs(directory)), checkpoint.path)
    if newest.name != checkpoint.path.name:
        yield from _fact(
            "resume",
            f"The job resumes from {newest.name}, its newest checkpoint, not from"
            f" {checkpoint.path.name}. To go back to {checkpoint.path.name}, move the newer ones"
            " away.",
        )
        return
    for parent in list(checkpoint.path.parents)[:_PARENTS]:
        script = forge_dir(parent) / "resume.sh"
        if script.exists():
            yield f"{'resume':{_TITLE}}{escape(shlex.quote(_near(script)))}"
            return
    yield from _fact(
        "resume", "start the same command again; the job continues from this checkpoint"
    )


def _fact(title: str, text: str) -> Iterator[str]:
    """A line, or several, with the title in front of the first."""
    lines = textwrap.wrap(escape(text), WIDTH - _TITLE, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        yield f"{'' if number else title:{_TITLE}}{line}".rstrip()


def _near(path: Path) -> str:
    """The path from the current directory, if that is shorter."""
    return escape(min(os.path.relpath(path), str(path), key=len))


def _when(created: float) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    passed_s = time.time() - created
    for unit, seconds in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        number = int(passed_s // seconds)
        if number > 0:
            return f"{saved} ({number} {unit if number == 1 else f'{unit}s'} ago)"
    return saved


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _cut(text: str, width: int) -> str:
    """Cut the begin of a text: the end of a path is the most specific part."""
    text = escape(text)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _cut_end(text: str, width: int) -> str:
    text = escape(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"
