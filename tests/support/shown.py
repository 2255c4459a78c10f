"""Whether a line that the docs show as output is still one that forge, or a script there, prints.

Two words that follow each other in the line have to do so in a string of the code, or end one
string and begin another. Values are left out: numbers, paths, what stands in backquotes, names with
dots, dashes, underscores or several capitals.
"""

from __future__ import annotations

import ast
import errno
import itertools
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import readme
from repository import ROOT, files

_VALUE = re.compile(
    r"`[^`]*`|\S*[/=\\(\[{*<|]\S*|\S*\d\S*|\b\S+[._-]\S+\b|\+\S*|\b[A-Z]\w*[A-Z]\w*\b"
)
_WORD = re.compile(r"[A-Za-z]+")
_TREE = ("├", "└", "│")


def _phrases(text: str) -> Iterator[list[str]]:
    """Words between which nothing stands but a blank or a comma."""
    for phrase in re.split(r"[^A-Za-z ,'-]|  +", _VALUE.sub(" \0 ", text)):
        yield [word.lower() for word in _WORD.findall(phrase)]


class _Words(NamedTuple):
    """Of all strings of forge, of the examples, and of the scripts in the docs."""

    single: set[str]
    pairs: set[tuple[str, str]]
    first: set[str]
    last: set[str]


@cache
def _known() -> _Words:
    names = [name for name in files() if name.startswith(("forge/", "examples/", "docs/"))]
    sources = [(ROOT / name).read_text() for name in names if name.endswith(".py")]
    pages = [ROOT / name for name in names if name.endswith(".md")]
    sources += [block for page in pages for block in readme.blocks("python", page)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [
        node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs
    ]
    known = _Words(set(), set(), set(), set())
    for text in [os.strerror(errno.ENOSPC), *(one for one in constants if isinstance(one, str))]:
        for phrase in filter(None, _phrases(re.sub(r"%\w|\{[^}]*\}", "\0", text))):
            known.single.update(phrase)
            known.pairs.update(itertools.pairwise(phrase))
            known.first.add(phrase[0])
            known.last.add(phrase[-1])
    return known


def unknown_in(line: str) -> list[str]:
    """The words of an output line that no string of the code has in this order."""
    if line.lstrip().startswith(_TREE) or line.startswith("#SBATCH "):
        return []
    line = re.sub(r"^\[[^]]*\]\[(forge|HYDRA)\](\[[A-Z]+\] -)?|^forge: ", "", line)
    line = re.sub(r"^(job \d+: started ).*", r"\1", line)  # its overrides
    if re.match(r"\s+(cd \S+ && )?(env )?(python|forge|sbatch|scontrol) ", line):
        return []  # a command: its words are the user's
    known, unknown = _known(), []
    for phrase in _phrases(line):
        unknown += [word for word in phrase if word not in known.single]
        for one, two in itertools.pairwise(phrase):
            if (one, two) not in known.pairs and not (one in known.last and two in known.first):
                unknown.append(f"{one} {two}")
    return unknown
