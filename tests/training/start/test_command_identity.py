"""The identity of a job without Hydra: `config=`, or else the arguments of the command."""

import json

import forked
import pytest
import warm

TRAIN = """
import argparse, dataclasses, os, signal, sys
import torch
import forge

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--fast", action="store_true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("files", nargs="*")


@dataclasses.dataclass
class Settings:
    lr: float
    model: dict


def config_of(args):
    kind = os.environ.get("CONFIG")
    if kind == "namespace":
        del args.workers
        args.device, args.local_rank = torch.device("cpu"), os.getpid()
        return args
    model = {"width": 3, "sizes": [args.seed, None, True], "activation": torch.relu}
    if kind == "dataclass":
        return Settings(args.lr, model)
    return {"lr": args.lr, "model": model} if kind == "mapping" else None


def main():
    args = parser.parse_args()
    if "NOTEBOOK" in os.environ:
        del sys.modules["__main__"].__file__
    torch.manual_seed(args.seed)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    config = config_of(args)
    known = {} if config is None else {"config": config}
    policy = {"checkpoint": {"dir": "ck"}}
    with forge.Run(policy, model=model, optimizer=optimizer, **known) as run:
        for step in run.steps(8):
            model(torch.randn(4, 3)).square().mean().backward()
            run.update(0.0, optimizer)
            if str(step) == os.environ.get("STOP"):
                os.kill(os.getpid(), signal.SIGTERM)
    print("wish:", os.environ.get("FORGE_RESUME"))


if __name__ == "__main__":
    main()
"""


class Program:
    """A script in a folder, started several times with one checkpoint directory."""

    def __init__(self, folder):
        self.folder = folder
        self.script = "train.py"
        (folder / "train.py").write_text(TRAIN)

    def start(self, *words, **env):
        return forked.completed([self.script, *words], self.folder, **env)

    def begin(self, *words, **env):
        begun = self.start(*words, STOP="3", **env)
        assert begun.returncode == 143, begun.stdout
        return begun.stdout

    @property
    def record(self):
        return self.folder / "ck/job.json"

    def forget_words(self):
        """Rewrite job.json as by a version of forge that did not record arguments."""
        from forge.training.start import checkpoint_owner

        content = json.loads(self.record.read_text())
        for one in content["jobs"]:
            one.pop("words", None)
        content["checksum"] = checkpoint_owner._checksum(content)
        self.record.write_text(json.dumps(content))


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def test_a_loop_over_seeds_in_one_directory_ends_at_the_second_seed(program):
    """Otherwise there would be as many copies of the first result as there are seeds."""
    assert program.start("--seed", "0").returncode == 0
    refused = program.start("--seed", "7", "--fast")
    assert refused.returncode == 78, refused.stdout
    assert "--seed: 0 before, 7 now" in refused.stdout
    assert "--fast: (not set) before, true now" in refused.stdout
    again = program.start("--seed", "0")
    assert again.returncode == 0
    assert "already finished at step 8" in again.stdout


def test_the_printed_line_takes_the_other_arguments_on_once(program):
    program.begin("--seed", "0")
    refused = program.start("--seed", "7")
    assert refused.returncode == 78, refused.stdout
    assert "env FORGE_RESUME=changed" in refused.stdout
    taken = warm.run_printed(refused.stdout)
    assert taken.returncode == 0, taken.stdout
    assert "resumes at step 4" in taken.stdout
    assert "wish: None" in taken.stdout, "a later Run, or a child, would take a change on as well"
    assert program.start("--seed", "7").returncode == 0
    assert program.start("--seed", "0").returncode == 78
    restarted = program.start("--seed", "0", FORGE_RESUME="changed", TORCHELASTIC_RESTART_COUNT="1")
    assert restarted.returncode == 78, "whoever restarts a job restarts it with its environment"
    assert "expected same or changed" in program.start(FORGE_RESUME="yes").stdout


