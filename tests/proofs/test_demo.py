"""`make demo`, shortened: it exits with 0 if all went as it tells and not one bit differs."""

import subprocess
import sys

import pytest
from repository import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)  # it shows itself at the pace of people
def test_the_demo_is_struck_five_times_and_finds_the_same_bits(tmp_path):
    demo = [sys.executable, ROOT / "examples" / "demo.py", "--steps", "300"]
    with (tmp_path / "shown.txt").open("w") as shown:
        done = subprocess.run(demo, cwd=tmp_path, stdout=shown, stderr=shown, timeout=800)
    assert done.returncode == 0, (tmp_path / "shown.txt").read_text()
    assert list(tmp_path.glob("outputs/demo/*/demo.png"))
