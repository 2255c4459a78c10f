"""The scripts of docs/how-to/other-loops.md: as their plain forms, and after a stop and a kill."""

import re

import pytest
from forked import completed, run
from repository import ROOT

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))
PLAIN = """
import itertools, types
class Plain:
    state, every_function, step = {}, None, 0
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def every(self, number):
        def keep(function): self.every_function = number, function
        return keep
    def steps(self, n, loader=None):
        batches = itertools.chain.from_iterable(itertools.repeat(loader)) if loader else None
        for step in range(n):
            yield (step, next(batches)) if loader else step
            self.end_step()
    def epochs(self, n): return range(n)
    def batches(self, loader):
        for batch in loader:
            yield self.step, batch
            self.end_step()
    def end_step(self):
        self.step += 1
        if self.every_function and self.step % self.every_function[0] == 0:
            self.every_function[1](self.step)
"""


def plain_form(text):
    """The script without forge: torch's own calls in the place of `run.update`."""
    clipped = r"torch.nn.utils.clip_grad_norm_(model.parameters(), \3); \2.step()"
    text = re.sub(r"run\.update\((\w+), (\w+), clip_norm=([\d.]+)\)", clipped, text)
    text = re.sub(r"run\.update\((\w+), (\w+)\)", r"\2.step()", text)
    text = re.sub(r"with forge\.Run\(.*\) as run:", "with Plain() as run:", text)
    return PLAIN + text.replace("import forge\n", "")


def last_line(path):
    return path.read_text().rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_ends_as_its_plain_form_and_as_if_nobody_had_struck_it(recipe, tmp_path):
    """A GAN that was converted as an earlier page taught ended with other numbers."""
    (tmp_path / "plain.py").write_text(plain_form(recipe.read_text()))
    plain = completed(["plain.py"], tmp_path)
    assert plain.returncode == 0, plain.stdout
    expected = plain.stdout.rstrip().rpartition("\n")[2]
    for kills in ([], [({"33": "TERM"}, 143), ({"51": "KILL"}, -9)]):
        folder = tmp_path / f"{len(kills)} strikes"
        folder.mkdir()
        output = folder / "output.txt"
        for strikes, code in (*kills, ({}, 0)):
            assert run([str(recipe)], folder, output, kills=strikes) == code, output.read_text()
        assert last_line(output) == expected
