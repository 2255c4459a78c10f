"""What the reference says of exit codes and commands, read from the code itself.

The directive `{forge-reference} exit-codes` (or `cli`) puts it into a page. Each part
is a plain function that returns Markdown, so that tests can read it without building the site.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from forge import errors


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def exit_codes() -> str:
    """Every code that a forge process ends with, as a table."""
    rows = [[str(int(code)), f"`{code.name}`", code.__doc__ or ""] for code in errors.ExitCode]
    return _table(["exit code", "name", "meaning"], rows)


def cli() -> str:
    """What the command `forge` says of itself, and then each of its commands."""
    said = _help()
    names = re.findall(r"^  (\w+)  +\w", said, re.MULTILINE)
    shown = {"forge": said} | {f"forge {name}": _help(name) for name in names}
    return "\n".join(f"```text\n$ {name} --help\n{text}```\n" for name, text in shown.items())


def _help(*command: str) -> str:
    words = [sys.executable, "-m", "forge", *command, "--help"]
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout


PARTS = {"exit-codes": exit_codes, "cli": cli}


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    from sphinx.util.docutils import SphinxDirective

    class Reference(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[Any]:
            return self.parse_text_to_nodes(PARTS[self.arguments[0]]())

    app.add_directive("forge-reference", Reference)
    return {"parallel_read_safe": True}
