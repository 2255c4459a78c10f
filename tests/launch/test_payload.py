"""Values sent to the process of a job and back: classes of the script keep their identity."""

import forked
from main_scripts import make, run, seen

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
            "resolved": [cfg.doubled, cfg.tripled, cfg.halved],
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
            sys.exit({"exit0": 0, "exit3": 3, "exittext": "a complaint"}[cfg.what])


    if __name__ == "__main__":
        OmegaConf.register_new_resolver("half", lambda number: number // 2)

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
    """If a copied enum member did not equal the original, the job would silently differ."""
    whats = ["number", "dict", "object", "generator", "raise", "raise lock"]
    whats += ["exit0", "exit3", "exittext"]
    app = make(tmp_path / "app", RICH, vendored__tool="NAME = 'vendored'")
    given = ",".join(f"'{one}'" for one in whats)
    done = app.run("mode=fast", f"what={given}", "hydra.launcher.n_jobs=3")
    assert done.returncode == 0, done.stdout  # the spy returned nothing to raise
    for number in range(len(whats)):
        assert_is_itself(app, number)

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
        (0, "RETURNED builtins float 0.5"),
        (1, "RETURNED builtins dict"),
        (2, "RETURNED __main__ Answer"),
        (3, "RETURNED builtins NoneType None"),
        (4, "RETURNED builtins RuntimeError Problem: here and there"),
        (5, "RETURNED builtins RuntimeError RuntimeError: ('with a lock', <unlocked"),
        (6, "RETURNED builtins NoneType None"),
    ):
        assert returned[index].startswith(expected), returned[index]
    assert "ANSWER 41" in done.stdout
    assert "DICT True" in done.stdout
    assert "main returned a generator that cannot be sent to the sweeper" in app.job(3).output
    # The failure is shown with the last lines of the output.
    shown = done.stdout.partition("RETURNED forge.errors JobError job 7 ")[2]
    assert "exit code 3" in shown.splitlines()[0]
    assert "the last words" in shown
    assert "a complaint" in shown


def assert_is_itself(app, number):
    found = seen(app, number)
    assert found["same enum"], number
    assert found["same class"]
    assert found["typed"], "compiled with the annotations that the script asks for"
    assert found["resolved"] == [8, 12, 2]
    assert found["tool"] == "vendored"
    assert found["argv"][0] == "train.py"
    assert "mode=fast" in found["argv"]
    assert app.job(number).output.count("called") == 1


def test_the_jobs_process_has_python_s_own_options(tmp_path):
    """With `-O` the launcher skips assertions, so its jobs must skip them, too."""
    app = make(tmp_path / "app", RICH, vendored__tool="NAME = 'vendored'")
    flags = ["-O", "-X", "dev", "-W", "error::SyntaxWarning", "-W", "ignore::ResourceWarning"]
    done = run(app, [*flags, "train.py"], "mode=fast", "what=look")
    assert done.returncode == 0, done.stdout
    assert_is_itself(app, 0)
    found = seen(app, 0)
    assert found["optimize"] == 1
    assert found["dev"]
    assert {"error::SyntaxWarning", "ignore::ResourceWarning"} <= set(found["warnings"])


RAISES = """
    import hydra

    def deeper(cfg):
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("the reason") from error  # THIS LINE

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        deeper(cfg)

    if __name__ == "__main__":
        main()
"""


def frames_in(text: str) -> str:
    """The tracebacks, without carets and without the headings of forge."""
    shown = text[text.index("Traceback (most") :].partition("\nSet the env")[0]
    kept = [line for line in shown.splitlines() if line.strip(" ^~")]
    return "\n".join(line for line in kept if not line.startswith("forge"))


def test_an_exception_is_shown_as_hydra_shows_one(tmp_path):
    """Users would overlook the script's frames below 25 lines of Hydra's."""
    app = make(tmp_path / "app", RAISES)
    alone = forked.completed(["train.py"], app.folder)
    raised = frames_in(alone.stdout)
    assert raised.count("  File ") == 3
    done = app.run("what=a")
    assert done.returncode == 1
    assert frames_in(done.stdout) == raised
    assert frames_in(app.job(0).output) == raised
    full = app.run("what=b", HYDRA_FULL_ERROR="1")
    assert full.stdout.count("THIS LINE") == 1
    assert "in run_job" in full.stdout
    assert "in run_job" in app.job(1).output


LOCKED = """
    import threading
    import hydra
    from omegaconf import OmegaConf

    def resolver():
        lock = threading.Lock()
        return lambda: lock.locked()

    OmegaConf.register_new_resolver("locked", resolver())

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        pass

    if __name__ == "__main__":
        main()
"""


def test_a_resolver_that_no_other_process_can_have_is_named(tmp_path):
    """The traceback of the pickler would not name the resolver."""
    app = make(tmp_path / "app", LOCKED)
    done = app.run("what=a")
    assert done.returncode == 78, done.stdout
    assert "the resolver `locked` cannot be passed to the process of a job" in done.stdout
    assert "Traceback" not in done.stdout
