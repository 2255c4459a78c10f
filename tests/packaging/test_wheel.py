"""The built wheel, and the editable install, outside the repository.

The wheel is installed into an environment that holds only what its metadata require: a dependency
that is not declared is missing there. Its packages are those of the environment that runs the tests
(see `environments.py`); pip checks them against the metadata and the constraints, without an index.
Downloading torch would take minutes and gigabytes for the same files.
"""

import json
import os
import shutil
import signal
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import repository
from environments import Environment, needed, requirements_of
from harness import Process, made_once
from packaging.utils import canonicalize_name
from readme import TUTORIAL, App, blocks, table
from repository import ROOT, run
from rows import few
from warm import IS_QUICK, QUICK

from forge.jobdir import ledger
from forge.process import processes

pytestmark = pytest.mark.slow


def test_the_wheel_holds_the_package_the_plugin_and_the_presets(wheel):
    """A preset that is missing shows only on somebody else's machine."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(ROOT)) for path in repository.modules().values()}
    conf = {f"forge/{name}" for name in repository.files() if name.startswith("conf/")}
    found = {name for name in packed if ".dist-info/" not in name}
    assert found == code | conf | {"forge/py.typed"}


SCRIPT = """
import forge
from forge.resilience import ShutdownHandler

def main(run: forge.Run, handler: ShutdownHandler) -> float:
    for step in run.steps(10):
        run.log(loss=0.5)
        assert step is not None
    code: forge.ExitCode = forge.ExitCode.REQUEUE
    run.log(1, 2, 3)
    return code.name

def loops(run: forge.Run, words: list[str], numbers: list[int]) -> None:
    for step, word in run.steps(10, words):
        print(step + 1, word.upper())
    for step, word, number in run.steps(None, words, numbers):
        print(step + number, word.upper())
    for epoch in run.epochs(3):
        for step, number in run.batches(numbers):
            print(epoch + step + number)
    for several in run.steps(10, words, numbers, words, numbers):
        print(several)
    for step in run.steps(10):
        print(step.upper())
    for step, number in run.steps(10, numbers):
        print(number.upper())
    for step, number in run.batches(numbers):
        print(number.upper())
    forge.Run({"checkpoint": {"dir": "saves"}}, model=run)
    forge.Run(forge.Policy())
    forge.Run(5)
    forge.Runn()
"""

MISTAKES = [
    ("10", 'Too many arguments for "log" of "Run"'),
    ("11", "Incompatible return value type"),
    ("24", '"int" has no attribute "upper"'),
    ("26", '"int" has no attribute "upper"'),
    ("28", '"int" has no attribute "upper"'),
    ("31", 'Argument 1 to "Run" has incompatible type "int"'),
    ("32", 'Module has no attribute "Runn"'),
]
"""The line of each mistake in the script -> what mypy says about the line."""


@pytest.mark.proofs
def test_a_type_checker_sees_the_annotations_of_the_wheel(with_wheel, tmp_path):
    """Without `py.typed` every name of forge is Any, and no mistake of a user's is found."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", with_wheel.python]
    config = tmp_path / "mypy.ini"  # what forge imports takes a minute to look through
    config.write_text("[mypy]\nfollow_imports = skip\n[mypy-forge.*]\nfollow_imports = silent\n")
    command += ["--cache-dir", os.devnull, "--config-file", str(config), str(script)]
    shown = run(command, tmp_path, code=1)
    lines = [line.partition("train.py:")[2] for line in shown.splitlines()]
    for line, (number, message) in zip(lines, MISTAKES, strict=False):
        assert line.startswith(f"{number}: error: {message}"), shown
    assert len(lines) == len(MISTAKES) + 1, shown


