"""A message is for people: forge decides by types, enums and codes, not by its words."""

import ast
import builtins

import pytest
from repository import modules, tree

FOREIGN = {
    ("forge.slurm.client", "steps"): "squeue's words are all that tells a job that is gone",
}
"""Where text that others worded is looked at, and why nothing else tells."""
PROSE = {"text", "because", "args"}
"""Attributes, and keys of small files, that hold text for people."""
READERS = {"startswith", "endswith", "find", "index", "count", "match", "search", "fullmatch"}


def exceptions_of(tree: ast.AST) -> set[str]:
    """Names that an `except` binds."""
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    return {node.name for node in handlers if node.name}


def is_prose(node: ast.AST, caught: set[str]) -> bool:
    """Whether the value is text for people, or made of it."""
    if isinstance(node, ast.Attribute):
        return node.attr in PROSE or (node.attr != "value" and is_prose(node.value, caught))
    if isinstance(node, ast.Subscript):
        key = node.slice
        is_key = isinstance(key, ast.Constant) and key.value in PROSE
        return is_key or is_prose(node.value, caught)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("str", "repr", "format"):
            return any(isinstance(one, ast.Name) and one.id in caught for one in node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            return isinstance(node.args[0], ast.Constant) and node.args[0].value in PROSE
        return isinstance(node.func, ast.Attribute) and is_prose(node.func.value, caught)
    return False


def readers_of_prose(module: ast.Module) -> list[tuple[str, int]]:
    """(function, line) of each place that decides by what a message says."""
    found = []

    def visit(node: ast.AST, function: str, caught: set[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, caught = node.name, exceptions_of(node)
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare) and not all(
            isinstance(op, ast.Is | ast.IsNot) for op in node.ops
        ):
            sides = [node.left, *node.comparators]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in READERS:
            sides = [*ast.iter_child_nodes(node.func), *node.args]
        if isinstance(node, ast.Match):
            sides = [node.subject]
        if any(is_prose(side, caught) for side in sides):
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function, caught)

    visit(module, "", set())
    return found


@pytest.mark.parametrize(
    "line",
    [
        "if error.text == 'time limit': pass",
        "if 'gradient' in decision.because: pass",
        "if state['because'].startswith('not'): pass",
        "if state.get('because', '') != '': pass",
        "if re.search('disk', verdict.text): pass",
        "try: pass\n except OSError as error:\n  if 'full' in str(error).lower(): pass",
    ],
)
def test_the_check_finds_a_reader_of_prose(line):
    """A check that finds nothing would hold anything."""
    assert readers_of_prose(ast.parse(f"def f():\n {line}\n"))


def test_rewording_a_message_changes_nothing():
    """Whoever makes a sentence better must not have to know who reads it.

    An exception that is no longer needed would hide the next one, so all are used.
    """
    found = {
        (module, function): line
        for module, path in modules().items()
        for function, line in readers_of_prose(tree(path))
    }
    ours = {place: line for place, line in found.items() if place not in FOREIGN}
    assert not ours, "they decide by the words of a message: give it a field"
    assert found.keys() == FOREIGN.keys()


def exception_classes(module: ast.Module) -> list[str]:
    """Classes that derive from an exception, by the names of their bases."""
    known = {name for name, one in vars(builtins).items() if _is_exception(one)}
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & known or any(base.endswith(("Error", "Exception")) for base in bases):
                found.append(node.name)
    return found


def _is_exception(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, BaseException)


def test_every_exception_of_forge_stands_in_errors():
    """Whoever wants to know what can go wrong reads one file, with one exit code a class."""
    example = "class A(OSError): ...\nclass B(errors.JobError, X): ..."
    assert exception_classes(ast.parse(example)) == ["A", "B"]
    found = {
        (module, name)
        for module, path in modules().items()
        if module != "forge.errors"
        for name in exception_classes(tree(path))
    }
    # Hydra shows what derives from its own class without a traceback, and errors imports no Hydra.
    assert found == {("forge.launch.results", "_CompactJobError")}


def test_the_tree_at_the_top_of_errors_is_the_one_below_it():
    """A drawing that nobody checks is wrong after the next class."""
    from forge import errors

    drawn, parents = {}, []
    for line in errors.__doc__.splitlines():
        name = line.strip("│├└─ ").partition(" ")[0]
        if isinstance(getattr(errors, name, None), type):
            depth = line.index(name) // 4
            parents[depth:] = [name]
            drawn[name] = parents[depth - 1] if depth else None
    classes = {name: one for name, one in vars(errors).items() if _is_exception(one)}
    assert drawn.keys() == classes.keys()
    for name, parent in drawn.items():
        assert parent is None or classes[name].__bases__ == (classes[parent],), name
        if issubclass(classes[name], errors.ForgeError):
            assert classes[name].exit_code in errors.ExitCode
