"""Checkpoints on the terminal: what `forge show` and `forge diff` print, in at most 100 columns."""

from __future__ import annotations

import time
from collections.abc import Iterator

from forge.checkpoint import Checkpoint
from forge.checkpoint.format.leaves import differences, leaves
from forge.messages import escape

WIDTH = 100
_PATH, _KIND = 50, 35


def describe(checkpoint: Checkpoint) -> Iterator[str]:
    """A checkpoint's facts, its leaves, and how many bytes they are."""
    about = checkpoint.manifest
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.created))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about.versions.items()))
    yield _cut(str(checkpoint.path), WIDTH)
    ended = "training had ended" if about.is_complete else "training resumes from here"
    yield f"step {about.step}, saved {saved} by attempt {about.attempt}; {ended}"
    yield f"{versions}; {'job ' + about.job[:12] if about.job else 'no job'}"
    for name, entry in sorted(about.files.items()):
        yield f"  {name:<{_PATH}} {_size(entry['size']):>46}"
    yield ""
    found = list(leaves(checkpoint.state))
    for leaf in found:
        size = _size(leaf.num_bytes) if leaf.num_bytes else ""
        shown = f"{_cut(leaf.path, _PATH):<{_PATH}} {_cut_end(leaf.kind):<{_KIND}} {size:>13}"
        yield shown.rstrip()
    yield ""
    yield f"{len(found)} leaves"


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Each leaf in which they differ; nothing where they are the same."""
    for path, difference in differences(a.state, b.state):
        said = _cut_end(difference, WIDTH - 20)
        yield f"{_cut(path, WIDTH - 2 - len(said))}: {said}"


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def _cut(text: str, width: int) -> str:
    """The end of a path says most."""
    text = escape(text)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _cut_end(text: str, width: int = _KIND) -> str:
    text = escape(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"