def test_every_module_is_imported_where_only_the_dependencies_are(with_wheel, wheel, tmp_path):
    """A package that only the development extra installs is missing on users' machines."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = {".".join(Path(name).with_suffix("").parts) for name in names}
    modules = {one for one in modules - {"forge.__main__"} if not one.startswith(NEED_AN_EXTRA)}
    lines = [f"import {name.removesuffix('.__init__')}" for name in sorted(modules)]
    (tmp_path / "all.py").write_text("\n".join(["import sys", *lines, "print(forge.__file__)"]))
    shown = run([with_wheel.python, "-W", "error", "all.py"], tmp_path, **CLEAN)
    assert shown.strip() == str(with_wheel.site_packages / "forge" / "__init__.py")
    assert len(lines) > 100


NEED_AN_EXTRA = (
    "forge.sweeps.report.",
    "forge.integrations.lightning",
    *("forge.integrations.accelerate", "forge.integrations.prepared_loaders"),
    *("forge.integrations.trainer_", "forge.integrations.transformers"),
    "forge.integrations.optuna",
)
"""Beginnings of the names of modules of the wheel that cannot be imported without one."""


def test_nothing_is_there_but_what_is_required(with_wheel, wheel):
    """The test environment equals the result of `pip install .` in an empty environment.

    pip has installed the wheel in it without an index, so nothing was missing.
    """
    found = metadata.distributions(path=[str(with_wheel.site_packages)])
    names = {canonicalize_name(one.name) for one in found}
    expected = {one.name for one in needed(requirements_of(wheel))} | {"hydra-forge"}
    assert names == {canonicalize_name(name) for name in expected}
    assert {"numpy", "torch"} < names
    assert not {"pytest", "matplotlib", "safetensors", "torchdata"} & names


@pytest.mark.proofs
def test_pip_finds_nothing_missing(with_wheel, tmp_path):
    """Nor in what the requirements require in turn."""
    command = [sys.executable, "-m", "pip", "--python", with_wheel.python, "check"]
    assert "No broken requirements found" in run(command, tmp_path)


STEPS = 1000
CLEAN = {
    "PYTHONPATH": QUICK if IS_QUICK else "",
    "COVERAGE_PROCESS_START": "",
    "COVERAGE_PROCESS_CONFIG": "",
}
"""For `Process`, which adds to the environment: only what must be overridden. Nothing of the
repository can be imported from `QUICK`; `make proofs` runs these tests without it, too."""
COMMANDS = [line for block in blocks("sh", TUTORIAL) for line in block.splitlines()]
TRAIN, RESUME, *_ = COMMANDS
(SWEEP,) = [line for line in COMMANDS if "hydra/launcher=local" in line]
OTHERS = {
    "forge rehearse": "\nIDENTICAL: the interrupted run ended with the same bits (2 signals sent, ",
    "forge doctor": " check",
    "forge plan": "\n#SBATCH --array=0-1",
    "forge exec": "1 of 1 finished",
}
"""Other commands of the tutorial -> something that each prints."""


@pytest.fixture
def app(tmp_path):
    """The tutorial's files, of which the config is shortened, in an empty folder."""
    return write_tutorial(tmp_path / "app")


def write_tutorial(folder):
    app = App.from_tutorial()
    assert "steps: 20_000\n" in app.config
    assert "lr: 1e-4\n" in app.config
    config = app.config.replace("20_000", str(STEPS)).replace("lr: 1e-4", f"lr: {RATE}")
    App(app.script, config).write_to(folder)
    return folder


def start(environment, line, folder, output="output.txt"):
    """A command of the tutorial, as somebody types it who has activated the environment."""
    path = f"{environment.bin}{os.pathsep}{os.environ['PATH']}"
    return Process(["sh", "-c", f"exec {line}"], folder / output, folder, PATH=path, **CLEAN)


def trains(process, job, step):
    """Wait until it has done that step."""

    def has_trained() -> bool:
        progress = ledger.read_progress(job())
        return progress is not None and progress.step >= step

    process.wait_for(has_trained, f"step {step}")


RATE = "1e-3"
"""The first rate of the tutorial's sweep; its config has the same here, so they are compared."""


def job_of(app, number):
    """The directory of a job of the sweep; before there is one, the app's."""
    return next(app.glob(f"multirun/*/*/{number}"), app)


@pytest.fixture(scope="session")
def swept(with_wheel, shared_folder):
    """The tutorial's files, and its sweep, which nobody disturbed."""

    def make(folder):
        app = write_tutorial(folder / "app")
        sweep = start(with_wheel, SWEEP, app)
        assert sweep.wait() == 0, sweep.output

    return made_once(shared_folder / "swept", make) / "app"


def test_the_readme_app_runs_is_stopped_and_resumes_from_the_wheel(with_wheel, swept, app):
    """The first thing that a newcomer does, in a clean environment and an empty folder.

    Its result equals that of the sweep's job with the same rate, which nobody stopped.
    """

    def out():
        return next(app.glob("outputs/*/*"), app)

    first = start(with_wheel, TRAIN, app)
    trains(first, out, 50)
    first.signal(signal.SIGTERM)
    assert first.wait() == 143, first.output
    resume = RESUME.replace("outputs/<date>/<time>", str(out().relative_to(app)))
    second = start(with_wheel, resume, app, "resumed.txt")
    assert second.wait() == 0, second.output
    found = second.output.splitlines()[-1], trained_tensors(out() / "checkpoints")
    job = job_of(swept, 0)
    log = (job / "output.log").read_text()
    assert found == (log.splitlines()[-1], trained_tensors(job / "checkpoints"))
    assert all(found)
    starts = [e for a in ledger.read(out()).attempts for e in a.events if e["kind"] == "start"]
    assert [start["step"] > 0 for start in starts] == [False, True]


def test_the_readme_sweep_runs_from_the_wheel(swept):
    """The command of the tutorial and of README; the app has no guard around main()."""
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()]
    assert SWEEP in map(str.strip, lines)
    jobs = [job_of(swept, number) for number in (0, 1)]
    weights = [trained_tensors(job / "checkpoints") for job in jobs]
    assert weights[0] != weights[1]
    assert [len(ledger.read(job).attempts) for job in jobs] == [1, 1]


