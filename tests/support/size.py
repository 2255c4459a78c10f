"""How large forge is: at a commit, and in the working tree.

    python tests/support/size.py COMMIT

Prints a Markdown table: lines of `forge/` and of the tests (their proofs too, blank lines and
comments included), keys of a policy (a mapping is one), and names that `forge` and
`forge.resilience` export. It reads files, and imports nothing of either.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEMA = "forge/config/schema.py"


def of_commit(commit: str) -> dict[str, str]:
    """Path -> content of every Python file of a commit."""
    command = ["git", "archive", commit, "forge", "tests"]
    archive = subprocess.check_output(command, cwd=ROOT)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[member.name] = file.read().decode()
    return found


def of_working_tree() -> dict[str, str]:
    """The same of the files here that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "forge", "tests"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    paths = [ROOT / name for name in names if name.endswith(".py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path.exists()}


def num_lines(files: dict[str, str], folder: str) -> int:
    """Lines of all files below a folder."""
    return sum(text.count("\n") for name, text in files.items() if name.startswith(f"{folder}/"))


def num_keys(schema: str) -> int:
    """Keys of a policy: fields of its dataclasses, but for those that are groups of others."""
    classes = {one.name: one for one in ast.parse(schema).body if isinstance(one, ast.ClassDef)}

    def count(name: str) -> int:
        found = 0
        for one in classes[name].body:
            if isinstance(one, ast.AnnAssign):
                kind = ast.unparse(one.annotation)
                is_group = kind in classes and not classes[kind].bases
                found += count(kind) if is_group else 1
        return found

    return count("Policy")


def num_exported(package: str) -> int:
    """Names in the `__all__` of a package."""
    for one in ast.parse(package).body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__":
            assert isinstance(one.value, ast.List | ast.Tuple)
            return len(one.value.elts)
    raise LookupError("no `__all__`")


def sizes(files: dict[str, str]) -> dict[str, int]:
    """What is counted -> how much of it there is."""
    return {
        "lines of forge/": num_lines(files, "forge"),
        "lines of tests/": num_lines(files, "tests"),
        "keys of a policy": num_keys(files[SCHEMA]),
        "names of forge": num_exported(files["forge/__init__.py"]),
        "names of forge.resilience": num_exported(files["forge/resilience/__init__.py"]),
    }


def table(commit: str) -> str:
    """Before and after, as Markdown."""
    before, now = sizes(of_commit(commit)), sizes(of_working_tree())
    lines = [f"| | {commit} | now | difference |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {what} | {n:,} | {now[what]:,} | {now[what] - n:+,} |" for what, n in before.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="what to compare the working tree with")
    print(table(parser.parse_args().commit))
