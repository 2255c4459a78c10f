"""The report of a sweep in a browser: every figure is drawn, and nothing needs a network."""

import os
import re
import shutil
import subprocess

import pytest
from harness import made_once
from looked_at import CONF, MISBEHAVE, TRAINING
from sweeps import App

from forge.cli import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def swept(shared_folder):
    """A sweep whose jobs ended, raised, were killed once, and left."""

    def make(folder):
        app = App(folder / "app", TRAINING, CONF, misbehave=MISBEHAVE)
        assert app.run("mode=ends,raises,dies,exits", "lr=0.2,0.3").returncode == 1

    return made_once(shared_folder / "reported", make) / "app" / "sweep"


@pytest.fixture
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        end = pytest.fail if os.environ.get("FORGE_REQUIRE_BROWSER") else pytest.skip
        end(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


def test_every_figure_is_drawn_without_a_network(swept, browser, tmp_path):
    """plotly draws an `svg` for each figure; a script that fails writes to the console."""
    page = tmp_path / "report.html"
    assert report.main([str(swept), "-o", str(page)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'own'}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--dump-dom"]
    options += ["--virtual-time-budget=20000", "--window-size=1400,1000"]
    done = subprocess.run(
        [browser, *options, page.as_uri()], capture_output=True, text=True, timeout=200, check=True
    )
    wanted = len(re.findall(r'class="[^"]*plotly-graph-div', page.read_text()))
    assert wanted >= 5
    drawn = re.findall(r'class="[^"]*plotly-graph-div[^"]*js-plotly-plot', done.stdout)
    assert len(drawn) == wanted
    assert done.stdout.count('class="main-svg"') >= wanted
    assert not re.findall(r"CONSOLE.*(?:Error|Failed)", done.stderr)