@pytest.mark.proofs
def test_a_job_of_the_sweep_is_killed_and_goes_on_from_the_wheel(with_wheel, swept, app):
    """A job starts again as it began: `make test` kills jobs of the repository's forge."""
    sweep = start(with_wheel, SWEEP, app)
    trains(sweep, lambda: job_of(app, 0), 50)
    wrapper = json.loads((job_of(app, 0) / ".forge" / "state.json").read_text())["pid"]
    assert processes.send(processes.descendants(wrapper)[-1], signal.SIGKILL)
    assert sweep.wait() == 0, sweep.output
    both = [[job_of(folder, number) for number in (0, 1)] for folder in (swept, app)]
    one, other = [[trained_tensors(job / "checkpoints") for job in jobs] for jobs in both]
    assert one == other
    assert [len(ledger.read(job).attempts) for job in both[1]] == [2, 1]


@pytest.mark.parametrize(
    "command",
    # `make test` has the others in tests/launch/slurm, tests/rehearse and tests/health.
    few(1, ["forge exec", "forge plan", "forge rehearse", "forge doctor"]),
)
def test_every_other_command_of_the_tutorial_runs_from_the_wheel(with_wheel, app, command):
    """The commands are those of the page; `forge doctor` can fail on some machines."""
    (line,) = [line for line in COMMANDS if line.startswith(command)]
    process = start(with_wheel, line, app)
    code = process.wait(280)  # a rehearsal is some six runs
    assert OTHERS[command] in f"\n{process.output}", process.output
    assert code == 0 or (command, code) == ("forge doctor", 69), process.output


def test_no_command_of_the_tutorial_is_left_out():
    """A command that is added to the page has to be added here."""
    held = {TRAIN, RESUME, SWEEP}
    rest = [line for line in COMMANDS if line not in held]
    assert sorted(" ".join(line.split()[:2]) for line in rest) == sorted(OTHERS)


def trained_tensors(checkpoints: Path) -> dict[str, bytes]:
    """Model and optimizer; python's own random state, which the app does not seed, may differ."""
    raw = (checkpoints / "latest" / "tensors_rank00000.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries = {k: v for k, v in json.loads(raw[8:begin]).items() if k.startswith("live.states.")}
    spans = {name: entry["data_offsets"] for name, entry in entries.items()}
    return {name: raw[begin + first : begin + last] for name, (first, last) in spans.items()}


def write_app(folder: Path) -> None:
    """The tutorial's config, and a script that trains nothing: its start would be all of torch."""
    script = "import hydra\n@hydra.main(version_base=None, config_path='.', config_name='train')\n"
    script += "def main(cfg):\n    raise AssertionError\nmain()\n"
    App(script, App.from_tutorial().config).write_to(folder)


def test_the_wheel_reads_its_own_presets(with_wheel, tmp_path):
    """The wheel must not use the presets of a repository on the same machine."""
    write_app(tmp_path)
    shown = run([with_wheel.python, "train.py", "--info", "searchpath"], tmp_path)
    assert f"file://{with_wheel.site_packages}/forge/conf" in shown.replace(" ", "")
    assert str(ROOT) not in shown


COMPOSE = """
import os, sys, hydra
with hydra.initialize_config_dir(os.getcwd(), version_base=None):
    for preset in sys.argv[1:]:
        print(preset, "checkpoint" in hydra.compose("train", [f"resilience={preset}"]).resilience)
"""


def test_every_preset_is_found(with_wheel, tmp_path):
    """The wheel has each preset of the reference, under the same name."""
    write_app(tmp_path)
    presets = [cells[0].strip("`") for cells in table("reference/policy.md", "## Presets")]
    shown = run([with_wheel.python, "-c", COMPOSE, *presets], tmp_path)
    assert shown.splitlines() == [f"{preset} True" for preset in presets]
    assert {"default", "preemptible", "debug", "disabled", "strict"} <= set(presets)


@pytest.mark.proofs
def test_the_editable_install_reads_the_repository_s_presets(wheel, tmp_path):
    """An edited preset counts at once; a copy that an older build left inside does not."""
    copy = tmp_path / "copy"
    for name in repository.files():
        if name.startswith(("forge/", "hydra_plugins/", "conf/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    to_build = ["hatchling", "editables"]
    environment = Environment.make(tmp_path / "env", requirements_of(wheel) + to_build)
    environment.install("--editable", str(copy))
    shutil.copytree(copy / "conf", copy / "forge" / "conf")
    preset = copy / "conf" / "resilience" / "default.yaml"
    text = preset.read_text()
    assert "warning_s: 120.0" in text
    preset.write_text(text.replace("warning_s: 120.0", "warning_s: 117.0"))
    write_app(tmp_path / "app")
    command = [environment.python, "train.py", "--cfg", "job"]
    assert "warning_s: 117.0" in run(command, tmp_path / "app")
