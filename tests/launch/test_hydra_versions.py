"""The suites of Hydra once more, on the oldest Hydra that forge takes and on the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.proofs, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["1.3.2", "1.4.0rc3"])
def test_the_suites_pass_on(version, tmp_path):
    """Labs pin what they have: a launcher that needs the newest Hydra is no launcher for them."""
    place = Path(sys.prefix, "hydras", version)
    if not place.is_dir():
        pytest.skip(f"hydra-core {version} is not in {place}: `make test` installs it there")
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
