"""ForgeTrainer: struck at any place, a Trainer ends as it does without forge."""

import importlib
import re
import sys

import pytest
import readme
from harness import assert_same_bits
from repository import ROOT
from rows import few
from trained import Trained

GALLERY = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "how-to" / "huggingface.md"
SCRIPTS = ROOT / "tests" / "proofs" / "trainers"
SMALL = ROOT / "tests" / "support" / "jobs" / "trainer_options.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Undisturbed runs of a script, each made once."""
    found = {}

    def get(name, **env):
        key = (name, *env.items())
        if key not in found:
            folder = tmp_path_factory.mktemp(name)
            found[key] = Trained(folder, SCRIPTS / f"{name}.py", **env)
            found[key].run_to_end()
        return found[key]

    return get


def test_it_ends_as_without_forge(made):
    """The collator draws random masks, also for the batch that Accelerate reads ahead."""
    whole, plain = made("masked"), made("masked", PLAIN="1")
    assert whole.different_ends(plain) == []
    assert whole.losses == plain.losses


@pytest.mark.parametrize(
    ("place", "name", "code"),
    few(
        1,
        [
            ("step 9", "TERM", 143),
            ("eval 2", "USR1", 75),
            ("save 2", "KILL", -9),
            ("step 39", "TERM", 143),
            ("step 26", "USR1", 75),
            ("step 17", "KILL", -9),
            ("own 2", "KILL", -9),
        ],
    ),
)
def test_a_struck_trainer_ends_with_the_same_bits(place, name, code, made, tmp_path):
    """In an accumulation, at the end of an epoch, in an evaluation, in a save, in the last step."""
    run = Trained(tmp_path, SCRIPTS / "masked.py")
    run.run_to_end(([{place: name}], code))
    assert run.differences(made("masked")) == []
    if name != "KILL":
        assert run.repeated == [0]
        assert run.losses == made("masked").losses


@pytest.mark.proofs
def test_two_ranks_end_with_the_same_bits(made, tmp_path):
    """Only one of them is signalled; a single rank would have no gradients to sum."""
    whole = Trained(tmp_path / "whole", SCRIPTS / "ddp.py", ranks=2)
    whole.run_to_end()
    run = Trained(tmp_path / "run", SCRIPTS / "ddp.py", ranks=2)
    run.run_to_end(([{}, {"step 11": "TERM"}], 143))
    assert run.differences(whole) == []
    assert run.repeated == [0]


def test_the_script_of_the_page(tmp_path):
    """Killed once, its last line is on the page, and is that of the script before the move, too."""
    scripts = {"before": ("huggingface_before", [])}
    scripts["run"] = ("huggingface", [([{"own 2": "KILL"}], -9)])
    lines = {}
    for name, (script, attempts) in scripts.items():
        run = Trained(tmp_path / name, GALLERY / f"{script}.py", checkpoints="runs/huggingface")
        run.run_to_end(*attempts)
        lines |= {name: [line for line in run.output.splitlines() if "best loss" in line]}
    assert lines["run"] == lines["before"]
    assert lines["run"][0] in readme.blocks("text", PAGE)[0]


def test_the_subclass_of_the_page(tmp_path):
    """Its own attribute is as in an undisturbed run."""
    (tmp_path / "mine.py").write_text(readme.blocks("python", PAGE)[0])
    whole = play(tmp_path / "whole", subclass=tmp_path / "mine.py")
    run = play(tmp_path / "run", ([{"step 8": "TERM"}], 143), subclass=tmp_path / "mine.py")
    assert run.differences(whole) == []
    assert run.final[0]["mean"] > 0


# -- options ---------------------------------------------------------------------------------------


def play(tmp_path, *attempts, **options):
    """A run of jobs/trainer_options.py with these options."""
    run = Trained(tmp_path, SMALL, **{name.upper(): str(one) for name, one in options.items()})
    run.run_to_end(*attempts)
    return run


def test_all_of_the_state_of_the_trainer_s_own_checkpoint_outlives_a_stop(tmp_path):
    """Its evaluation interval and its early stopping, whatever the arguments say now."""
    play(tmp_path / "own", save=1, plain=1, evaluate=1, patience=4)
    options = {"begin": tmp_path / "own" / "trainer" / "checkpoint-3", "evaluate": 5, "patience": 9}
    plain = play(tmp_path / "plain", plain=1, **options)
    assert len(plain.losses) < 9  # it stopped early, by the patience of the checkpoint
    run = play(tmp_path / "run", ([{"step 2": "TERM"}], 143), **options)
    assert run.different_ends(plain) == []


