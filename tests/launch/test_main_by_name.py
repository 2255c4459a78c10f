"""How a job comes to the script's main: imported once, under a name, and never started again."""

import json

import pytest
from main_scripts import make, run

from forge.launch import payload


@pytest.mark.parametrize(
    ("start", "call"),
    [
        *(
            pytest.param("import hydra", call, marks=pytest.mark.proofs)
            for call in ("main()", "sys.exit(main())")
        ),
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
    assert "train.py called sys.exit(None) while it was imported" in app.job(0).output


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

    @hydra.main(version_base=None, config_path=".", config_name="conf")
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
    app = make(tmp_path / "app", SPAWN)
    assert "SUM tensor(14.)" in app.finish("what=a")


POOL = """
    import multiprocessing
    import hydra
    from .place import CONFIG

    class Square:
        def __call__(self, number):
            return number**2

    @hydra.main(version_base=None, config_path=CONFIG, config_name="conf")
    def main(cfg):
        with multiprocessing.get_context("spawn").Pool(1) as workers:
            return sum(workers.map(Square(), range(4)))

    if __name__ == "__main__":
        from report import report
        report(lambda value: print("SUM", value))
        main()
"""
"""Without torch, which a spawned process would import."""


def test_a_module_with_relative_imports_is_imported_as_one(tmp_path):
    """`python -m project.train` works before the sweep, so it has to in the job and its workers."""
    app = make(
        tmp_path / "app",
        "",
        project__init="",
        project__place="CONFIG = '..'",
        project__train=POOL,
    )
    done = run(app, ["-m", "project.train"], "what=a")
    assert done.returncode == 0, done.stdout + app.job(0).output
    assert "SUM 14" in done.stdout


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
    [
        pytest.param(["train.py"], marks=pytest.mark.proofs),
        ["-m", "project"],
        pytest.param(["inner"], marks=pytest.mark.proofs),
        ["-c", "from project.app import main; main()"],
    ],
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
    found = payload.refer_to(json.dumps)
    assert (found.module, found.qualname, found.depth) == ("json", "dumps", 0)
    assert found.resolve() is json.dumps
    unnamed = lambda cfg: cfg  # noqa: E731
    assert payload.refer_to(unnamed) is unnamed
    assert payload.refer_to(print.__self__) is print.__self__
