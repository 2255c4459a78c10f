"""A lint for the words that people read: the worst habits, each with its reason.

    python tests/support/plain_words.py [PATH …]    # default: all that `make check` looks at

It reads Markdown without its code blocks, comments of YAML files, and in Python all docstrings and
string literals. It exits with 1 if a line is found; `--count` prints numbers only.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, files

HABITS = {
    r"(?:^|[.;] )(?:What|Who|Whoever) (?!if\b|to\b|for\b)[^.?!]*?(?:[.:]|$)": (
        "a clause as the subject or instead of a noun: name the thing"
    ),
    r"(?:^|\. )Of (?:several|two|what|those|all|each|the) ": "'of …' in front: begin with the noun",
    r"\bwhere (?:there|nobody|nothing|none|no|neither) ": "'where' for 'if'",
    r"\bmay (?:be|have|not|stop|come|take|save|read|write|hold|differ|need|end|run)\b": (
        "'may' for 'can': a reader looks for a permission"
    ),
    r"\b(?:stands|stand|lies|lie) (?:in|below|beside|at|there|between|above|on)\b": (
        "a small old verb: say 'is in', 'hangs in', 'is on disk'"
    ),
    r"\bbeside (?!the sweep)": "'beside' for 'in the background', 'next to' or 'during'",
    r"\bof late\b": "say 'recently'",
    r"\banew\b|\bonce more\b": "say 'again'",
    r"\b(?:goes|go|going|gone|went) on\b(?! with\b| the)": "say 'continues'",
    r"\bgo(?:es)? by\b": "say 'uses' or 'follows'",
    r"\bnobody\b(?! interrupted)": "name who does not: 'no process', 'no rank', 'forge does not'",
    r"\bis (?:looked|asked whether|told apart|said (?:so|when))\b": "a passive without an agent",
    r"(?:^|[.;] )(?:One|Those) (?:that|who|which|of)\b": "name the noun again instead of 'one'",
    r"\bcomes? to (?:its|their|an) end\b": "say 'finishes' or 'ends'",
    r"(?<!there )(?<!There )\bis no (?!longer\b)[a-z]+\b": (
        "say 'is not a …' ('there is no …' and 'no longer' are plain)"
    ),
}
"""Expression -> reason."""
_PATTERNS = [(re.compile(form), reason) for form, reason in HABITS.items()]
_KINDS = (".py", ".md", ".yaml")
_NOT_READ = ("docs/decisions/", "docs/_ext/", "tests/")
"""What users do not read: decisions record how something was decided."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each piece of text in a file that a person reads."""
    source = path.read_text()
    if path.suffix == ".md":
        plain = re.sub(
            r"^ *```.*?^ *```$|<!-- generated.*?<!-- /generated -->",
            lambda found: "\n" * found[0].count("\n"),
            source,
            flags=re.DOTALL | re.MULTILINE,
        )
        for block in re.finditer(r"(?:^(?! *$).*\n?)+", plain, re.MULTILINE):
            if not block[0].lstrip().startswith(("#", "|")):
                yield plain.count("\n", 0, block.start()) + 1, " ".join(block[0].split())
    elif path.suffix == ".yaml":
        for number, line in enumerate(source.splitlines(), 1):
            if "#" in line:
                yield number, line.partition("#")[2].strip()
    else:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for block in node.value.split("\n\n"):
                    yield node.lineno, " ".join(block.split())


def find(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, the words, the reason) of each habit in a file."""
    for line, text in texts(path):
        for pattern, reason in _PATTERNS:
            for found in pattern.finditer(text):
                yield line, found[0].strip()[:60], reason


def checked() -> list[Path]:
    """The files that `make check` looks at."""
    names = [name for name in files() if not name.startswith(_NOT_READ)]
    inside = ("forge/", "docs/", "conf/", "examples/", "hydra_plugins/")
    top = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md")
    return [ROOT / n for n in names if n in top or (n.startswith(inside) and n.endswith(_KINDS))]


def _files_in(path: Path) -> list[Path]:
    """A file, or the files of a folder that are read."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in _KINDS)


def main() -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--count", action="store_true", help="print the number for each reason")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    chosen = [file for path in options.paths for file in _files_in(path.resolve())]
    for path in chosen or checked():
        for line, words, reason in find(path):
            counts[reason] += 1
            if not options.count:
                print(
                    f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}:"
                    f" {words!r}: {reason}"
                )
    for reason, number in counts.most_common() if options.count else ():
        print(f"{number:5}  {reason}")
    print(f"{counts.total()} found")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
