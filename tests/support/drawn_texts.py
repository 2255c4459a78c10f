"""Texts of forge that a user sees, drawn by a seed: 40 messages and 15 docstrings.

    python tests/support/drawn_texts.py SEED [--places]

Give them to a reader who knows PyTorch and Slurm, but not forge, and ask what each means. A message
can be a part of a sentence; the values that are put in are shown as expressions in braces.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
from collections.abc import Iterator

from repository import ROOT, modules

import forge

_WORDS = 6
"""A message has at least so many words: a shorter string is a name, a key or a format."""


def messages() -> Iterator[tuple[str, str]]:
    """(place, text) of each string in forge that is no docstring."""
    for name, path in sorted(modules().items()):
        if not name.startswith("forge"):
            continue
        tree = ast.parse(path.read_text())
        skipped = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        for one in ast.walk(tree):
            if isinstance(one, ast.JoinedStr):
                skipped |= {id(part) for part in one.values}
        for one in ast.walk(tree):
            text = "" if id(one) in skipped else _text(one)
            if len(text.split()) >= _WORDS:
                yield f"{path.relative_to(ROOT)}:{getattr(one, 'lineno', 0)}", text


def _text(one: ast.AST) -> str:
    if isinstance(one, ast.JoinedStr):
        return "".join(_text(part) or f"{{{ast.unparse(part)}}}" for part in one.values)
    if isinstance(one, ast.FormattedValue):
        return f"{{{ast.unparse(one.value)}}}"
    return one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""


def docstrings() -> Iterator[tuple[str, str]]:
    """(name, docstring) of each public name of forge, and of the public members of its classes."""
    for name in forge.__all__:
        found = getattr(forge, name)
        members = vars(found) if inspect.isclass(found) else {}
        shown = {name: found} if callable(found) else {}
        shown |= {f"{name}.{key}": one for key, one in members.items() if not key.startswith("_")}
        for key, one in shown.items():
            if callable(one) or isinstance(one, property):
                yield key, inspect.getdoc(one) or ""


def main() -> None:
    """Print the drawn texts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--places", action="store_true", help="print where each text is")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    drawn = {"M": rng.sample(list(messages()), 40), "D": rng.sample(list(docstrings()), 15)}
    for letter, texts in drawn.items():
        for number, (place, text) in enumerate(texts, 1):
            shown = place if letter == "D" or options.places else ""
            print(f"{letter}{number} {shown}".rstrip(), text, "", sep="\n")


if __name__ == "__main__":
    main()
