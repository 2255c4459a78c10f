"""A new job starts with the state of a file, or does not start."""

import collections
import copy
import os
import re
from pathlib import Path

import pytest
import torch
from forked import completed
from torch import nn

from forge.config.schema import CheckpointConfig
from forge.errors import CheckpointError, ConfigError, StateMismatch
from forge.jobdir import ledger
from forge.state.registry import StateRegistry
from forge.training.start import init_from


def objects(seed, rate=0.1, width=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def states(of):
    return {name: copy.deepcopy(one.state_dict()) for name, one in of.items()}


def prefixed(state, prefix):
    found = collections.OrderedDict((f"{prefix}{key}", value) for key, value in state.items())
    metadata = {f"{prefix}{key}".rstrip("."): value for key, value in state._metadata.items()}
    found._metadata = {"": {"version": 1}, **metadata}
    return found


def lightning(of, prefix="model.", **extra):
    return {
        "epoch": 4,
        "global_step": 400,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": prefixed(of["model"].state_dict(), prefix),
        "loops": {},
        "hyper_parameters": {"width": 3},
        **extra,
    }


SOURCES = {
    "by name, with more in it": (
        lambda of: {**states(of), "epoch": 3},
        {"model"},
        "Not loaded: optimizer, schedule, epoch. Left as the script built them: optimizer,",
    ),
    "by name, the model alone": (
        lambda of: {"model": of["model"].state_dict()},
        {"model"},
        "Left as the script built them: optimizer, schedule",
    ),
    "state_dict": (lambda of: of["model"].state_dict(), {"model"}, "a state_dict"),
    "state_dict with a prefix": (
        lambda of: prefixed(of["model"].state_dict(), "module._orig_mod."),
        {"model"},
        "a state_dict",
    ),
    "plain dict of tensors": (lambda of: dict(of["model"].state_dict()), {"model"}, "state_dict"),
    "Lightning": (
        lambda of: lightning(of, optimizer_states=[of["optimizer"].state_dict()]),
        {"model"},
        "Not loaded: epoch, global_step, pytorch-lightning_version, loops, hyper_parameters,"
        " optimizer_states. Left as the script built them: optimizer,"
        " schedule.",
    ),
    "Lightning, no prefix": (lambda of: lightning(of, prefix=""), {"model"}, "its state_dict"),
}


def config(path, **more):
    return CheckpointConfig(init_from=str(path), **more)


@pytest.mark.parametrize("case", SOURCES)
def test_what_a_file_holds_goes_where_it_belongs(case, tmp_path, caplog):
    """Other objects do not change; a message names what was loaded and what was not."""
    caplog.set_level("INFO")
    make, taken, said = SOURCES[case]
    source, target = objects(5), objects(1, rate=0.7)
    torch.save(make(source), tmp_path / "source.pt")
    before, expected = states(target), states(source)
    done = init_from.load(config(tmp_path / "source.pt"), StateRegistry(target))
    for name, found in states(target).items():
        wanted = expected[name] if name in taken else before[name]
        assert text_of(found) == text_of(wanted), name
        assert text_of(found) != text_of(before[name] if name in taken else expected[name]), name
    assert set(done["taken"]) == taken
    assert done["source"] == str(tmp_path / "source.pt")
    assert said in caplog.text


def text_of(state):
    """All values, without truncation."""
    return repr([(k, getattr(v, "tolist", v.__str__)()) for k, v in flat(state)])


def flat(state, path=""):
    if isinstance(state, dict):
        for key, value in state.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(state, list):
        for i, value in enumerate(state):
            yield from flat(value, f"{path}[{i}]")
    else:
        yield path, state


def test_old_formats_of_layers_are_converted_though_a_prefix_is_taken_off(tmp_path):
    """BatchNorm version 1 has no num_batches_tracked; the version is in the metadata."""
    source, seen = objects(2)["model"], []
    torch.save(prefixed(source.state_dict(), "net."), tmp_path / "source.pt")
    target = objects(1)["model"]
    target[1].register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *rest: seen.append((prefix, metadata))
    )
    init_from.load(config(tmp_path / "source.pt"), StateRegistry({"net": target}))
    assert ("1.", {"version": 2}) in seen


