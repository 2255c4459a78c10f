"""How large forge is: at a commit, and in the working tree.

    python tests/support/size.py COMMIT

Prints a Markdown table: lines of `forge/`, of each folder and of the tests (their proofs too, blank
lines and comments included), what forge consists of, what shows how closely its parts are coupled,
and what a start, a step, a save and a SIGTERM of a small training call inside forge. It runs forge,
of both, in processes of their own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
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
    command = ["git", "archive", commit, "forge", "hydra_plugins", "tests"]
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
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    command += ["forge", "hydra_plugins", "tests"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    paths = [ROOT / name for name in names if name.endswith(".py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path.exists()}


def num_lines(files: dict[str, str], folder: str) -> int:
    """Lines of all files below a folder."""
    return sum(text.count("\n") for name, text in files.items() if name.startswith(f"{folder}/"))


THREADS = ("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread")
PRONOUNS = {
    *("one", "ones", "found", "own", "known", "now", "place", "places", "kept", "told", "said"),
    *("asked", "given", "gone", "here", "there", "taken", "made", "held", "put", "left", "theirs"),
    *("ours", "whose", "what", "which", "before", "after", "again", "far"),
}
"""Words of style.md that are no names."""
ELSEWHERE = (
    *("forge/process/processes", "forge/process/memory", "forge/process/stacks"),
    *("forge/health/gpu_", "forge/jobdir/code", "forge/rehearse/", "forge/integrations/"),
)
"""Modules whose paths are those of the system, of source files, or of a rehearsal."""
PROFILED = """
import json, os, signal, sys, time
import torch, forge

FOLDER = os.path.dirname(forge.__file__) + os.sep
found, calls = {}, []

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
        calls.append(frame.f_code)

def begin():
    calls.clear()
    sys.setprofile(note)

def end(name):
    sys.setprofile(None)
    files = [code.co_filename for code in calls]
    changes = sum(a != b for a, b in zip(files, files[1:]))
    found[name] = [len(calls), len(set(calls)), len(set(files)), changes]

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begin()
try:
    with forge.Run({"checkpoint": {"dir": "ck"}}, model=model, optimizer=optimizer) as run:
        end("entering a Run")
        for step in run.steps(20):
            if step in (11, 13):
                end({11: "a step", 13: "a save"}[step])
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            if step == 12:
                run.save()
            if step == 14:
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.is_stopping:
                    time.sleep(0.01)
            if step in (10, 12, 14):
                begin()
            run.update(loss, optimizer)
except SystemExit:
    end("a SIGTERM")
print(json.dumps(found))
"""
"""A small training; the steps 0 to 9 have warmed up what is done once."""


def by_folder(files: dict[str, str]) -> dict[str, int]:
    """Folder of forge, or module directly in it -> lines of its Python files."""
    found: Counter[str] = Counter()
    for name, text in files.items():
        top, _, rest = name.partition("/")
        first, is_folder, _ = rest.partition("/")
        if top == "hydra_plugins":
            first, is_folder = top, "/"
        if top in ("forge", "hydra_plugins"):
            found[f"{first}/" if is_folder else first] += text.count("\n")
    return dict(sorted(found.items()))


def num_of(trees: dict[str, ast.Module], *kinds: type[ast.AST]) -> int:
    """Nodes of these kinds in all modules, nested ones too."""
    return sum(isinstance(node, kinds) for tree in trees.values() for node in ast.walk(tree))


def num_commands(source: str) -> int:
    """Commands of `forge`, from the source of `cli/commands.py`."""
    calls = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    return sum(ast.unparse(one.func) == "CliCommand" for one in calls)


def threads(module: ast.Module) -> list[str]:
    """The name of every thread, timer or executor that a module starts."""
    found = []
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in THREADS:
            given = [w.value for w in node.keywords if w.arg in ("name", "thread_name_prefix")]
            parts = [part for one in [*given, *node.args] for part in ast.walk(one)]
            texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            found.append(next((text for text in texts if isinstance(text, str)), name))
    return found


def kinds_of_file(trees: dict[str, ast.Module]) -> set[str]:
    """Names that a path gets by `/`, without what changes in them."""
    named = {name: _constants(tree) for name, tree in trees.items()}
    common: dict[str, set[str]] = {}
    for constants in named.values():
        for key, text in constants.items():
            common.setdefault(key, set()).add(text)
    found = set()
    for name, tree in trees.items():
        for node in ast.walk(tree) if not name.startswith(ELSEWHERE) else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                found |= {text.strip("*") for text in _texts(node.right, named[name], common)}
    return {one for one in found if any(map(str.isalpha, one))}


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module gives a name."""
    return {
        ast.unparse(one.targets[0]): one.value.value
        for one in tree.body
        if isinstance(one, ast.Assign)
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
    }