def test_the_command_that_a_stop_prints_resumes(program):
    stopped = program.begin("--seed", "3", "a file", "--lr=0.2", "--local-rank", "1")
    resumed = warm.run_printed(stopped)
    assert resumed.returncode == 0, resumed.stdout
    assert "resumes at step 4" in resumed.stdout


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (["--seed=1"], ["--seed", "1"], "(arguments): --seed=1 before, --seed 1 now"),
        (["--lr", "1", "--seed", "2"], ["--seed", "2", "--lr", "1"], "(arguments): --lr 1 --seed"),
        (["a", "b"], ["b", "a"], "(argument 1): a before, b now"),
        (["lr=1", "a"], ["lr=2", "a"], "lr: 1 before, 2 now"),
        (["--lr", "-1e-3"], ["--lr", "-1e-4"], "--lr: -1e-3 before, -1e-4 now"),
        (["x" * 99 + "1"], ["x" * 99 + "2"], "…" + "x" * 40 + "1 before, …" + "x" * 40 + "2 now"),
        ([], ["\x1b[2J"], "(argument 1): (not set) before, "),
    ],
)
def test_what_differs_is_named_by_option(before, now, text):
    """For display only: forge compares the arguments in their order."""
    from forge.jobdir import config_changes
    from forge.jobdir.identity import Identity

    found = config_changes.differences(*(Identity("train", "", None, one) for one in (before, now)))
    assert text in config_changes.listed(found)
    assert "\x1b" not in config_changes.listed(found)


def test_the_local_rank_does_not_count(program):
    program.begin("--local-rank=0", "--local-rank", "1", "--seed", "5")
    assert program.start("--seed", "5", "--local_rank", "3").returncode == 0
    assert program.start("--seed", "4", "--local_rank", "5").returncode == 78


@pytest.mark.parametrize(
    "command", [["-m", "package"], ["-c", "import package.__main__ as m; m.main()"]]
)
def test_a_package_and_a_line_of_python_have_arguments_too(program, command):
    (program.folder / "package").mkdir()
    (program.folder / "package/__init__.py").touch()
    (program.folder / "train.py").rename(program.folder / "package/__main__.py")
    first, *rest = command
    program.script = first
    program.begin(*rest, "--seed", "1")
    assert "--seed: 1 before, 2 now" in program.start(*rest, "--seed", "2").stdout
    assert program.start(*rest, "--seed", "1").returncode == 0


def test_a_job_whose_arguments_were_not_known_takes_them_on_with_a_notice(program):
    """An earlier version, or a notebook, wrote the job.json of the job."""
    program.begin("--seed", "1")
    program.forget_words()
    resumed = program.start("--seed", "1", STOP="5")
    assert resumed.returncode == 143, resumed.stdout
    assert "did not contain the job's config" in resumed.stdout
    refused = program.start("--seed", "2")
    assert refused.returncode == 78, refused.stdout
    assert "did not contain" not in program.start("--seed", "1").stdout


def test_a_notebook_has_no_arguments(program):
    """A notebook's kernel gets another file name each time."""
    program.begin("--seed", "1", NOTEBOOK="1")
    assert program.start("--seed", "2", STOP="5", NOTEBOOK="1").returncode == 143
    assert "did not contain the job's config" in program.start("--seed", "3").stdout
    left = program.start("--seed", "3", NOTEBOOK="1")
    assert left.returncode == 78
    assert (
        "(config): not known (only the arguments of the command are known) before, not known now"
        in left.stdout
    )


@pytest.mark.parametrize("kind", ["namespace", "dataclass", "mapping"])
def test_what_config_holds_makes_the_job_and_nothing_else_does(program, kind):
    """The number of workers, a logger's id and `--resume` can change: they are not in it."""
    begun = program.begin("--lr", "0.1", "--seed", "4", CONFIG=kind)
    odd = "device" if kind == "namespace" else "model.activation"
    assert begun.count(f"`config=`: {odd} cannot be compared") == 1
    refused = program.start("--lr", "0.2", "--seed", "4", CONFIG=kind)
    assert refused.returncode == 78, refused.stdout
    assert "lr: 0.1 before, 0.2 now" in refused.stdout
    other = program.start("--seed", "5", CONFIG=kind)
    shown = (
        "seed: 4 before, 5 now" if kind == "namespace" else "model.sizes: [4, null, true] before"
    )
    assert shown in other.stdout
    unnamed = program.start("--lr", "0.1", "--seed", "4")
    assert (
        "(config): known before, not known (only the arguments of the command are known) now"
        in unnamed.stdout
    )
    assert program.start("--workers", "3", "--seed", "4", CONFIG=kind).returncode == 0


def test_a_config_of_another_type_is_rejected():
    import forge

    for wrong in (["lr"], "lr=1", 3):
        with pytest.raises(forge.Exit, match=r"config=.*expected an argparse.Namespace") as raised:
            forge.Run(config=wrong)
        assert raised.value.code == 78
