"""Every code block of README.md, CONTRIBUTING.md and docs/ is run here, or by a test named here.

A new block fails until it has an entry in one of the tables below.
"""

import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import readme
import shown
import torch
from forked import completed
from harness import Process
from repository import ROOT, files
from torch.utils.data import DataLoader

import forge

PAGES = [
    "README.md", "CONTRIBUTING.md",
    *(name for name in files() if name.startswith("docs/") and name.endswith(".md")),
]  # fmt: skip
WRITTEN_BY_SPHINX = (
    *("{toctree}", "{include}", "{literalinclude}", "{eval-rst}", "{forge-reference}"),
)
"""Directives, and not code blocks; test_gallery.py runs the scripts that a page includes."""
ELSEWHERE = {
    ("docs/cheat-sheet.md", "yaml", 0): "test_gallery.py::test_the_config_of_the_cheat_sheet",
    ("docs/how-to/from-submitit-slurm.md", "diff", 0): "test_gallery.py::test_the_config_moved",
    ("docs/examples.md", "text", 0): "test_gallery.py::test_two_ranks_of_torchrun",
    ("README.md", "diff", 0): "test_docs.py::test_the_diff_of_the_examples_is_up_to_date",
    ("docs/tutorial.md", "python", 0): "test_wheel.py::test_the_readme_app_runs",
    ("docs/tutorial.md", "yaml", 0): "test_wheel.py::test_the_readme_app_runs",
    ("docs/how-to/inspect.md", "python", 0): "test_inspection.py::test_a_checkpoint_can_be_read",
    ("docs/how-to/inspect.md", "python", 1): "test_shards.py::test_the_lines_of_the_page",
    ("docs/explanation/same-bits.md", "python", 0): "test_states_of_loaders.py::test_the_loader_of",
    **{
        ("docs/how-to/convert-a-loop.md", "python", number): "test_begun_again.py::test_two_ways_to"
        for number in (2, 3)
    },
    ("docs/how-to/convert-a-loop.md", "python", 4): "test_command_identity.py::test_what_config",
    **{
        ("docs/how-to/batch-script.md", "bash", number): "test_own_scripts.py::test_the_scripts_of"
        for number in range(5)
    },
    ("docs/how-to/several-ranks.md", "python", 0): "test_typed_ranks.py::test_it_stops_and_goes_on",
    ("docs/how-to/several-ranks.md", "text", 0): "test_typed_ranks.py::test_it_stops_and_goes_on",
    ("docs/how-to/watch-a-sweep.md", "python", 0): "test_page_of_sweeps.py::test_the_lines_of",
    ("docs/how-to/any-command.md", "yaml", 0): "test_exec.py::test_the_config_of_the_page",
    ("docs/how-to/any-command.md", "yaml", 1): "test_exec.py::test_the_config_of_the_page",
    ("docs/how-to/health.md", "text", 1): "test_verdicts_of_checks.py::test_the_page_shows",
    ("docs/how-to/health.md", "yaml", 0): "test_verdicts_of_checks.py::test_the_yaml_of_the_page",
    **{
        ("docs/how-to/loggers.md", "python", number): "test_page_of_loggers.py::test_the_lines_of"
        for number in range(3)
    },
    ("docs/how-to/optuna.md", "yaml", 0): "test_optuna.py::test_a_sweep_whose_launcher_is_killed",
    ("docs/how-to/huggingface.md", "python", 0): "test_transformers.py::test_the_subclass_of_the",
    ("docs/how-to/rehearse.md", "text", 0): "test_rehearse.py::test_a_script_that_keeps_state_out",
}
"""(page, language, index of the block among those of that language) -> a prefix of its test."""


def blocks_of(page):
    """(page, language, index) of each block."""
    languages = re.findall(r"^ *```([^\s`]+)", (ROOT / page).read_text(), re.MULTILINE)
    seen = dict.fromkeys(languages, 0)
    for language in languages:
        if language not in WRITTEN_BY_SPHINX:
            yield page, language, seen[language]
            seen[language] += 1


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


