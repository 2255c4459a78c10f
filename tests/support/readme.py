"""What tests take from README.md and docs/, so that it cannot drift; run, it renews the diff."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"
BEGIN, END = "<!-- diff -->", "<!-- /diff -->"


def blocks(language: str, page: Path = README) -> list[str]:
    """The fenced code blocks of a language, those in a list without its indentation."""
    form = rf"^( *)```{re.escape(language)}\n(.*?)^ *```$"
    found = re.findall(form, page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{margin}", "", block, flags=re.MULTILINE) for margin, block in found]


@dataclass
class App:
    """The ten-line app of the tutorial."""

    script: str
    config: str

    @staticmethod
    def from_tutorial() -> App:
        """Its script and its config, each the first block of its language."""
        return App(blocks("python", TUTORIAL)[0], blocks("yaml", TUTORIAL)[0])

    def write_to(self, folder: Path) -> None:
        """Into a folder that is empty, or not there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(self.script)
        (folder / "train.yaml").write_text(self.config)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of a page, without its own head."""
    return rows((DOCS / page).read_text().partition(f"\n{heading}\n")[2])


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its own head."""
    found = re.search(r"^(\|.*\|\n)+", text, re.MULTILINE)
    assert found, "there is no table"
    lines = found[0].strip().splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines[2:]]


def diff() -> str:
    """From the plain example to the one that survives; lines that only moved in are the same."""
    names = ["examples/train_plain.py", "examples/train.py"]
    plain, ours = [(ROOT / name).read_text().splitlines() for name in names]
    stripped = [[line.strip() for line in lines] for lines in (plain, ours)]
    shown = [f"--- {names[0]}", f"+++ {names[1]}"]
    is_in_main = False
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *stripped, False).get_opcodes():
        if kind == "equal":
            for line in ours[j1:j2]:
                is_in_main |= line.startswith("def main")
                shown += [f"  {line}"] if is_in_main and line else []
        elif is_in_main or "import forge" in ours[j1:j2]:
            shown += [f"- {line}" for line in plain[i1:i2] if line]
            shown += [f"+ {line}" for line in ours[j1:j2] if line]
    end = shown.index('  if __name__ == "__main__":')
    return "\n".join(shown[:end]) + "\n"


def written_diff() -> str:
    """The one that stands in README.md."""
    return README.read_text().partition(f"{BEGIN}\n```diff\n")[2].partition(f"```\n{END}")[0]


def main() -> None:
    """Write the diff into README.md."""
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n```diff\n{diff()}```\n{END}{after}")


if __name__ == "__main__":
    main()