def _texts(node: ast.expr, own: dict[str, str], common: dict[str, set[str]]) -> set[str]:
    """What an expression can be, with `*` for what is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node).rpartition(".")[2]
        return {own[name]} if name in own else common.get(name, {"*"})
    if not isinstance(node, ast.JoinedStr):
        return {"*"}
    made = {""}
    for part in node.values:
        value = part.value if isinstance(part, ast.FormattedValue) else part
        made = {a + b for a in made for b in _texts(value, own, common)}
    return made


def num_pronouns(trees: dict[str, ast.Module]) -> int:
    """Variables, parameters, attributes and functions that have one of these words as a name."""
    names = []
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
    return sum(name.lstrip("_") in PRONOUNS for name in names)


def profiled(files: dict[str, str]) -> dict[str, int]:
    """Calls, functions, files and changes of file inside forge, of parts of a small training."""
    with tempfile.TemporaryDirectory() as folder:
        _write(files, folder)
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        printed = subprocess.check_output(
            [sys.executable, "-c", PROFILED], cwd=folder, env=env, stderr=subprocess.DEVNULL
        )
    found = json.loads(printed.splitlines()[-1])
    kinds = ("calls", "functions", "files", "changes of file")
    return {
        f"{name}: {kind}": number
        for name, numbers in found.items()
        for kind, number in zip(kinds, numbers, strict=True)
    }


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


def _write(files: dict[str, str], folder: str) -> None:
    """Write the files of `forge/` into a folder, to import them from there."""
    for name, text in files.items():
        if name.startswith("forge/"):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def num_loaded(files: dict[str, str]) -> tuple[int, int]:
    """Modules of forge, and their lines, that a process has loaded after `forge.Run`."""
    code = (
        "import sys, forge; forge.Run; found = [getattr(one, '__file__', None) for name, one in"
        " sys.modules.items() if name.partition('.')[0] == 'forge']; print(*filter(None, found))"
    )
    with tempfile.TemporaryDirectory() as folder:
        _write(files, folder)
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
    raises, handlers = num_of(own, ast.Raise), num_of(own, ast.ExceptHandler)
    return {
        "lines of forge/": num_lines(files, "forge"),
        **{f"lines of {name}": count for name, count in by_folder(files).items()},
        "lines of tests/": num_lines(files, "tests"),
        "modules": sum(not name.endswith("__init__.py") for name in own),
        "functions": num_of(own, ast.FunctionDef, ast.AsyncFunctionDef),
        "classes": num_of(own, ast.ClassDef),
        "keys of a policy": num_keys(files[SCHEMA]),
        "commands": num_commands(files["forge/cli/commands.py"]),
        "kinds of thread": len({(n, one) for n, tree in own.items() for one in threads(tree)}),
        "kinds of file": len(kinds_of_file(own)),
        "`except` for 100 `raise`": round(100 * handlers / raises),
        "pronoun names": num_pronouns(own),
        "names of forge": num_exported(files["forge/__init__.py"]),
        "names of forge.resilience": num_exported(files["forge/resilience/__init__.py"]),
        "modules that forge.Run loads": modules,
        "their lines": lines,
        "constructors with more than 6 parameters": num_large_constructors(own),
        "attributes assigned through another object": num_outside(own),
        "class names in several modules": num_repeated(own),
        "private names of forge that tests use": num_private(files),
        **profiled(files),
    }


def table(commit: str) -> str:
    """Before and after, as Markdown."""
    before, now = sizes(of_commit(commit)), sizes(of_working_tree())
    lines = [f"| | {commit} | now | difference |", "| --- | ---: | ---: | ---: |"]
    for what in dict.fromkeys([*before, *now]):
        was, is_now = before.get(what, 0), now.get(what, 0)
        lines.append(f"| {what} | {was:,} | {is_now:,} | {is_now - was:+,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="what to compare the working tree with")
    print(table(parser.parse_args().commit))