OUTPUTS = [block for block in BLOCKS if block[1] == "text" and block not in ELSEWHERE]
"""Output of commands, copied into the page when it was written."""


def test_what_a_command_prints_is_what_the_page_shows():
    """If a message changes, the page has to change, too: readers grep for the line."""
    unknown = {
        (page, line): words
        for page, language, which in OUTPUTS
        for line in readme.blocks(language, ROOT / page)[which].splitlines()
        if (words := shown.unknown_in(line))
    }
    assert not unknown


def test_a_line_that_nothing_prints_is_found():
    """Otherwise the test above would accept any line."""
    assert "commences" in shown.unknown_in("forge: Training commences at step 0")


OF_A_SWEEP = "docs/how-to/watch-a-sweep.md"
"""Its commands act on a sweep: test_page_of_sweeps.py has one."""


def commands():
    """The lines of all shell blocks but those of a sweep, without their comments, each once."""
    pages = {page for page, language, _ in BLOCKS if language == "sh"} - {OF_A_SWEEP}
    lines = [line for p in pages for b in readme.blocks("sh", ROOT / p) for line in b.splitlines()]
    return sorted({line.partition("#")[0].strip() for line in lines})


def test_every_block_is_held():
    """A test below runs the block, or the table above names a test that exists."""
    here = {("docs/" + page, "python", which) for page, which in FRAGMENTS}
    shell = {block for block in BLOCKS if block[1] == "sh"}
    assert here | shell | set(OUTPUTS) | set(ELSEWHERE) == set(BLOCKS)
    texts = {name: (ROOT / name).read_text() for name in files() if name.startswith("tests/")}
    for held in ELSEWHERE.values():
        file, _, test = held.partition("::")
        (text,) = [text for name, text in texts.items() if Path(name).name == file]
        assert f"def {test}" in text, held


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The variables that a fragment expects from the script around it."""
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(resilience=None, steps=6, eval_every=3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(4, 2), batch_size=2)
    return {
        "cfg": config, "forge": forge, "hydra": hydra, "model": model, "optimizer": optimizer,
        "loader": loader, "data": loader,
    }  # fmt: skip


def run_it(page, which, names, long="", short=""):
    """Run a fragment, with a shorter loop if requested; return all variables."""
    text = readme.blocks("python", readme.DOCS / page)[which]
    assert long in text
    exec(compile(text.replace(long, short) if long else text, page, "exec"), names)
    return names


def write_tutorial(folder):
    """Write the tutorial's app, with a fortieth of its steps."""
    app = readme.App.from_tutorial()
    assert "steps: 20_000\n" in app.config
    readme.App(app.script, app.config.replace("20_000", "500")).write_to(folder)


def run_with_data(names):
    write_tutorial(Path.cwd())
    Path("train_data.py").write_text(readme.blocks("python", readme.TUTORIAL)[1])
    done = completed(["train_data.py"], Path.cwd())
    assert (done.returncode, "step 0, epoch 0: loss" in done.stdout) == (0, True), done.stdout
    metrics = forge.ledger.read(next(Path.cwd().glob("outputs/*/*"))).metrics
    assert metrics[499]["loss"] < metrics[0]["loss"]


WHOLE = {"nans.py": "handle-nans.md", "hang.py": "hangs.md", "unsaved.py": "rehearse.md"}
"""Script -> the how-to guide whose first block is the whole script."""


def whole_script(name):
    return readme.blocks("python", readme.DOCS / "how-to" / WHOLE[name])[0]


def run_whole(name, text, *overrides):
    assert len(text.splitlines()) <= 25
    Path(name).write_text(text)
    done = completed([name, "+resilience=default", *overrides], Path.cwd())
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_with_a_nan(names):
    output = run_whole("nans.py", whole_script("nans.py"), "resilience.nan.action=skip")
    assert "NaN or Inf in step 120: the loss is nan; this update is skipped" in output
    (printed,) = re.findall(r"300 steps, bias \S+", output)
    assert printed in (readme.DOCS / "how-to/handle-nans.md").read_text()


