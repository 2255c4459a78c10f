"""Rules that the files of the repository keep."""

import ast
import os
import re
from pathlib import Path

from repository import ROOT, files, modules, tree

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings it along
    import tomli as tomllib


def texts():
    for name in files():
        try:
            yield name, (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue  # a picture


def test_no_file_names_a_place_of_one_machine_or_a_registry():
    """A path of one machine, or a private package index, works on no other machine."""
    places = [r"/wor" + r"k/", r"/tm" + r"p/dev", r"/roo" + r"t\b", r"/opt/" + r"(wheels|pypi)"]
    registries = [r"pypi\." + r"org", r"python" + r"hosted", r"--(extra-)?index-" + r"url"]
    forbidden = re.compile("|".join([*places, *registries]))
    home = str(Path.home())
    for name, text in texts():
        found = [hit[0] for hit in forbidden.finditer(text)]
        if len(home) > 5:
            found += re.findall(re.escape(home), text)
        assert not found, f"{name}: {found}"


def test_a_long_module_says_why_it_is_one():
    """One idea a module. Lines alone cut classes in halves that reach into each other."""
    for module, path in modules().items():
        text = path.read_text()
        opening = ast.get_docstring(tree(path)) or ""
        assert len(text.splitlines()) <= 400 or "One module, since" in opening, module


def test_processes_that_tests_start_end_with_them():
    """One that a failing test leaves behind fails the next one too: tests/support/started.py."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "Popen" not in path.read_text():  # quicker than to parse all of them
            continue
        calls = [node for node in ast.walk(tree(path)) if type(node) is ast.Call]
        bare = [call.lineno for call in calls if ast.unparse(call.func) == "subprocess.Popen"]
        assert not bare, f"{path.relative_to(ROOT)}, lines {bare}: take started.Popen"


DEVICELESS = re.compile(
    r"torch\.(\w+_window|arange|asarray|as_tensor|empty\w*|eye|full|linspace|logspace|ones|rand\w*"
    r"|range|scalar_tensor|sparse_\w+_tensor|tensor|tri[lu]_indices|zeros|Generator)"
)


def test_a_tensor_is_made_on_a_device_that_is_named():
    """`torch.set_default_device("cuda")` in somebody's script must not move what belongs here."""
    nowhere = [
        f"{module}:{call.lineno}"
        for module, path in modules().items()
        if "torch" in path.read_text()
        for call in ast.walk(tree(path))
        if type(call) is ast.Call
        and DEVICELESS.fullmatch(ast.unparse(call.func))
        and "device" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not nowhere


def test_ci_runs_check_and_test_and_stops_at_the_first_failure():
    """It is what lands or does not."""
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script
    assert script.split("\n")[-4:] == ["make check", "make test", "make test-without-slurm", ""]


def test_what_is_left_to_make_proofs_is_listed():
    """A mark is quickly set; the list says what `make test` still holds."""
    listed = (ROOT / "docs/decisions/0020-tests-and-proofs.md").read_text()
    rows = "".join(line for line in listed.splitlines() if line.startswith("|"))
    marks = re.compile(r"pytest\.mark\.proofs|\beach_value\(")
    marked = {
        name
        for name, text in texts()
        if name.startswith("tests/") and "/test_" in name and marks.search(text)
    }
    marked.discard("tests/packaging/test_repository.py")
    marked |= {name for name in files() if name.startswith("tests/proofs/test_")}
    assert marked == set(re.findall(r"`(tests/[\w/]+\.py)`", rows))


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_requirement_is_pinned():
    """A set-up of today and one of next year are the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    form = re.compile(r"[a-z0-9-]+==[\w.]+( ; python_version (<|>=) \"3\.11\")?")
    assert [pin for pin in pins if not form.fullmatch(pin)] == []
    names = {pin.partition("==")[0] for pin in pins}
    metadata = project()["project"]
    wanted = list(metadata["dependencies"])
    for extra in metadata["optional-dependencies"].values():
        wanted += extra
    assert {re.split(r"[<>=!~ ;\[]", one)[0] for one in wanted} - names == set()
    assert "torch==2.13.0" in pins


def test_every_version_that_is_promised_is_classified():
    """The metadata say the Pythons that the tests look for."""
    classifiers = project()["project"]["classifiers"]
    minors = {c.rpartition(" :: ")[2] for c in classifiers if "Python :: 3." in c}
    assert minors == {"3.10", "3.11", "3.12", "3.13"}
    assert project()["project"]["requires-python"] == ">=3.10"