def test_a_finished_training_is_not_trained_again(tmp_path):
    """A job can be killed between the end of its training and its own end."""
    run = play(tmp_path)
    (before,) = run.final
    assert run.attempt() == [0]
    assert len(run.losses) == 12
    assert_same_bits(run.final[0]["model"], before["model"])


@pytest.mark.parametrize("first", few(1, [3, 8]))
def test_it_begins_with_a_checkpoint_of_the_trainer_s_own(first, tmp_path):
    """As the Trainer itself does; once forge has a checkpoint, that one counts."""
    play(tmp_path / "own", save=1, plain=1)
    begin = tmp_path / "own" / "trainer" / f"checkpoint-{first}"
    plain = play(tmp_path / "plain", begin=begin, plain=1)
    run = play(tmp_path / "run", ([{"step 3": "TERM"}], 143), begin=begin)
    assert run.different_ends(plain) == []
    assert run.losses == plain.losses
    assert len(run.losses) == 12 - first
    assert re.search("resume_from_checkpoint=.* is ignored: forge has a checkpoint", run.output)


def test_a_disabled_policy_trains_as_without_forge(tmp_path):
    """`enabled: false` saves nothing, and catches no signal."""
    plain = play(tmp_path / "plain", plain=1)
    run = play(tmp_path / "run", off=1)
    assert run.different_ends(plain) == []
    assert not run.checkpoints.exists()


def test_an_update_with_nan_is_skipped(tmp_path):
    """The Trainer's optimizer steps without gradients, and so does nothing."""
    run = play(tmp_path, nan=5)
    assert "NaN or Inf in step 4: the loss is nan; this update is skipped" in run.output
    (end,) = run.final
    assert all(one.isfinite().all() for one in end["model"].values())


def test_finish_ends_the_loop(tmp_path):
    """From a callback, by `trainer.run`."""
    run = play(tmp_path, finish=4)
    assert len(run.losses) == 4
    assert "enough" in run.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find": 1}, "auto_find_batch_size=True can change the batch size"),
        ({"trial": 1}, "hyperparameter_search trains several times with one Trainer"),
        ({"attribute": "is_fsdp_enabled"}, "DeepSpeed and FSDP divide the model among the ranks"),
        ({"attribute": "_buffered_inputs"}, "ForgeTrainer uses generated batches in several steps"),
    ],
)
def test_options_without_an_exact_resume_are_refused(options, message, tmp_path):
    """Before the first step, by name."""
    run = Trained(tmp_path, SMALL, **{name.upper(): str(one) for name, one in options.items()})
    assert run.attempt() == [78]
    assert message in run.output


@pytest.mark.parametrize(
    ("name", "packages"),
    [("transformers", "transformers accelerate"), ("accelerate", "accelerate")],
)
def test_a_package_that_is_not_installed_is_one_sentence(name, packages, monkeypatch):
    """It names the package, and the command that installs it."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"forge.integrations.{name}")
    what = f"forge.integrations.{name} needs a package that is not installed ({name})"
    assert str(caught.value) == f"{what}. Run: pip install {packages}"


def test_what_is_switched_off_or_not_saved_is_named(tmp_path):
    """The Trainer's own reaction to SIGTERM, and a callback without a state."""
    run = play(tmp_path, ([{"step 3": "TERM"}], 143), jit=1, forgetful=1)
    assert "enable_jit_checkpoint is switched off: forge saves when a signal arrives" in run.output
    assert "Not known to resume exactly: the callback Forgetful has no state_dict" in run.output
    assert run.repeated == [0]


def test_a_rehearsal_writes_no_checkpoints_into_the_output_dir_of_the_script(tmp_path):
    """With save_total_limit it would delete those of the real training."""
    rehearsal = tmp_path / "rehearsal"
    rehearsal.mkdir()
    play(tmp_path, save=1, forge_rehearsal=rehearsal)
    assert list((tmp_path / "trainer").iterdir()) == []
    assert (rehearsal / "trainer" / "checkpoint-12").is_dir()


def test_a_stream_for_several_ranks_is_refused_if_one_rank_reads_it(tmp_path):
    """Accelerate's default for it; with dispatch_batches=False each rank reads."""
    run = Trained(tmp_path / "a", SMALL, ranks=2, STREAM="1")
    assert run.attempt() == [78, 78]
    assert "Set dispatch_batches=False" in run.output
    run = Trained(tmp_path / "b", SMALL, ranks=2, STREAM="1", DISPATCH="0")
    assert run.attempt() == [0, 0]
