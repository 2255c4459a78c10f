"""The suites of Hydra, on the oldest Hydra that forge takes and the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def installed(version: str) -> Path:
    """Where a version lies; CI must not pass without it."""
    place = Path(sys.prefix, "hydras", version)
    if not place.is_dir():
        end = pytest.fail if os.environ.get("FORGE_REQUIRE_HYDRAS") else pytest.skip
        end(f"hydra-core {version} is not in {place}: `make proofs` installs it there")
    return place


def test_the_options_are_those_of_the_next_hydra_submitit_launcher():
    """Its keys and types are ours by inheritance: a new one must not wait for us."""
    path = [str(installed("1.4.0rc3")), str(ROOT), os.environ["PYTHONPATH"]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    code = "import hydra_plugins.hydra_submitit_launcher.config as c; print(c.SlurmQueueConf())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert "use_srun=True" in done.stdout, done.stderr
    done = subprocess.run(
        [*command, "--noconftest", str(ROOT / "tests/launch/slurm/test_sbatch.py")],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.3.2", "1.4.0rc3"])
def test_the_suites_pass_on(version, tmp_path):
    """Labs pin what they have: a launcher that needs the newest Hydra is no launcher for them."""
    place = installed(version)
    given = os.environ["PYTHONPATH"]  # tests/conftest.py's quick starts
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--noconftest", "--basetemp", str(tmp_path / "runs")]
    command += ["-k", "not InBatches"]  # the sweeper's business more than the launcher's
    done = subprocess.run(
        [*command, str(ROOT / "tests/launch/test_hydra_suites.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(place), str(ROOT), given])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    code = f"import hydra; assert hydra.__version__ == {version!r}, hydra.__version__"
    env = os.environ | {"PYTHONPATH": str(place)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert " passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("version", ["1.3.2", "1.4.0rc3"])
def test_private_parts_and_presets_are_as_needed_on(version):
    """What is not promised may go with any release; and warnings are errors in these tests."""
    path = os.pathsep.join([str(installed(version)), str(ROOT)])
    tests = ["compat/test_of_hydra.py", "compat/test_of_omegaconf.py", "config/test_presets.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    done = subprocess.run(
        [*command, *(str(ROOT / "tests" / one) for one in tests)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("example", ["train.py", "train_plain.py"])
@pytest.mark.parametrize("version", ["1.3.2", "1.4.0rc3"])
def test_the_examples_run_without_a_warning_on(version, example, tmp_path):
    """1.3 warns where `version_base` is left out, 1.4 where it is given."""
    path = os.pathsep.join([str(installed(version)), str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-W", "default", str(ROOT / "examples" / example), "--cfg", "job"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert "steps:" in done.stdout
    assert "Warning" not in done.stdout
