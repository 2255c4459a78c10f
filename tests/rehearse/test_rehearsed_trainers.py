"""`forge rehearse` of the page's scripts, and of a Trainer with an attribute that is not saved."""

import os
import re
import sys

import pytest
import warm
from repository import ROOT
from trained import OFFLINE

pytestmark = [pytest.mark.proofs, pytest.mark.slow, pytest.mark.timeout(1800)]

GALLERY = ROOT / "examples" / "gallery"
SCALED = '''class Scaled(ForgeTrainer):
    """Scales the learning rate by a running mean."""

    mean = 1.0

    def training_step(self, *given, **options):
        loss = super().training_step(*given, **options)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        for group in self.optimizer.param_groups:
            group["lr"] *= self.mean
        return loss


def main('''


@pytest.fixture
def rehearse(rehearsed, monkeypatch):
    """Rehearse a script; returns the exit code and the output."""

    def rehearse(text):
        for name, value in OFFLINE.items():
            monkeypatch.setenv(name, value)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, [inherited, warm.FRAMEWORKS]))
        monkeypatch.setenv("PYTHONPATH", path)
        (rehearsed.folder / "train.py").write_text(text)
        code = rehearsed.run_command([sys.executable, "train.py"], timeout_s=1700)
        return code, rehearsed.output

    return rehearse


@pytest.mark.parametrize("name", ["huggingface", "accelerated"])
def test_the_scripts_of_the_page_are_identical(name, rehearse):
    """The times in the Trainer's log history differ between two uninterrupted runs."""
    code, output = rehearse((GALLERY / f"{name}.py").read_text())
    assert code == 0, output
    assert "Not known to resume exactly" not in output


def test_an_attribute_of_a_subclass_is_named_and_none_of_the_trainer_s_own(rehearse):
    """The Trainer has dozens of its own that differ after a resume and do no harm."""
    text = (
        (GALLERY / "huggingface.py")
        .read_text()
        .replace("def main(", SCALED)
        .replace("= ForgeTrainer(", "= Scaled(")
    )
    code, output = rehearse(text)
    assert code == 1, output
    named = re.findall(r"^    \S+: `(.*?)`: ", output, re.MULTILINE)
    assert named == ["trainer.mean"], output
