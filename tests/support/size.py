"""How large forge is: at a commit, and in the working tree.

    python tests/support/size.py COMMIT

Prints a Markdown table: lines of `forge/` and of the tests (their proofs too, blank lines and
comments included), keys of a policy (a mapping is one), names that `forge` and `forge.resilience`
export, and what shows how closely the parts of forge are coupled. It imports forge, of both, in
processes of their own, and only to see which modules `forge.Run` loads.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from private_parts import DOCUMENTED

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


def parsed(files: dict[str, str], folder: str) -> dict[str, ast.Module]:
    """The syntax tree of each file below a folder."""
    return {n: ast.parse(text) for n, text in files.items() if n.startswith(f"{folder}/")}


def num_loaded(files: dict[str, str]) -> tuple[int, int]:
    """Modules of forge, and their lines, that a process has loaded after `forge.Run`."""
    code = (
        "import sys, forge; forge.Run; found = [getattr(one, '__file__', None) for name, one in"
        " sys.modules.items() if name.partition('.')[0] == 'forge']; print(*filter(None, found))"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if name.startswith("forge/"):
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        env = os.environ | {"PYTHONPATH": folder}
        loaded = subprocess.check_output([sys.executable, "-c", code], cwd=folder, env=env)
        names = [str(Path(one).relative_to(folder)) for one in loaded.decode().split()]
    return len(names), sum(files[name].count("\n") for name in names)


def num_large_constructors(trees: dict[str, ast.Module]) -> int:
    """Constructors with more than six parameters besides `self`."""
    functions = [one for tree in trees.values() for one in ast.walk(tree)]
    inits = [f for f in functions if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    return sum(len([*f.args.args, *f.args.kwonlyargs]) > 7 for f in inits)


def num_outside(trees: dict[str, ast.Module]) -> int:
    """Places that assign an attribute of an object that another object holds: `self.a.b = …`."""
    targets = [
        target
        for tree in trees.values()
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign)
        for target in one.targets
    ]
    return sum(isinstance(one, ast.Attribute) and _is_held(one.value) for one in targets)


def _is_held(one: ast.expr) -> bool:
    return isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"


def num_repeated(trees: dict[str, ast.Module]) -> int:
    """Names of public classes that several modules define."""
    names = [one.name for tree in trees.values() for one in tree.body if _is_public(one)]
    return sum(count > 1 for count in Counter(names).values())


def _is_public(one: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(one, ast.ClassDef) and not one.name.startswith("_")


def num_private(files: dict[str, str]) -> int:
    """Private names of forge that tests use, each once a file."""
    ours = {
        name for tree in parsed(files, "forge").values() for name in _defined(tree)
    } - DOCUMENTED
    return sum(
        len(
            {
                one.attr
                for one in ast.walk(tree)
                if isinstance(one, ast.Attribute)
                and one.attr in ours
                and ast.unparse(one.value) not in ("self", "cls")
            }
        )
        for tree in parsed(files, "tests").values()
    )


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names with one underscore that a module defines: functions, classes and variables."""
    for one in ast.walk(tree):
        name = ""
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = one.name
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            name = one.attr
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            name = one.id
        if name.startswith("_") and not name.startswith("__"):
            yield name


def sizes(files: dict[str, str]) -> dict[str, int]:
    """The name of each measure -> its value."""
    own = parsed(files, "forge")
    modules, lines = num_loaded(files)
    return {
        "lines of forge/": num_lines(files, "forge"),
        "lines of tests/": num_lines(files, "tests"),
        "keys of a policy": num_keys(files[SCHEMA]),
        "names of forge": num_exported(files["forge/__init__.py"]),
        "names of forge.resilience": num_exported(files["forge/resilience/__init__.py"]),
        "modules that forge.Run loads": modules,
        "their lines": lines,
        "constructors with more than 6 parameters": num_large_constructors(own),
        "attributes assigned through another object": num_outside(own),
        "class names in several modules": num_repeated(own),
        "private names of forge that tests use": num_private(files),
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