def run_without_its_hang(names):
    """The script without its hour of sleep, which test_every_command_runs_as_it_stands keeps."""
    text = whole_script("hang.py")
    line = (
        text.splitlines().index("                time.sleep(3600)  # the first attempt hangs") + 1
    )
    assert f"/home/me/app/hang.py:{line} in main" in (readme.DOCS / "how-to/hangs.md").read_text()
    for long, short in (("3600", "0"), ("1200", "12"), ("3000", "30")):
        assert text.count(long) == 1
        text = text.replace(long, short)
    assert "Training finished at step 30" in run_whole("hang.py", text)


def run_without_a_signal(names):
    output = run_whole("unsaved.py", whole_script("unsaved.py"))
    assert "Training finished at step 60" in output


def ask_before_a_step(names):
    names |= {"run": SimpleNamespace(should_step=lambda loss: loss < 1), "loss": 0.5}
    before = names["model"].weight.detach().clone()
    names["model"](torch.ones(2)).sum().backward()
    run_it("how-to/handle-nans.md", 1, names)
    assert not torch.equal(names["model"].weight, before)
    assert names["model"].weight.grad is None


def plot_metrics(names):
    with forge.Run({"checkpoint": {"dir": "runs/first"}}, model=names["model"]) as run:
        for step in run.steps(3):
            run.log(loss=step)
    run_it("how-to/plot-metrics.md", 0, names)
    assert Path("loss.png").stat().st_size > 1000


def plot_a_sweep(names):
    for number in "01":
        folder = f"multirun/2026-11-24/18-00-00/{number}"
        with forge.Run({"checkpoint": {"dir": folder}}, name=number, model=names["model"]) as run:
            for step in run.steps(3):
                run.log(loss=step)
    run_it("how-to/plot-metrics.md", 1, names)
    assert Path("sweep.png").stat().st_size > 1000


def run_the_cheat_sheet(names):
    names |= {
        "schedule": torch.optim.lr_scheduler.ConstantLR(names["optimizer"]),
        "evaluate": lambda model, check_stop: float(check_stop()),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
    }
    run = run_it("cheat-sheet.md", 0, names, long="10_000", short="600")["run"]
    assert run.step == 600


def run_the_front_page(names):
    names |= {"loss_fn": lambda model, batch: model(batch).square().mean()}
    assert run_it("index.md", 0, names)["run"].step == names["cfg"].steps


def run_a_plain_loop(names):
    run = run_it("how-to/convert-a-loop.md", 0, names)["run"]
    assert run.step == names["cfg"].steps


def run_with_an_evaluation(names):
    values = []

    def evaluate(model, data, check_stop):
        assert model is names["model"]
        assert data is names["data"]
        assert not check_stop()
        values.append(len(values))
        return values[-1]

    with forge.Run(model=names["model"], optimizer=names["optimizer"]) as run:
        run_it("how-to/convert-a-loop.md", 1, names | {"run": run, "evaluate": evaluate})
        for _ in run.steps(names["cfg"].steps + 1):
            pass
    assert values == [0, 1, 2]


def run_in_epochs(names):
    values = iter([3.0, 1.0, 2.0])
    names |= {
        "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(names["optimizer"]), "inf": math.inf,
        "evaluate": lambda model, data: next(values),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
    }  # fmt: skip
    names["cfg"].epochs = 3
    run = run_it("how-to/train-in-epochs.md", 0, names)["run"]
    assert (run.step, run.state["best"]) == (6, 1.0)


def run_several(names):
    built = []

    def build(cfg, fold):
        built.append(fold)
        return names["model"], names["optimizer"], names["loader"]

    scored = names | {"scores": [], "build": build, "score": lambda model: len(built)}
    assert run_it("how-to/several-trainings.md", 0, scored)["scores"] == [1, 2, 3, 4, 5]
    assert {path.name for path in Path("checkpoints").iterdir()} >= {f"fold{n}" for n in built}


