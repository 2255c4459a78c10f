"""The import rules between the folders, and the cost and portability of `import forge`."""

import ast
import functools
import os
import py_compile
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
import size
from forked import completed
from repository import ROOT, imports, modules, pythons, run, tree
from rows import few

THIRD_PARTY = {*("torch", "hydra", "submitit", "omegaconf", "numpy", "cloudpickle", "rich")}
HEAVY = (*THIRD_PARTY, "yaml")


def _rows() -> list[list[str]]:
    """The cells of each row of the table, highest layer first."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("<!-- layers -->")[2].partition("<!-- /layers -->")[0]
    return [row.strip()[1:-1].split("|") for row in table.strip().splitlines()][2:]


@functools.cache
def layers() -> list[tuple[str, list[str], set[str]]]:
    """(description, modules, third-party packages) of each layer, highest first."""
    found = []
    for members, phrase, packages, _ in _rows():
        names = re.findall(r"`(?:([\w]+)/|(\w+)\.py)`", members)
        needs = set(re.findall(r"`(\w+)`", packages))
        found.append((phrase.strip(), [f"{f}.*" if f else m for f, m in names], needs))
    return found


def layer_of(module: str) -> int:
    short = module.removeprefix("forge.")
    for number, (_, members, _) in enumerate(layers()):
        for member in members:
            if short == member or (member.endswith(".*") and f"{short}.".startswith(member[:-1])):
                return number
    raise AssertionError(f"{module} is not in any layer of ARCHITECTURE.md")


def test_every_module_stands_in_a_layer_and_every_layer_has_modules():
    """The rule below cannot check a module that is in no layer."""
    used = {layer_of(module) for module in modules() if module != "forge"}
    assert used == set(range(len(layers())))


def test_the_table_says_of_each_layer_what_its_own_docstring_says():
    """The same sentence is in two places in which people look for it."""
    for phrase, (member,), _ in layers():
        name = member.removesuffix(".*")
        name = "hydra_plugins.forge_launcher" if name == "hydra_plugins" else f"forge.{name}"
        docstring = ast.get_docstring(tree(modules()[name])) or ""
        assert " ".join(docstring.partition("\n\n")[0].split()) in (phrase, f"{phrase}.")


def test_no_folder_has_more_lines_than_its_row_allows():
    """A deletion lowers the number; a move lowers one number by what it raises another."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    allowed = {row[0].strip().strip("`"): int(row[3]) for row in _rows()}
    allowed["__init__.py"] = int(re.search(r"exports the names, in (\d+) lines at most", text)[1])
    counts = size.by_folder({str(p.relative_to(ROOT)): p.read_text() for p in modules().values()})
    assert counts.keys() == allowed.keys()
    assert {name: lines for name, lines in counts.items() if lines > allowed[name]} == {}


def test_imports_point_down():
    """With imports in one direction, the training loop can never depend on the launcher."""
    for module, path in modules().items():
        for imported in imports(path):
            if module != "forge" and imported.startswith("forge."):
                assert layer_of(imported) >= layer_of(module), f"{module} imports {imported}"


def test_nothing_is_built_on_the_building_blocks():
    """`forge.resilience` only exports code that Run uses, too; a copy could diverge."""
    own = {name for name in modules() if f"{name}.".startswith("forge.resilience.")}
    users = {name for name, path in modules().items() if imports(path) & own}
    assert users <= {*own, "forge"}


def test_nothing_imports_the_package_itself():
    """`forge/__init__` is above all layers, and the layers have to work without it."""
    names = [name for name in modules() if name.startswith("forge.")]
    users = [name for name in names if "forge" in imports(modules()[name])]
    assert [name for name in users if not name.startswith("forge.integrations.")] == []


def test_integrations_use_the_public_api_alone():
    """Whatever a trainer needs of forge, the user's own trainer can have, too."""
    allowed = ("forge.integrations.", "forge.compat.", "forge.messages")
    for name in [name for name in modules() if name.startswith("forge.integrations.")]:
        used = {one for one in imports(modules()[name]) if one.startswith("forge.")}
        assert not {one for one in used if not one.startswith(allowed)}, name


def cycle_in(imported: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    """Imports inside of functions count: neither module could be read or tested by itself."""
    names = {name: imports(path) & set(modules()) - {"forge"} for name, path in modules().items()}
    assert cycle_in({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]
    assert cycle_in({name: found - {name} for name, found in names.items()}) == []


def test_only_the_layers_that_need_a_package_import_it():
    """A policy without torch can be checked on a login node in milliseconds."""
    for module, path in modules().items():
        # `forge.compat.of_torch` needs torch.
        needed = {name.removeprefix("forge.compat.of_") for name in imports(path)}
        packages = {name.partition(".")[0] for name in imports(path) | needed} & THIRD_PARTY
        allowed = layers()[layer_of(module)][2] if module != "forge" else set()
        assert packages <= allowed, f"{module} imports {sorted(packages - allowed)}"


def test_the_training_process_knows_nothing_of_slurm_s_commands():
    """Training gets a function that requeues; only job and launcher call Slurm's commands."""
    above = ("forge.job.", "forge.slurm.", "forge.submitit.", "forge.launch.", "submitit.")
    own = ("forge.compat.", "hydra_plugins.", "forge.sweeps.", "forge.cli.")
    allowed = {
        "forge": {"forge.submitit.checkpointable", "forge.slurm.batch_job"},  # on first use
        # It passes the function to main's process.
        "forge.hydra_app.callbacks": {"forge.slurm.batch_job", "forge.slurm.same_dir"},
    }
    for module, path in modules().items():
        if not f"{module}.".startswith((*above, *own)):
            found = {one for one in imports(path) if f"{one}.".startswith(above)}
            assert found <= allowed.get(module, set()), module
        commands = re.findall(r"""["'](sbatch|squeue|scontrol|sacct|srun)["']""", path.read_text())
        assert not commands or module == "forge.slurm.client", f"{module} names {commands}"


def need(version: str) -> None:
    """Skip if a Python is missing, unless CI has declared that all are installed."""
    if version not in pythons():
        end = pytest.fail if os.environ.get("FORGE_REQUIRE_PYTHONS") else pytest.skip
        end(f"no Python {version} on this machine")


VERSIONS = ["3.10", "3.13", "3.11", "3.12"]


@pytest.mark.parametrize("version", few(2, VERSIONS))
def test_import_forge_loads_nothing_else(version, tmp_path):
    """Every training script imports forge, and so do scripts that only print a status."""
    need(version)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import forge
forge.ExitCode, forge.Policy, forge.ledger, forge.resilience
from forge.resilience import ShutdownHandler
print(sorted(set(sys.modules) & set({HEAVY!r})))
"""
    assert run([pythons()[version], "-c", code], tmp_path).strip() == "[]"


@pytest.mark.parametrize("version", few(1, VERSIONS))
def test_every_module_compiles(version, tmp_path):
    """Syntax of a newer Python would fail only on the cluster."""
    need(version)
    code = (
        "import sys, py_compile\n"
        f"for i, path in enumerate(sys.argv[1:]): py_compile.compile(path, {str(tmp_path)!r}"
        " + f'/{i}.pyc', doraise=True)"
    )
    command = [pythons()[version], "-W", "error", "-c", code, *map(str, modules().values())]
    assert run(command, tmp_path) == ""


def test_py_compile_finds_what_it_should(tmp_path):
    """The test above must be able to fail."""
    path = tmp_path / "wrong.py"
    path.write_text("def f(:\n")
    with pytest.raises(py_compile.PyCompileError):
        py_compile.compile(str(path), doraise=True)


def test_checking_a_policy_needs_no_torch(tmp_path):
    """The launcher checks the policy on a login node, which has no torch."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import forge, forge.hydra_app.callbacks\n"
        "forge.config.loading.load({'nan': {'action': 'skip'}})\n"
        "print(sorted({'torch', 'submitit'} & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", code], tmp_path).strip() == "[]"


def test_a_run_of_one_process_loads_what_it_needs(tmp_path):
    """Code for other kinds of jobs and loops, for GPUs and for rollbacks costs nothing here."""
    code = (
        "import sys\n"
        "for name in [one for one in sys.modules if one.partition('.')[0] == 'forge']:\n"
        "    del sys.modules[name]  # of the process that forks: torch stays\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import forge\n"
        "with forge.Run({'checkpoint': {'dir': 'checkpoints'}}) as run:\n"
        "    list(run.steps(2))\n"
        "print(*(name for name in sys.modules if name.startswith('forge.')))"
    )
    loaded = completed(["-c", code], tmp_path, joins_output=False).stdout.split()
    assert "forge.training.boundary" in loaded
    others = ("forge.slurm.", "forge.job.", "forge.group.ranks", "forge.rehearse.")
    assert [name for name in loaded if name.startswith(others)] == []
    training = "start.agreement", "rollback"
    loops = "fault_injection", "epochs", "pushed", "plain"
    health = "peers", "product", "command"
    for name in (
        *(f"training.{one}" for one in training),
        *(f"training.loop.{one}" for one in loops),
        *(f"health.{one}" for one in health),
        "checkpoint.inspection",
        "jobdir.plan",
    ):
        assert f"forge.{name}" not in loaded


def test_on_windows_the_import_says_what_is_missing(tmp_path):
    """Otherwise a call would fail later, with the name of a function that Python lacks there."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.platform = 'win32'; import forge"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError: forge needs POSIX signals and file locks, which Windows" in done.stderr
