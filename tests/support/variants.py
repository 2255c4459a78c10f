"""The variants of a training script, from one source: `python tests/support/variants.py [FOLDER]`.

Each source `tests/scripts/<style>.txt` is a script with a margin of four columns, as a diff has it:

    p   only the plain loop, without forge            <style>/plain.py, if the source has such lines
     w  only the conversion in a hurry                <style>/written.py
      f only the conversion that loses nothing        <style>/fixed.py

Several letters: several variants; none: all. The plain loop has no `with forge.Run`: what the
source has in that block is one level further out.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = {"p": "plain", "w": "written", "f": "fixed"}
MARGIN, LEVEL = 4, 4


def variants(source: str) -> dict[str, str]:
    """Name of a variant -> its text."""
    lines = [(line[:MARGIN], line[MARGIN:]) for line in source.splitlines()]
    letters = {letter for margin, _ in lines for letter in margin.strip()} | {"w", "f"}
    return {name: _variant(lines, letter) for letter, name in NAMES.items() if letter in letters}


def _variant(lines: list[tuple[str, str]], letter: str) -> str:
    made: list[str] = []
    run: int | None = None  # indentation of the `with forge.Run` that the plain loop lacks
    for margin, text in lines:
        indentation = len(text) - len(text.lstrip())
        if run is not None and text.strip() and indentation <= run:
            run = None
        if not margin.strip() or letter in margin:
            made.append(text if run is None else text[LEVEL:])
        elif letter == "p" and text.lstrip().startswith("with forge.Run"):
            run = indentation
    return "".join(f"{line}\n" for line in made)


def write_all(folder: Path) -> None:
    """Every variant, as `<folder>/<style>/<name>.py`."""
    for source in sorted(SCRIPTS.glob("*.txt")):
        for name, text in variants(source.read_text()).items():
            path = folder / source.stem / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if sys.argv[1:] else SCRIPTS.parents[1] / "build" / "scripts")
