"""The built wheel, and the editable install, outside the repository."""

import json
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest
import repository
from environments import Environment
from harness import Process, made_once
from readme import App, blocks
from repository import ROOT, run
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
"""


def test_a_type_checker_sees_the_annotations_of_the_wheel(with_wheel, tmp_path):
    """Without `py.typed` every name of forge is Any, and no mistake of a user's is found."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", with_wheel.python]
    config = tmp_path / "mypy.ini"  # what forge imports takes a minute to look through
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    command += ["--cache-dir", str(tmp_path / "cache"), "--config-file", str(config), str(script)]
    shown = run(command, tmp_path, code=1)
    lines = [line.partition("train.py:")[2] for line in shown.splitlines()]
    assert lines[0].startswith("10: error: Too many")
    assert 'for "log" of "Run"' in lines[0]
    assert lines[1].startswith("11: error: Incompatible return value type")
    assert len(lines) == 3, shown


STEPS = 3000
NO_COVERAGE = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
CLEAN = {"PYTHONPATH": QUICK if IS_QUICK else "", **NO_COVERAGE}
"""For `Process`, which adds to the environment: only what must be overridden."""


@pytest.fixture(scope="session")
def undisturbed(with_wheel, shared_folder):
    """What the app prints and keeps when nobody interrupts it, with the first rate of the sweep."""

    def make(folder):
        App.from_tutorial().write_to(folder)
        process = train(with_wheel, folder, "lr=1e-3")
        assert process.wait() == 0, process.output

    folder = made_once(shared_folder / "undisturbed_app", make)
    line = (folder / "output.txt").read_text().splitlines()[-1]
    return line, trained_tensors(folder / "out" / "checkpoints")


def train(environment, folder, *words):
    command = [environment.python, "train.py", *words, f"steps={STEPS}", "hydra.run.dir=out"]
    return Process(command, folder / "output.txt", folder, **CLEAN)


def test_the_readme_app_runs_is_stopped_and_resumes_from_the_wheel(
    with_wheel, undisturbed, tmp_path
):
    """The first thing that a newcomer does, in a clean environment and an empty folder."""
    folder, out = tmp_path / "app", tmp_path / "app" / "out"
    App.from_tutorial().write_to(folder)
    disturbed = train(with_wheel, folder, "lr=1e-3")

    def trains() -> bool:
        progress = ledger.read_progress(out)
        return progress is not None and progress[1] >= 50

    disturbed.wait_for(trains, "step 50")
    disturbed.signal(signal.SIGTERM)
    assert disturbed.wait() == 143, disturbed.output
    script = str(out / ".forge" / "resume.sh")
    resumed = Process(["sh", script], folder / "resumed.txt", tmp_path, **CLEAN)
    assert resumed.wait() == 0, resumed.output
    found = resumed.output.splitlines()[-1], trained_tensors(out / "checkpoints")
    assert found == undisturbed
    assert all(found)
    starts = [e for a in ledger.read(out).attempts for e in a.events if e["kind"] == "start"]
    assert [start["step"] > 0 for start in starts] == [False, True]


@pytest.mark.proofs
def test_the_readme_sweep_runs_is_killed_and_goes_on_from_the_wheel(
    with_wheel, undisturbed, tmp_path
):
    """README's command for a sweep, as it stands there; the app has no guard around main()."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    (command,) = [line for line in lines if "hydra/launcher=local" in line]
    words = command.split()
    assert words[:4] == ["python", "train.py", "-m", "hydra/launcher=local"]
    assert words[4].startswith("lr=1e-3,")
    App.from_tutorial().write_to(tmp_path)
    sweep = train(with_wheel, tmp_path, *words[2:], "hydra.sweep.dir=sweep")
    jobs = [tmp_path / "sweep" / number for number in ("0", "1")]

    def trains() -> bool:
        progress = ledger.read_progress(jobs[0])
        return progress is not None and progress.step >= 50

    sweep.wait_for(trains, "step 50")
    wrapper = json.loads((jobs[0] / ".forge" / "state.json").read_text())["pid"]
    assert processes.send(processes.descendants(wrapper)[-1], signal.SIGKILL)
    assert sweep.wait() == 0, sweep.output
    weights = [trained_tensors(job / "checkpoints") for job in jobs]
    assert weights[0] == undisturbed[1] != weights[1]
    assert [len(ledger.read(job).attempts) for job in jobs] == [2, 1]


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
    """Not those of a repository that happens to lie on the same machine."""
    write_app(tmp_path)
    shown = run([with_wheel.python, "train.py", "--info", "searchpath"], tmp_path)
    assert f"file://{with_wheel.site_packages}/forge/conf" in shown.replace(" ", "")
    assert str(ROOT) not in shown


@pytest.mark.parametrize("preset", ["default", "preemptible", "debug", "disabled", "strict"])
def test_every_preset_is_found(with_wheel, tmp_path, preset):
    """In the wheel, by the name that the reference gives it."""
    write_app(tmp_path)
    command = [with_wheel.python, "train.py", f"resilience={preset}", "--cfg", "job"]
    assert "checkpoint:" in run(command, tmp_path)


def test_the_editable_install_reads_the_repository_s_presets(tmp_path):
    """An edited preset counts at once; a copy that an older build left inside does not."""
    copy = tmp_path / "copy"
    for name in repository.files():
        if name.startswith(("forge/", "hydra_plugins/", "conf/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    environment = Environment.make(tmp_path / "env")
    environment.install("--editable", str(copy))
    shutil.copytree(copy / "conf", copy / "forge" / "conf")
    preset = copy / "conf" / "resilience" / "default.yaml"
    text = preset.read_text()
    assert "lead_s: 120.0" in text
    preset.write_text(text.replace("lead_s: 120.0", "lead_s: 117.0"))
    write_app(tmp_path / "app")
    command = [environment.python, "train.py", "--cfg", "job"]
    assert "lead_s: 117.0" in run(command, tmp_path / "app")