MISFITS = {
    "another width": (
        lambda: objects(1, width=4)["model"].state_dict(),
        r"model\.0\.weight: float32\[4, 2\] in the checkpoint, float32\[3, 2\] in the object",
    ),
    "a prefix that not all keys have": (
        lambda: {**prefixed(objects(1)["model"].state_dict(), "model."), "loss.w": torch.ones(1)},
        r"model\.0\.weight: nothing in the checkpoint, float32\[3, 2\] in the object",
    ),
    "a prefix without a dot": (
        lambda: prefixed(objects(1)["model"].state_dict(), "model_"),
        r"nothing in the checkpoint",
    ),
    "only an optimizer": (
        lambda: states({"optimizer": objects(3)["optimizer"]}),
        r"expected states under the names given to forge\.Run .* found optimizer",
    ),
    "a tensor": (lambda: torch.ones(2), "expected a dict in the file, found a Tensor"),
    "other names": (
        lambda: {"net": {}, "optim": {}},
        r"expected states under the names .*model, optimizer.*net",
    ),
    "nothing": (dict, "found nothing"),
    "the second of two": (
        lambda: {
            "model": objects(3)["model"].state_dict(),
            "ema": objects(3, width=4)["model"].state_dict(),
        },
        r"ema\.0\.weight: float32\[4, 2\] in the checkpoint, float32\[3, 2\] in the object",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named_and_changes_nothing(case, tmp_path):
    """forge compares everything before it loads anything, so no model is half loaded."""
    make, complaint = MISFITS[case]
    torch.save(make(), tmp_path / "source.pt")
    target = objects(2) | ({"ema": objects(2)["model"]} if case == "the second of two" else {})
    before = text_of(states(target))
    with pytest.raises(StateMismatch, match=complaint) as error:
        init_from.load(config(tmp_path / "source.pt"), StateRegistry(target))
    assert str(error.value).startswith("`resilience.checkpoint.init_from=")
    assert text_of(states(target)) == before


def test_a_state_dict_for_one_of_two_modules_is_not_guessed(tmp_path):
    """A student must not get the teacher's weights because it was named first."""
    torch.save(objects(1)["model"].state_dict(), tmp_path / "source.pt")
    two = {"student": objects(1)["model"], "teacher": objects(2)["model"]}
    with pytest.raises(StateMismatch, match=r"forge\.Run was given 2 \(student, teacher\)"):
        init_from.load(config(tmp_path / "source.pt"), StateRegistry(two))
    torch.save({"teacher": objects(3)["model"].state_dict()}, tmp_path / "named.pt")
    assert init_from.load(config(tmp_path / "named.pt"), StateRegistry(two))["taken"] == ["teacher"]


class Executes:
    """Executes code when it is unpickled, which `weights_only` refuses."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_file_with_code_is_refused_by_the_key_that_would_allow_it(tmp_path, monkeypatch):
    """The file executes nothing until the user has set that key."""
    monkeypatch.chdir(tmp_path)
    model = objects(3)["model"]
    torch.save({"model": model.state_dict(), "x": Executes()}, "source.pt")
    target = {"model": objects(1)["model"]}
    with pytest.raises(
        CheckpointError, match=r"`resilience\.checkpoint\.init_trust_pickle` to true"
    ):
        init_from.load(config("source.pt"), StateRegistry(target))
    assert not Path("executed").exists()
    init_from.load(config("source.pt", init_trust_pickle=True), StateRegistry(target))
    assert Path("executed").exists()
    assert torch.equal(target["model"][0].weight, model[0].weight)


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\3\4" + b"\0" * 99], ids=repr)
def test_what_torch_cannot_read_is_an_error_of_ours(content, is_trusted, tmp_path):
    """One error with the path, instead of the eight kinds of exception that torch.load raises."""
    (tmp_path / "source.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"source\.pt(: | contains more| is not a torch)"):
        init_from.load(
            config(tmp_path / "source.pt", init_trust_pickle=is_trusted), StateRegistry(objects(1))
        )


def test_what_is_not_there_is_a_problem_of_the_config(tmp_path):
    """As for every key with an impossible value, the exit code is 78."""
    with pytest.raises(ConfigError, match=r"init_from=.*does not exist"):
        init_from.load(config(tmp_path / "no"), StateRegistry(objects(1)))


# -- whole jobs ------------------------------------------------------------------------------------

TRAIN = """
import sys, torch, forge
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(2, 1)
checkpoint = {"dir": sys.argv[2], "init_from": sys.argv[3] or None}
with forge.Run({"checkpoint": checkpoint, "health": {"enabled": False}}, model=model) as run:
    print("begins", run.step, run.resumed_from, model.weight.tolist())
    for step in run.steps(int(sys.argv[4])):
        with torch.no_grad():
            model.weight += 1
print("ends", run.step, model.weight.tolist())
"""


def train(folder, *arguments, code=0, **env):
    done = completed(["-c", TRAIN, *map(str, arguments)], folder, joins_output=False, **env)
    assert done.returncode == code, done.stdout + done.stderr
    return re.findall(r"^(\w+) (\d+) .*?(\[.*\])$", done.stdout, re.MULTILINE), done.stderr


def test_a_job_begins_with_another_s_weights_and_then_goes_on_with_its_own(tmp_path):
    """The step stays 0; the file can change or vanish once the job has a checkpoint."""
    (_, first), _ = train(tmp_path, 1, "first", "", 3)
    (begin, end), said = train(tmp_path, 2, "second", "first", 2)
    assert begin == ("begins", "0", first[2])
    assert end[1] == "2"
    assert "Training starts from model of" in said
    assert "checkpoint step_3), at step 0" in said
    events = [
        event for attempt in ledger.read(tmp_path / "second").attempts for event in attempt.events
    ]
    (imported,) = [event for event in events if event["kind"] == "import"]
    assert imported["source"] == str(tmp_path / "first")
    assert imported["taken"] == ["model"]
    (tmp_path / "first").rename(tmp_path / "gone")
    (begin, _), said = train(tmp_path, 3, "second", "first", 4, FORGE_RESUME="changed")
    assert begin == ("begins", "2", end[2])
    assert "Training starts from" not in said
    _, said = train(tmp_path, 4, "third", "first", 1, code=78)
    assert f"{tmp_path / 'first'} does not exist" in said


APP = """
import hydra, torch, forge

@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    with forge.Run(cfg.resilience, model=model) as run:
        print("weight", model.weight.tolist())
        for step in run.steps(1):
            pass

main()
"""


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "train.yaml").write_text(
        "defaults: [resilience: default, _self_]\nhydra: {job: {chdir: true}}\n"
    )

    def run(*arguments):
        done = completed([*arguments], tmp_path)
        return done.returncode, done.stdout

    return run


SOURCE = "resilience.checkpoint.init_from=weights.pt"


def test_under_hydra_a_relative_path_begins_where_the_command_was_started(app, tmp_path):
    """It is not relative to the job's directory, to which Hydra can change."""
    torch.save(
        {"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.ones(1)}, tmp_path / "weights.pt"
    )
    code, said = app("app.py", SOURCE, "hydra.run.dir=out")
    assert code == 0, said
    assert "weight [[3.0, 4.0]]" in said
    (tmp_path / "weights.pt").unlink()
    code, said = app("app.py", SOURCE, "hydra.run.dir=out")
    assert code == 0, said


@pytest.mark.parametrize(
    "command",
    [
        ["app.py", SOURCE],
        ["app.py", "-m", "hydra/launcher=local", "hydra.launcher.n_jobs=1", SOURCE],
        ["-m", "forge", "plan", "app.py", SOURCE],
    ],
    ids=["run", "sweep", "plan"],
)
def test_a_path_that_leads_nowhere_is_refused_at_the_launch(command, app, tmp_path):
    """The error comes at once, and not after an hour in the queue."""
    code, said = app(*command)
    assert code != 0
    assert f"{tmp_path / 'weights.pt'} does not exist" in said
    assert "weight [" not in said


def test_a_checkpoint_brings_what_only_its_optimizer_held(open_store, tmp_path):
    """Momentum without its weights would be half of the state."""

    def build(value):
        bare = nn.Parameter(torch.full((2,), value))
        return StateRegistry({"o": torch.optim.SGD([bare], lr=1.0, momentum=0.9)}), bare

    live, _ = build(3.0)
    store = open_store(tmp_path / "job")
    saved = copy.deepcopy(live.capture())
    store.commit(store.snapshot(1, {"live": saved}, copy=False))
    target, bare = build(0.0)
    init_from.load(CheckpointConfig(init_from=str(tmp_path / "job")), target)
    assert bare.tolist() == [3, 3]
    saved["unregistered"]["o"]["param_groups[0][0]"] = torch.ones(5)
    store.commit(store.snapshot(2, {"live": saved}, copy=False))
    with pytest.raises(StateMismatch, match=r"o\.param_groups\[0\]\[0\]: .*, float32\[2\] in"):
        init_from.load(CheckpointConfig(init_from=str(tmp_path / "job")), target)
    assert bare.tolist() == [3, 3]
