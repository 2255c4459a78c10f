"""Lightning's Trainer under `ForgeCallback`; many more places are hit in `make proofs`."""

import importlib
import sys

import pytest
import readme
from lightning_jobs import LightningJob, run_function, run_script
from repository import ROOT
from rows import few

GALLERY = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "how-to" / "lightning.md"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run of a script."""
    done = {}

    def whole(script):
        if script not in done:
            done[script] = LightningJob(tmp_path_factory.mktemp(script), script)
            done[script].run_to_end()
        return done[script]

    return whole


@pytest.mark.parametrize("script", few(1, ["automatic", "stream"]))
def test_forge_changes_nothing(script, whole, tmp_path):
    """The same bits as without forge, which somebody adds for its restarts alone."""
    plain = LightningJob(tmp_path, script, is_plain=True)
    plain.run_to_end()
    assert plain.different_ends(whole(script)) == []


@pytest.mark.parametrize(
    ("script", "attempts"),
    few(
        1,
        [
            ("automatic", [({"step 20": "TERM"}, 143), ({"validation 3": "USR1"}, 75)]),
            ("stream", [({"step 17": "TERM"}, 143), ({"step 29": "KILL"}, -9)]),
            ("datamodule", [({"step 26": "KILL"}, -9), ({"step 18": "TERM"}, 143)]),
            ("combined", [({"step 12": "USR1"}, 75)]),
            ("datamodule", [({"step 17": "TERM"}, 143), ({"step 30": "USR1"}, 75)]),
        ],
    ),
)
def test_a_stopped_training_ends_with_the_same_bits(script, attempts, whole, tmp_path):
    """Weights, optimizer, schedules, callbacks, logged values and the next random numbers."""
    job = LightningJob(tmp_path, script)
    job.run_to_end(*attempts)
    assert job.differences(whole(script)) == []
    if all(code != -9 for _, code in attempts):
        assert job.num_repeated == 0


def test_the_script_of_the_page(tmp_path):
    """Killed once, it ends with the line that the page shows; so does the one without forge."""
    ends = {}
    for name, script, attempts in (
        ("before", "lightning_before.py", []),
        ("stopped", "lightning_trainer.py", [({"260": "KILL"}, -9)]),
    ):
        (tmp_path / name).mkdir()
        for kills, code in (*attempts, ({}, 0)):
            found, printed = run_script(GALLERY / script, tmp_path / name, kills=kills)
            assert found == code, printed
        ends[name] = [line for line in printed.splitlines() if "best loss" in line]
    (shown,) = readme.blocks("text", PAGE)
    assert list(ends.values()) == [[shown.strip()]] * 2


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("without_the_loader", ["ForgeCallback.loader(train_loader)"]),
        (
            "with_unsupported_parts",
            ["The callback StochasticWeightAveraging", "training_step takes dataloader_iter"],
        ),
    ],
)
def test_what_no_resume_could_repeat_is_refused_at_the_start(name, sentences, tmp_path):
    """Before the first step, and with what to do instead."""
    code, printed = run_function("lightning_cases.py", name, tmp_path)
    assert code == 78, printed
    assert [one for one in sentences if one not in printed] == []


def test_processes_that_do_not_run_the_script_are_refused(tmp_path):
    """Each of them refuses, so Lightning itself ends with 1."""
    name = "with_functions_as_processes"
    code, printed = run_function("lightning_cases.py", name, tmp_path)
    assert code == 1
    assert "Its processes run fit alone, and not the script" in printed


def test_a_finished_training_is_not_repeated(tmp_path, monkeypatch):
    """The second start finds the weights of the first; a third one must not train on."""
    found = []
    for epochs in "223":
        monkeypatch.setenv("EPOCHS", epochs)
        found.append(run_function("lightning_cases.py", "finished", tmp_path))
    assert [code for code, _ in found] == [0, 0, 78], found
    first, second, third = [printed.splitlines()[-1] for _, printed in found]
    assert first == second
    assert "This training has finished at step 12" in third


def test_metrics_continue(tmp_path):
    """Also those in a collection, in a wrapper with values of its own, and in a tracker."""
    ends = {}
    for name, attempts in (("whole", []), ("killed", [({"9": "KILL"}, -9)])):
        (tmp_path / name).mkdir()
        for kills, expected in (*attempts, ({}, 0)):
            directory, function = tmp_path / name, "with_metrics"
            code, printed = run_function("lightning_cases.py", function, directory, kills=kills)
            assert code == expected, printed
        ends[name] = printed.splitlines()[-1]
    assert ends["killed"] == ends["whole"]


def test_a_batch_without_a_loss_is_judged_by_no_other_batch(tmp_path):
    """After a resume it was a TypeError at every start; later the loss before it counted."""
    ends = {}
    for name, attempts in (("whole", []), ("stopped", [({"7": "TERM"}, 143)])):
        (tmp_path / name).mkdir()
        for kills, expected in (*attempts, ({}, 0)):
            code, printed = run_function(
                "lightning_cases.py", "with_empty_batches", tmp_path / name, kills=kills
            )
            assert code == expected, printed
        ends[name] = printed.splitlines()[-1]
    assert ends["stopped"] == ends["whole"]
    assert ends["whole"].endswith("left out [2]")


def test_a_cli_whose_second_start_would_fail_is_refused_at_the_first(tmp_path, monkeypatch):
    """SaveConfigCallback does not overwrite the config that the first start has saved."""
    code, printed = run_function("lightning_cases.py", "with_a_cli", tmp_path)
    assert code == 78, printed
    assert 'save_config_kwargs={"overwrite": True}' in printed
    monkeypatch.setenv("OVERWRITES", "1")
    for kills, expected in (({"5": "TERM"}, 143), ({}, 0)):
        code, printed = run_function("lightning_cases.py", "with_a_cli", tmp_path, kills=kills)
        assert code == expected, printed
    assert printed.splitlines()[-1] == "fitted"


def test_a_step_with_a_bad_loss_is_left_out(tmp_path):
    """Also if the loss before in the same accumulation is good."""
    code, printed = run_function("lightning_cases.py", "with_bad_losses", tmp_path)
    assert code == 0, printed
    assert "nan" not in printed.splitlines()[-1]


def test_a_bad_loss_lowers_the_scale_of_a_fused_optimizer(tmp_path):
    """For these Lightning looks for no infinite gradients before the optimizer's own step."""
    code, printed = run_function("lightning_cases.py", "with_a_bad_loss_and_a_scale", tmp_path)
    assert code == 0, printed
    assert printed.splitlines()[-1].startswith("scale 2.0 ")
    assert "nan" not in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("beside_a_tuner_and_a_validation", "steps 12 held out True"),
        ("from_a_checkpoint_of_lightning", "steps 12 of 12"),
        (
            "with_a_callback_without_state",
            "the callback Forgetful has no state_dict, so mean would",
        ),
        ("on_slurm", "Lightning's signal handlers and requeue of the Slurm job"),
    ],
)
def test_what_else_people_do_with_a_trainer(name, expected, tmp_path):
    """A tuner reads the same loader, and `ckpt_path` is where the first attempt begins."""
    code, printed = run_function("lightning_cases.py", name, tmp_path)
    assert code == 0, printed
    assert expected in printed


def test_the_package_and_its_release(tmp_path):
    """A callback of the package that the script does not use would be none to its Trainer."""
    code, printed = run_function("lightning_cases.py", "releases", tmp_path)
    assert code == 0, printed


def test_a_package_that_is_not_installed_is_one_sentence(monkeypatch):
    """With the command that installs it."""
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"not installed \(lightning\)\. Run: pip install '"):
        importlib.import_module("forge.integrations.lightning")