def begin_with_other_weights(names):
    pretrained = torch.nn.Linear(2, 1)
    torch.save(pretrained.state_dict(), "pretrained.pt")
    names["cfg"].resilience = {"checkpoint": {"dir": "outputs/2026-11-24/18-44-34"}}
    names["torch"] = torch
    run_it("how-to/init-from.md", 0, names)
    assert torch.equal(names["model"].weight, pretrained.weight)
    names["model"] = torch.nn.Linear(2, 1)
    run_it("how-to/init-from.md", 1, names)
    assert torch.equal(names["model"].weight, pretrained.weight)


def ask_for_a_version(names):
    given = run_it("decisions/0025-version-base.md", 0, names)["VERSION_BASE"]
    assert hydra.main(config_path=None, **given)(lambda cfg: None)
    for name in ("examples/train.py", "examples/train_plain.py"):
        assert (
            readme.blocks("python", readme.DOCS / "decisions/0025-version-base.md")[0]
            in (ROOT / name).read_text()
        )


FRAGMENTS = {
    ("index.md", 0): run_the_front_page,
    ("cheat-sheet.md", 0): run_the_cheat_sheet,
    ("how-to/handle-nans.md", 0): run_with_a_nan,
    ("how-to/handle-nans.md", 1): ask_before_a_step,
    ("how-to/hangs.md", 0): run_without_its_hang,
    ("how-to/rehearse.md", 0): run_without_a_signal,
    ("how-to/plot-metrics.md", 0): plot_metrics,
    ("how-to/plot-metrics.md", 1): plot_a_sweep,
    ("tutorial.md", 1): run_with_data,
    ("how-to/convert-a-loop.md", 0): run_a_plain_loop,
    ("how-to/convert-a-loop.md", 1): run_with_an_evaluation,
    ("how-to/train-in-epochs.md", 0): run_in_epochs,
    ("how-to/several-trainings.md", 0): run_several,
    ("how-to/init-from.md", 0): begin_with_other_weights,
    ("how-to/init-from.md", 1): begin_with_other_weights,
    ("decisions/0025-version-base.md", 0): ask_for_a_version,
}


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=[f"{page}-{n}" for page, n in FRAGMENTS])
def test_a_fragment_runs_in_a_script(names, fragment):
    """A fragment runs with the variables that the user's script has."""
    FRAGMENTS[fragment](names)


NOT_RUN = (
    *("make ", ".venv/bin/pre-commit ", "FORGE_REPOSITORY=", "pip install "),
    *("python huggingface.py", "python lightning_trainer.py"),
)
"""Commands that take minutes, or write into the clone, or need a trainer: test_docs.py checks the
targets of make, test_wheel.py installs the wheel, and tests/integrations runs the pages' scripts.
"""


@pytest.mark.proofs
@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(900)  # a rehearsal is nine runs
def test_every_command_runs_as_it_stands(cluster, monkeypatch, tmp_path):
    """All commands run in one folder, with the examples and the tutorial's scripts (fewer steps).

    A placeholder for an output directory, or a sweep's directory, is replaced by the first one that
    exists.
    """
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    bin_dir = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    app = readme.App.from_tutorial()
    readme.App(app.script, app.config.replace("20_000", "200")).write_to(tmp_path)
    for path in (ROOT / "examples/gallery").iterdir():
        shutil.copy(path, tmp_path)
    for name in WHOLE:
        (tmp_path / name).write_text(whole_script(name))
    lines = [line for line in commands() if not line.startswith(NOT_RUN)]
    lines.sort(key=lambda line: line != "python train.py")  # first, since others read its output
    assert len(lines) >= 6
    for line in lines:
        (job, *_) = sorted(tmp_path.glob("outputs/*/*")) or [None]
        command = line.replace("outputs/<date>/<time>", str(job)).replace("<path>", str(job))
        (sweep, *_) = sorted(tmp_path.glob("multirun/*/*")) or [None]
        command = command.replace("multirun/2026-11-24/18-14-56", str(sweep))
        process = Process(["sh", "-c", command], tmp_path / "output.txt", tmp_path)
        assert process.wait(600) == (" unsaved.py " in line), (line, process.output)
    cluster.clear()
