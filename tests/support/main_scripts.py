"""Apps of any shape for sweeps: a script, modules beside it, and other ways to start it."""

import json
import subprocess
import sys
import textwrap
from functools import partial

import warm
from sweeps import App

REPORT = """
    from forge.launch.local import launcher

    def report(told):
        launch = launcher.launch

        def spy(*given):
            for one in launch(*given):
                value = one._return_value
                print("RETURNED", type(value).__module__, type(value).__name__, value, flush=True)
                told(value)
            return []

        launcher.launch = spy
"""
"""A module beside the script: tells what the sweeper would get, and raises nothing."""


def make(folder, train: str, conf: str = "what: none\n", **files: str) -> App:
    """A folder with `train.py` and, for `package__module=text`, others."""
    app = App(folder, train, conf)
    for name, text in {"report": REPORT, **files}.items():
        path = folder / name.replace("__", "/").replace("/init", "/__init__")
        path = path.with_name(path.name + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return app


def run(app: App, program: list[str], *overrides: str) -> subprocess.CompletedProcess:
    """The sweep, started by another command line than `python train.py`."""
    is_folder = (app.folder / program[0]).is_dir()  # which only Python itself can run
    begin = subprocess.run if is_folder else partial(warm.run, is_parent=True)
    return begin(
        [sys.executable, *program, *app.command(*overrides)[2:]],
        cwd=app.folder,
        text=True,
        timeout=200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def seen(app: App, number: int) -> dict:
    return json.loads((app.sweep_dir / str(number) / "seen.json").read_text())
