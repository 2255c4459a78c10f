"""What the process of a job is handed: what a script defines is itself there, and runs once."""

import json
import pickle
import subprocess
import sys
import textwrap
import types

import pytest
from sweeps import App

from forge.launch import payload

REPORT = """
    from forge.launch import local

    def report(told):
        launch = local.launch

        def spy(*given):
            for one in launch(*given):
                value = one._return_value
                print("RETURNED", type(value).__module__, type(value).__name__, value, flush=True)
                told(value)
            return []

        local.launch = spy
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
    return subprocess.run(
        [sys.executable, *program, *app.command(*overrides)[2:]],
        cwd=app.folder,
        text=True,
        timeout=200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def seen(app: App, number: int) -> dict:
    return json.loads((app.sweep_dir / str(number) / "seen.json").read_text())


RICH = """
    import enum, functools, json, sys, threading
    from dataclasses import dataclass, field
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent / "vendored"))
    import hydra
    import tool
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf


    class Mode(enum.Enum):
        slow = 1
        fast = 2


    @dataclass
    class Part:
        modes: list[Mode] = field(default_factory=lambda: [Mode.slow, Mode.fast])


    @dataclass
    class Conf:
        mode: Mode = Mode.slow
        what: str = "look"
        part: Part = field(default_factory=Part)
        doubled: int = "${double:4}"
        tripled: int = "${triple:4}"
        halved: int = "${half:4}"
        negative: int = "${negative:4}"


    class Problem(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")


    class Answer:
        def __init__(self, value):
            self.value = value


    def triple(number):
        return 3 * number


    def audible(function):
        @functools.wraps(function)
        def inner(cfg):
            print("called")
            return function(cfg)
        return inner


    def silent(function):
        def inner(cfg):  # hides the name of what it wraps
            return function(cfg)
        return inner


    OmegaConf.register_new_resolver("double", lambda number: 2 * number)
    OmegaConf.register_new_resolver("triple", triple)
    ConfigStore.instance().store("conf", node=Conf)


    @hydra.main(version_base=None, config_path=None, config_name="conf")
    @silent
    @audible
    def main(cfg):
        back = OmegaConf.to_object(cfg)
        values = {
            "same enum": cfg.mode is Mode.fast and back.part.modes[1] is Mode.fast,
            "same class": isinstance(back, Conf) and isinstance(back.part, Part),
            "typed": Conf.__annotations__["mode"] is Mode,
            "resolved": [cfg.doubled, cfg.tripled, cfg.halved, cfg.negative],
            "tool": tool.NAME,
            "argv": sys.argv,
            "optimize": sys.flags.optimize,
            "dev": sys.flags.dev_mode,
            "warnings": sys.warnoptions,
        }
        Path(HydraConfig.get().runtime.output_dir, "seen.json").write_text(json.dumps(values))
        if cfg.what == "number":
            return 0.5
        if cfg.what == "dict":
            return {"mode": cfg.mode, "list": [1, 2]}
        if cfg.what == "object":
            return Answer(41)
        if cfg.what == "generator":
            return (one for one in range(3))
        if cfg.what == "raise":
            raise Problem("here", "there")
        if cfg.what == "raise lock":
            raise RuntimeError("with a lock", threading.Lock())
        if cfg.what.startswith("exit"):
            print("the last words", flush=True)
            sys.exit({"exit0": 0, "exit3": 3, "exit": None, "exittext": "a complaint"}[cfg.what])


    if __name__ == "__main__":
        def negative(number):
            return -number

        OmegaConf.register_new_resolver("half", lambda number: number // 2)
        OmegaConf.register_new_resolver("negative", negative)

        def told(value):
            if isinstance(value, Answer):
                print("ANSWER", value.value)
            if isinstance(value, dict):
                print("DICT", value["mode"] is Mode.fast)

        from report import report
        report(told)
        main()
"""


def test_the_script_is_itself_in_the_jobs_process(tmp_path):
    """An enum that is not equal to itself takes the other branch in the job, without a word."""
    whats = ["look", "number", "dict", "object", "generator", "raise", "raise lock"]
    whats += ["exit0", "exit3", "exit", "exittext"]
    app = make(tmp_path / "app", RICH, vendored__tool="NAME = 'vendored'")
    flags = ["-O", "-X", "dev", "-W", "error::SyntaxWarning", "-W", "ignore::ResourceWarning"]
    done = run(
        app,
        [*flags, "train.py"],
        "mode=fast",
        "what=" + ",".join(f"'{one}'" for one in whats),
        "hydra.launcher.n_jobs=3",
    )
    assert done.returncode == 0, done.stdout  # the spy returned nothing to raise
    for number in range(len(whats)):
        found = seen(app, number)
        assert found["same enum"], number
        assert found["same class"]
        assert found["typed"], "compiled with the annotations that the script asks for"
        assert found["resolved"] == [8, 12, 2, -4]
        assert found["tool"] == "vendored"
        assert found["argv"][0] == "train.py"
        assert "mode=fast" in found["argv"]
        assert found["optimize"] == 1
        assert found["dev"]
        assert {"error::SyntaxWarning", "ignore::ResourceWarning"} <= set(found["warnings"])
        assert app.job(number).output.count("called") == 1

    states = dict(zip(whats, (app.job(n).state for n in range(len(whats))), strict=True))
    failed = {what for what, state in states.items() if state["state"] == "failed"}
    assert failed == {"raise", "raise lock", "exit3", "exittext"}
    assert {what: states[what]["code"] for what in ("raise", "exit3", "exittext", "exit0")} == {
        "raise": 1,
        "exit3": 3,
        "exittext": 1,
        "exit0": 0,
    }

    returned = [line for line in done.stdout.splitlines() if line.startswith("RETURNED")]
    for index, expected in (
        (1, "RETURNED builtins float 0.5"),
        (2, "RETURNED builtins dict"),
        (3, "RETURNED __main__ Answer"),
        (4, "RETURNED builtins NoneType None"),
        (5, "RETURNED builtins RuntimeError Problem: here and there"),
        (6, "RETURNED builtins RuntimeError RuntimeError: ('with a lock', <unlocked"),
        (7, "RETURNED builtins NoneType None"),
        (9, "RETURNED builtins NoneType None"),
    ):
        assert returned[index].startswith(expected), returned[index]
    assert "ANSWER 41" in done.stdout
    assert "DICT True" in done.stdout
    assert "main returned a generator that cannot be sent to the sweeper" in app.job(4).output
    # What was said last is shown with the failure.
    shown = done.stdout.partition("RETURNED forge.errors JobError job 8 ")[2]
    assert "exit code 3" in shown.splitlines()[0]
    assert "the last words" in shown
    assert "a complaint" in shown


def test_the_traceback_of_the_jobs_own_process_comes_with_the_error(tmp_path):
    """Without the line that failed, a person has to look for the job's log first."""
    app = make(
        tmp_path / "app",
        """
        import hydra

        @hydra.main(version_base=None, config_path=".", config_name="conf")
        def main(cfg):
            raise ValueError("the reason")  # THIS LINE

        if __name__ == "__main__":
            main()
        """,
    )
    done = app.run("what=a")
    assert done.returncode == 1
    assert "ValueError: the reason" in done.stdout
    assert "THIS LINE" in done.stdout


@pytest.mark.parametrize(
    ("start", "call"),
    [
        ("import hydra", "main()"),
        ("import hydra", "sys.exit(main())"),
        ("from hydra.main import main as decorate; import hydra; hydra.main = decorate", "main()"),
    ],
)
def test_a_script_without_a_guard_starts_no_sweep_in_the_sweep(tmp_path, start, call):
    """README's own example has none: each job would start the sweep again, or finish unrun."""
    app = make(
        tmp_path / "app",
        """
        import sys
        from pathlib import Path
        START
        from hydra.core.hydra_config import HydraConfig

        class Here: pass

        @hydra.main(version_base=None, config_path=".", config_name="conf")
        def main(cfg):
            with Path(HydraConfig.get().runtime.output_dir, "runs").open("a") as file:
                file.write("one")
            assert Here.__module__ == "__mp_main__"

        CALL
        with open("after", "a") as file:
            file.write("once")
        """.replace("START", start).replace("CALL", call),
    )
    app.finish("what=a,b")
    for number in (0, 1):
        assert (app.sweep_dir / str(number) / "runs").read_text() == "one"
    if call == "main()":
        assert (app.folder / "after").read_text() == "once", "what follows is the launcher's"


def test_a_script_that_ends_while_it_is_imported_is_no_finished_job(tmp_path):
    """Exit code 0 before main was called: the sweep would count a job that never ran."""
    app = make(
        tmp_path / "app",
        """
        import os, sys
        import hydra

        if "FORGE_JOB_TOKEN" in os.environ:
            sys.exit()

        @hydra.main(version_base=None, config_path=".", config_name="conf")
        def main(cfg):
            pass

        if __name__ == "__main__":
            main()
        """,
    )
    done = app.run("what=a")
    assert done.returncode == 1
    assert app.job(0).state["state"] == "failed"
    assert "train.py ended with None as it was imported" in app.job(0).output


SPAWN = """
    import torch
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(float(index**2))

    @hydra.main(version_base=None, config_path=CONFIG, config_name="conf")
    def main(cfg):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn"
        )
        return torch.stack([batch.sum() for batch in loader])

    if __name__ == "__main__":
        def told(value):
            print("SUM", value.sum())
        from report import report
        report(told)
        main()
"""


def test_spawned_workers_find_a_dataset_of_the_script(tmp_path):
    """macOS spawns by default, and CUDA in workers needs it: the job must not end at the loader."""
    app = make(tmp_path / "app", SPAWN.replace("CONFIG", "'.'"))
    assert "SUM tensor(14.)" in app.finish("what=a")


def test_a_module_with_relative_imports_is_imported_as_one(tmp_path):
    """`python -m project.train` works before the sweep, so it has to in the job and its workers."""
    app = make(
        tmp_path / "app",
        "",
        project__init="",
        project__place="CONFIG = '..'",
        project__train="from .place import CONFIG\n" + textwrap.dedent(SPAWN),
    )
    done = run(app, ["-m", "project.train"], "what=a")
    assert done.returncode == 0, done.stdout + app.job(0).output
    assert "SUM tensor(14.)" in done.stdout


MAIN_ONLY = """
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        with Path(HydraConfig.get().runtime.output_dir, "runs").open("a") as file:
            file.write(f"{main.__module__} ")
"""


@pytest.mark.parametrize(
    "program",
    [["train.py"], ["-m", "project"], ["inner"], ["-c", "from project.app import main; main()"]],
)
def test_other_ways_to_start(tmp_path, program):
    """A script that calls a package's main, `python -m package`, `python folder/`, `python -c`."""
    app = make(
        tmp_path / "app",
        "from project.app import main\nprint('imported')\nmain()",
        project__init="from .app import main",
        project__app=MAIN_ONLY,
        project__main="from .app import main\nmain()",
        inner__main=MAIN_ONLY + "\n    main()",
    )
    (app.folder / "project/main.py").rename(app.folder / "project/__main__.py")
    (app.folder / "inner/main.py").rename(app.folder / "inner/__main__.py")
    done = run(app, program, "+what=a")
    assert done.returncode == 0, done.stdout
    expected = "__mp_main__ " if program == ["inner"] else "project.app "
    assert (app.sweep_dir / "0/runs").read_text() == expected, "ran once"
    if program == ["train.py"]:
        assert "imported" not in app.job(0).output, "main has a name: the script is not needed"


def test_a_function_is_referred_to_by_name_through_its_decorators():
    """By value it would drag its module's globals along, and lose identity with them."""
    found = payload._refer_to(json.dumps)
    assert found == payload._Reference("json", "dumps", 0)
    assert found.resolve() is json.dumps
    unnamed = lambda cfg: cfg  # noqa: E731
    assert payload._refer_to(unnamed) is unnamed
    assert payload._refer_to(print.__self__) is print.__self__


def test_what_stands_below_the_guard_goes_by_value(tmp_path, monkeypatch):
    """It is not there once the script is imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "def there(cfg): return 1\n"
        "if __name__ == '__main__':\n"
        "    def here(cfg): return 2\n"
        "    class Kind: pass\n"
    )
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    exec(script.read_text(), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert payload._guarded() == {"here", "Kind"}
    assert payload._refer_to(main.here) is main.here
    assert payload._refer_to(main.there) == payload._Reference("__main__", "there", 0)
    by_value, needs_main = payload._dump([main.here, main.Kind])
    assert not needs_main
    by_name, needs_main = payload._dump(main.there)
    assert needs_main
    assert pickle.loads(by_name) is main.there
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    function, _ = pickle.loads(by_value)
    assert function(None) == 2
