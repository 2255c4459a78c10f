"""The documents agree with the code: the files at the root, and the pages of the site."""

import ast
import fnmatch
import importlib
import inspect
import os
import re
import subprocess
import textwrap
from dataclasses import asdict
from pathlib import Path

import forge_reference
import policy_pages
import pytest
import readme
import warm
import yaml
from repository import ROOT, files, tree
from size import threads

from forge.config.conversion import known_keys
from forge.config.schema import SignalAction
from forge.errors import ExitCode
from forge.launch.local.resources import LocalOptions
from forge.launch.slurm.slurm_options import SlurmOptions

DOCS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
DECISIONS = [name for name in files() if name.startswith("docs/decisions/0")]
PAGES = [name for name in files() if name.startswith("docs/") and name.endswith(".md")]


def text_of(name):
    return (ROOT / name).read_text()


def exists(name):
    return any(name == file or file.startswith(name.rstrip("/") + "/") for file in files())


def links(text):
    """The targets of the inline and the reference links of a Markdown text."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r"^\[[^]]+\]: (\S+)$", text, re.MULTILINE
    )


def anchors(name):
    """The valid anchors of a file: headings as GitHub writes them, or names of tests."""
    if name.endswith(".py"):
        return set(re.findall(r"^def (test_\w+)", text_of(name), re.MULTILINE))
    headings = re.findall(r"^#+ (.*)$", text_of(name), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_every_link_leads_somewhere():
    """The file and the heading or test exist; for a web address only the syntax is checked."""
    wrong = []
    for name, link in ((page, link) for page in (*DOCS, *PAGES) for link in links(text_of(page))):
        path, _, anchor = link.partition("#")
        if ":" in link:
            is_right = re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./#%~+-]*)?", link) is not None
        else:
            target = os.path.normpath(Path(name).parent / path) if path else name
            is_right = exists(target) and (not anchor or anchor in anchors(target))
            is_right &= name in DOCS or target.startswith("docs/")  # the site has no other pages
        if not is_right:
            wrong.append((name, link))
    assert not wrong


def test_every_file_and_test_that_a_doc_names_exists():
    """Files get renamed, and the sentences about them become wrong."""
    places = r"(?:forge|conf|tests|examples|benchmarks|docs|hydra_plugins)"
    pattern = rf"(?<![\w./>])({places}/[\w./-]*\w)(?:::(\w+))?"
    for name in (*DOCS, *PAGES):
        for path, test in re.findall(pattern, text_of(name)):
            assert exists(path), f"{name}: {path}"
            assert not test or test in anchors(path), f"{name}: {path}::{test}"


def test_the_threads_are_the_ones_there_are():
    """A thread can deadlock, so the table states who joins it and what it must never do."""
    source = "Thread(target=f)\nx.Thread(target=f, name=f'a-{b}')\nThreadPoolExecutor(2, 'p')"
    assert threads(ast.parse(source)) == ["Thread", "a-", "p"]
    listed = {
        (re.findall(r"`(forge/[\w/]+\.py)`", cells[1])[0], cells[0].strip("`"))
        for cells in readme.rows(text_of("ARCHITECTURE.md").partition("<!-- threads -->")[2])
        if all(cells)
    }
    ours = [
        name
        for name in files()
        if name.startswith(("forge/", "hydra_plugins/")) and name.endswith(".py")
    ]
    assert listed == {(name, thread) for name in ours for thread in threads(tree(ROOT / name))}


def test_make_knows_every_target_that_a_doc_names():
    """The Makefile has the target, and its help lists the target."""
    makefile = text_of("Makefile")
    named = {
        t for doc in DOCS for t in re.findall(r"(?:^|`)make ([a-z-]+)", text_of(doc), re.MULTILINE)
    }
    assert {"demo", "test", "check", "coverage", "bench", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_reference_has_every_key_with_an_anchor():
    """A link can lead to it."""
    page = text_of("docs/reference/policy.md")
    shown = re.findall(r'^\| <a id="([\w.]+)"></a>`([\w.]+)` \|', page, re.MULTILINE)
    assert {anchor for anchor, _ in shown} == {row.key for row in policy_pages.rows()}
    assert [anchor for anchor, name in shown if anchor != name] == []


def test_the_reference_has_every_exit_code_with_its_meaning():
    """Authors of scripts use this table; README has the short form."""
    made = readme.rows(forge_reference.exit_codes())
    assert [int(cells[0]) for cells in made] == [int(code) for code in ExitCode]
    assert all(cells[2] for cells in made)
    short = text_of("README.md").partition("## Signals and exit codes")[2]
    named = [int(cell) for row in readme.rows(short) for cell in row if cell.isdigit()]
    assert sorted(named) == sorted(ExitCode)


def test_the_reference_has_the_help_of_every_command(monkeypatch):
    """The page is generated from the output of `forge COMMAND --help`."""

    def forked(words, *, check, capture_output, **options):
        done = warm.run(words, stdout=subprocess.PIPE, timeout=60, **options)
        assert done.returncode == 0
        return done

    monkeypatch.setattr(subprocess, "run", forked)
    shown = re.findall(r"^\$ forge (\w+) --help$", forge_reference.cli(), re.MULTILINE)
    assert {"plan", "show", "diff", "rehearse"} <= set(shown)


def test_the_site_has_every_generated_part():
    """On one page of the reference."""
    pages = "".join(map(text_of, PAGES))
    for part in forge_reference.PARTS:
        assert f"```{{forge-reference}} {part}\n" in pages


def test_the_reference_covers_every_public_name():
    """Each exported name has a docstring, and is on the page of its module or package."""
    page = text_of("docs/reference/api.md")
    form = r"^\.\. automodule:: (\S+)\n   :members:\n(?:   :exclude-members: (.*)\n)?"
    left_out = {
        importlib.import_module(name): set(excluded.split(", "))
        for name, excluded in re.findall(form, page, re.MULTILINE)
    }
    todo = [importlib.import_module("forge")]
    for module in todo:
        for name in set(getattr(module, "__all__", [])) - {"__version__"}:
            value = getattr(module, name)
            if inspect.ismodule(value):
                todo.append(value)
                continue
            assert inspect.getdoc(value), f"{module.__name__}.{name}"
            homes = [home for home, names in left_out.items() if name not in names]
            assert any(getattr(home, name, None) is value for home in homes), name


def public_functions():
    """Name -> (function, its docstring, or that of its class), of all that forge exports."""
    found, todo = {}, [importlib.import_module("forge")]
    for module in todo:
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            if inspect.ismodule(value):
                todo.append(value)
            elif inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = value, inspect.getdoc(value) or ""
            elif inspect.isclass(value) and not issubclass(value, BaseException | tuple):
                for method, function in vars(value).items():
                    function = getattr(function, "__func__", function)  # of a static method
                    if inspect.isfunction(function) and not method.startswith("_"):
                        doc = inspect.getdoc(function) or ""
                        if doc.startswith("See `"):
                            continue  # what it takes is said once, by the base class
                        found[f"{module.__name__}.{name}.{method}"] = function, doc
    return found


def test_a_public_function_says_what_it_takes_and_what_it_returns():
    """The docstring also has `Raises:` if the function itself raises; editors show it."""
    for name, (function, doc) in public_functions().items():
        signature = inspect.signature(function)
        arguments = doc.partition("Args:")[2]
        missing = [p for p in signature.parameters if p != "self" and f" {p}: " not in arguments]
        assert not missing, name
        returns = signature.return_annotation
        if not inspect.isgeneratorfunction(inspect.unwrap(function)):
            assert ("Returns:" in doc) is (returns not in (None, "None", "NoReturn")), name
        body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(body))
        assert "Raises:" in doc or not raises, name
        # reStructuredText: an example needs `::` above it, or the build of the site fails.
        assert not re.search(r"^(?![ ]*[\w*]+: ).*[^:\n]\n\n    ", doc, re.MULTILINE), name


def test_every_page_is_in_the_contents_of_the_site():
    """Readers find a page only through the contents."""
    listed = {"docs/index.md"}
    for name in PAGES:
        blocks = readme.blocks("{toctree}", ROOT / name)
        for line in [line for block in blocks for line in block.splitlines()]:
            if line and not line.startswith(":"):
                at = os.path.normpath(Path(name).parent / f"{line}.md")
                assert fnmatch.filter(PAGES, at), f"{name}: {line}"
                listed |= set(fnmatch.filter(PAGES, at))
    assert set(PAGES) == listed


def by_key(rows):
    """Default by key; a row may name several keys that have the same."""
    return {
        key: cells[1].strip("`") for cells in rows for key in re.findall(r"`([^`]+)`", cells[0])
    }


def test_the_launcher_s_options_are_those_of_its_config_and_of_its_code():
    """Three places say what `n_jobs` is when nobody sets it."""
    rows = readme.table("reference/launchers.md", "## The local launcher")
    shown = {key: yaml.safe_load(default) for key, default in by_key(rows).items()}
    config = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / "local.yaml").read_text())
    del config["_target_"]
    assert shown == config == asdict(LocalOptions())


def test_the_slurm_launcher_s_options_are_those_of_its_config_and_of_its_code():
    """Only the config has the options with interpolations."""
    rows = readme.table("reference/launchers.md", "## The Slurm launcher")
    shown = {key: yaml.safe_load(default) for key, default in by_key(rows).items()}
    config = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / "slurm.yaml").read_text())
    config = config["launcher"]
    del config["_target_"]
    assert shown == config
    plain = {key: value for key, value in config.items() if "${" not in str(value)}
    code = asdict(SlurmOptions())
    del code["_target_"]
    assert plain.items() <= code.items()
    assert config.keys() == code.keys()


def test_every_key_that_a_doc_names_exists():
    """forge would refuse a key that is only in the docs."""
    known = known_keys()
    groups = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    pattern = r"`(?:\+?resilience\.)([\w.]+\w)"
    outputs = re.compile(r"^```text\n.*?^```$", re.DOTALL | re.MULTILINE)  # one shows a wrong key
    texts = {doc: outputs.sub("", text_of(doc)) for doc in [*DOCS, *PAGES]}
    named = {key: doc for doc, text in texts.items() for key in re.findall(pattern, text)}
    assert named, "the expression finds none"
    unknown = {key: doc for key, doc in named.items() if key not in known and key not in groups}
    assert not unknown


def test_the_presets_are_the_ones_there_are():
    """The table has the name of each preset."""
    there = {path.stem for path in (ROOT / "conf" / "resilience").glob("*.yaml")}
    shown = readme.table("reference/policy.md", "## Presets")
    assert {cells[0].strip("`") for cells in shown} == there


def test_the_signal_actions_are_the_ones_there_are():
    """The page names all signal actions, and no others."""
    page = text_of("docs/reference/signals.md")
    sentence = page.partition("`resilience.signal.actions` changes that")[2]
    named = re.findall(r"`(\w+)`", sentence.partition("\n\n")[0])
    assert named == [action.name for action in SignalAction]


def test_the_diff_of_the_examples_is_up_to_date():
    """`python tests/support/readme.py` renews it."""
    assert readme.written_diff() == readme.diff()


def test_the_pages_count_the_lines_that_the_diff_adds():
    """The first sentence of README states the number of added lines."""
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    signs = [line[:2] for line in readme.diff().splitlines()]
    added, removed = words[signs.count("+ ")], words[signs.count("- ")]
    for page in ("README.md", "docs/index.md"):
        assert f"You add {added} lines to your" in text_of(page)
    text = " ".join(text_of("README.md").split())
    assert f": {added} lines are added, {removed} are removed, and the config gets" in text


def test_the_app_is_eleven_lines_and_its_frame():
    """Imports, the call of main and the lines that print are not counted."""
    lines = [line for line in readme.App.from_tutorial().script.splitlines() if line]
    frame = r"import |main\(\)| *if step % 2000 == 0:$| *print\("
    body = [line for line in lines if not re.match(frame, line)]
    assert len(body) <= 11


def test_each_number_is_given_to_one_decision():
    """Other pages refer to a decision by its number."""
    numbers = [name.split("/")[-1][:4] for name in DECISIONS]
    assert len(numbers) == len(set(numbers))


def test_a_decision_has_its_three_parts_on_one_page():
    """Context, choice, what was rejected."""
    for name in DECISIONS:
        text = text_of(name)
        assert len(text.splitlines()) <= 40, name
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings[:3] == ["Context", "Choice", "Rejected"], name
        assert re.match(rf"# {int(name.split('/')[-1][:4])}\. ", text), name


@pytest.mark.parametrize(
    ("name", "most"), [("CONTRIBUTING.md", 79), ("README.md", 150), ("CHANGELOG.md", 40)]
)
def test_it_is_short(name, most):
    """People do not read long files."""
    assert len(text_of(name).splitlines()) <= most


def test_both_commands_and_what_was_never_run_are_on_the_first_screen():
    """Who opens the repository looks for how to try it, and for how to check it."""
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    for words in ("make demo ", "make test ", "forge has never run on a GPU"):
        assert any(words in line for line in screen), words
