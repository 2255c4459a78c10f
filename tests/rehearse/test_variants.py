"""One source of a script gives its plain loop, its hasty conversion and its right one."""

import ast

import pytest
from variants import SCRIPTS, variants, write_all

SOURCE = """\
    import torch
 wf import forge

p   def main():
 w  def main(cfg):
  f def main():
 wf     with forge.Run(POLICY) as run:
p           for step in range(3):
 wf         for step in run.steps(3):
                train(step)

p               print(step)
        done()
"""


def test_lines_belong_to_the_variants_of_their_margin():
    """And without `with forge.Run` its block moves out, as the plain loop was written."""
    made = variants(SOURCE)
    assert made["plain"] == (
        "import torch\n\ndef main():\n    for step in range(3):\n        train(step)\n\n"
        "        print(step)\n    done()\n"
    )
    assert made["written"] == (
        "import torch\nimport forge\n\ndef main(cfg):\n    with forge.Run(POLICY) as run:\n"
        "        for step in run.steps(3):\n            train(step)\n\n    done()\n"
    )
    assert made["fixed"] == made["written"].replace("cfg", "")


@pytest.mark.parametrize("source", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_each_variant_is_a_script_and_none_is_another(source):
    """A slip in a margin shows here, not after the minutes of `rehearse_all.py`."""
    made = variants(source.read_text())
    assert made.keys() - {"plain"} == {"written", "fixed"}
    assert len(set(made.values())) == len(made)
    for name, text in made.items():
        ast.parse(text)
        assert ("forge.Run(" in text) == (name != "plain")


def test_all_are_written_where_they_are_run(tmp_path):
    """`python tests/support/variants.py` shows them."""
    write_all(tmp_path)
    assert len(list(tmp_path.glob("*/fixed.py"))) == len(list(SCRIPTS.glob("*.txt"))) > 20
    assert (tmp_path / "moco" / "plain.py").read_text().startswith('"""Train')
