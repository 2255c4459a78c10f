"""README.md, ARCHITECTURE.md and CONTRIBUTING.md say what is there, and all of it."""

import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import readme
import yaml
from omegaconf import OmegaConf
from repository import ROOT, files

from forge.config.rules import known_keys
from forge.config.schema import SignalAction
from forge.errors import ExitCode
from forge.launch.local.resources import LocalOptions
from forge.launch.slurm.slurm_options import SlurmOptions

DOCS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
DECISIONS = [name for name in files() if name.startswith("docs/decisions/")]
IN_TREE = ("forge/", "conf/", "hydra_plugins/")
POLICY_TABLE = (
    "Every key can be set in your config or on the command line: `resilience.nan.action=rollback`."
)


def text_of(name):
    return (ROOT / name).read_text()


def exists(name):
    return any(name == file or file.startswith(name.rstrip("/") + "/") for file in files())


@pytest.mark.parametrize("name", [*DOCS, *DECISIONS])
def test_every_link_and_every_file_that_a_doc_names_exists(name):
    """Files are renamed; the sentences about them are forgotten."""
    text = text_of(name)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if ":" not in link]
    links = [os.path.normpath(Path(name).parent / link) for link in links]
    pattern = (
        r"(?<![\w./>])((?:forge|conf|tests|examples|benchmarks|docs|hydra_plugins)/[\w./-]*\w)"
    )
    prose = text if name != "README.md" else text.partition("<!-- tree -->")[0]
    missing = [path for path in [*links, *re.findall(pattern, prose)] if not exists(path)]
    assert not missing


def tree() -> list[str]:
    """The paths in README's tree."""
    block = text_of("README.md").partition("<!-- tree -->")[2].partition("<!-- /tree -->")[0]
    found, parents = [], {}
    for line in block.strip().splitlines()[1:-1]:
        name, phrase = line.split(maxsplit=1)
        assert phrase
        indent = len(line) - len(line.lstrip())
        parents = {depth: path for depth, path in parents.items() if depth < indent}
        path = "".join(path for _, path in sorted(parents.items())) + name
        if name.endswith("/"):
            parents[indent] = name
        found.append(path)
    return found


def test_the_tree_names_what_is_there():
    """With a phrase for each."""
    assert [path for path in tree() if not exists(path)] == []


def test_the_tree_names_every_folder_of_the_package():
    """A newcomer who looks for the place of something finds it; each file says the rest itself."""
    ours = [name for name in files() if name.startswith(IN_TREE)]
    assert {f"{os.path.dirname(name)}/" for name in ours if name.endswith(".py")} <= set(tree())
    assert {name for name in ours if not name.endswith(".py")} <= set(tree())


def test_make_knows_every_target_that_a_doc_names():
    """And says so in its help."""
    makefile = text_of("Makefile")
    named = {
        t for doc in DOCS for t in re.findall(r"(?:^|`)make ([a-z]+)", text_of(doc), re.MULTILINE)
    }
    assert {"demo", "test", "check", "coverage", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_policy_table_has_every_key_with_its_default():
    """The table is what people set keys by."""
    shown = by_key(readme.table(POLICY_TABLE))
    preset = OmegaConf.load(ROOT / "conf" / "resilience" / "default.yaml")
    keys = {key for key in known_keys() if not key.startswith("signal.actions.")}
    assert set(shown) == keys | {"signal.actions"}
    for key, default in shown.items():
        expected = OmegaConf.select(preset, key)
        plain = OmegaConf.to_container(expected) if OmegaConf.is_config(expected) else expected
        assert yaml.safe_load(default) == plain, key


def by_key(rows):
    """Default by key; a row may name several keys that have the same."""
    return {
        key: cells[1].strip("`") for cells in rows for key in re.findall(r"`([^`]+)`", cells[0])
    }


def test_the_launcher_s_options_are_those_of_its_config_and_of_its_code():
    """Three places say what `n_jobs` is when nobody sets it."""
    rows = readme.table("## Sweeps on one machine")
    shown = {key: yaml.safe_load(default) for key, default in by_key(rows).items()}
    config = yaml.safe_load((ROOT / "conf" / "hydra" / "launcher" / "local.yaml").read_text())
    del config["_target_"]
    assert shown == config == asdict(LocalOptions())


def test_the_slurm_launcher_s_options_are_those_of_its_config_and_of_its_code():
    """The interpolations stand in the config alone."""
    rows = readme.table(
        "The options are those of hydra-submitit-launcher, with their meaning, and a few more:"
    )
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
    """A key that is only promised would be refused."""
    known = known_keys()
    groups = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    pattern = r"`(?:\+?resilience\.)([\w.]+\w)"
    named = {key: doc for doc in [*DOCS, *DECISIONS] for key in re.findall(pattern, text_of(doc))}
    assert named, "the expression finds none"
    unknown = {key: doc for key, doc in named.items() if key not in known and key not in groups}
    assert not unknown


def test_the_presets_are_the_ones_there_are():
    """Each by its name."""
    there = {path.stem for path in (ROOT / "conf" / "resilience").glob("*.yaml")}
    shown = readme.table("Presets, chosen by `resilience=<name>` or in the defaults list:")
    assert {cells[0].strip("`") for cells in shown} == there


def test_the_exit_codes_are_the_ones_there_are():
    """Scripts are written by this table."""
    text = text_of("README.md").partition("| exit code | meaning |")[2].partition("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)] == list(ExitCode)


def test_the_signal_actions_are_the_ones_there_are():
    """All of them, and no other."""
    sentence = text_of("README.md").partition("`resilience.signal.actions` changes that")[2]
    named = re.findall(r"`(\w+)`", sentence.partition("\n\n")[0])
    assert named == [action.name for action in SignalAction]


def test_the_diff_of_the_examples_is_up_to_date():
    """`python tests/support/readme.py` renews it."""
    assert readme.written_diff() == readme.diff()


def test_the_loop_needs_at_most_five_lines_of_forge():
    """What README promises in its first sentence."""
    ours = text_of("examples/train.py").partition("def main")[2].splitlines()
    assert 0 < len([line for line in ours if re.search(r"\b(run|forge)\.", line)]) <= 5


def test_the_app_is_ten_lines_and_its_frame():
    """Imports, the call and what is printed not counted."""
    lines = [line for line in readme.App.from_readme().script.splitlines() if line]
    body = [
        line for line in lines if not line.startswith(("import ", "main()")) and "print" not in line
    ]
    assert len(body) <= 10


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_has_its_three_parts_on_one_page(name):
    """Context, choice, what was rejected."""
    text = text_of(name)
    assert len(text.splitlines()) <= 40
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:3] == ["Context", "Choice", "Rejected"]
    assert re.match(rf"# {int(name.split('/')[-1][:4])}\. ", text)


def test_contributing_is_short():
    """Or nobody reads it."""
    assert len(text_of("CONTRIBUTING.md").splitlines()) < 80
