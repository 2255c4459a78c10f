"""Which checkpoints stay: the best by a metric, and the pinned."""

import errno
import itertools
import json
import math
import os
import subprocess
import sys

import pytest

from forge.checkpoint import retention
from forge.checkpoint.format import manifest
from forge.cli import main, pin
from forge.config.schema import BestConfig, BestMode
from forge.errors import CheckpointError, ExitCode

TENSORS = "tensors_rank00000.safetensors"


def steps(store):
    return sorted(int(p.name[5:]) for p in store.directory.glob("step_*"))


def save(store, commit, step, **logged):
    """A save, as a run does it; `logged` has (step, value), or the value logged just before."""
    as_logged = {k: v if isinstance(v, tuple) else (step - 1, v) for k, v in logged.items()}
    commit(store, step, as_logged)
    return store.retain()


# -- the best --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kept"), [("min", [3, 5, 6]), ("max", [1, 4, 6])])
def test_the_best_are_kept_besides_the_newest(mode, kept, open_store, commit):
    """The model that is wanted in the end is seldom the last one."""
    store = open_store(keep_last=1, best=BestConfig("val", BestMode[mode], keep=2))
    for step, value in enumerate([0.9, 0.5, 0.1, 0.8, 0.2, 0.4], 1):
        save(store, commit, step, val=value, loss=-value)
    assert steps(store) == kept


def test_of_equals_the_first_is_the_best(open_store, commit):
    """An accuracy that stays at 1.0 must not replace its checkpoint at every save."""
    store = open_store(keep_last=1, best=BestConfig("acc", BestMode.max))
    for step in range(1, 5):
        save(store, commit, step, acc=1.0)
    assert steps(store) == [1, 4]


def test_an_evaluation_counts_once_for_the_first_checkpoint_that_holds_it(open_store, commit):
    """Where evaluations are rare, the best two must not be neighbours that share one."""
    store = open_store(keep_last=1, best=BestConfig("val", keep=2))
    for step in range(10, 101, 10):
        at = (step - 10) // 50 * 50 + 9
        save(store, commit, step, val=(at, 1.0 / at))
    assert steps(store) == [10, 60, 100]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_no_finite_number_is_never_the_best(value, mode, open_store, commit):
    """NaN compares with nothing: it would stay the best forever, and is no JSON either."""
    store = open_store(keep_last=1, best=BestConfig("val", BestMode[mode]))
    for step, logged in enumerate([0.5, value, value], 1):
        save(store, commit, step, val=logged)
    assert steps(store) == [1, 3]
    described = manifest.read(store.directory / "step_3")
    assert described.metrics == {"val": str(value)}
    assert described.logged_at == {"val": 2}
    raw = (store.directory / "step_3" / manifest.NAME).read_text()
    json.loads(raw, parse_constant=pytest.fail)


def test_a_damaged_best_one_leaves_its_place_to_the_next(open_store, commit):
    """Otherwise none that can be used is kept."""
    store = open_store(keep_last=1, best=BestConfig("val"))
    for step, value in enumerate([0.3, 0.1, 0.2], 1):
        save(store, commit, step, val=value)
    assert steps(store) == [2, 3]
    (store.directory / "step_2" / TENSORS).unlink()
    save(store, commit, 4, val=0.9)
    save(store, commit, 5, val=0.9)
    assert steps(store) == [2, 3, 5]


def test_a_metric_that_nobody_logs_is_told_once(open_store, commit, caplog):
    """A misspelt name would show when the best one is looked for, weeks later."""
    store = open_store(keep_last=2, best=BestConfig("vall"))
    for step in range(1, 7):
        save(store, commit, step, val=0.1, loss=1.0)
    assert steps(store) == [5, 6]
    told = [text for text in caplog.messages if "best.metric=vall" in text]
    assert len(told) == 1
    assert "Logged: loss, val." in told[0]


def test_a_metric_that_is_logged_later_is_not_told(open_store, commit, caplog):
    """The first evaluation may come after the second save."""
    store = open_store(keep_last=2, best=BestConfig("val"))
    for step in range(1, 3):
        save(store, commit, step, loss=1.0)
    for step in range(3, 7):
        save(store, commit, step, val=0.1 * step)
    assert caplog.messages == []
    assert steps(store) == [3, 5, 6]


@pytest.mark.parametrize("look", range(12))
def test_one_that_cannot_be_looked_at_for_a_moment_is_not_removed(
    look, open_store, commit, monkeypatch
):
    """Seen as damaged it has no place among the newest two; then it must not be removed as good."""
    store = open_store(keep_last=2)
    for step in (1, 2):
        commit(store, step)
    looks, lstat = itertools.count(), os.lstat

    def failing(path, **options):
        is_meant = os.fspath(path).endswith(("step_1/manifest.json", "step_1/" + TENSORS))
        if is_meant and next(looks) == look:
            raise OSError(errno.ESTALE, "Stale file handle")
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", failing)
    for _ in range(4):
        store.retain()
        assert steps(store) == [1, 2]
    assert next(looks) > 6


# -- pins ------------------------------------------------------------------------------------------


def forge_pin(*arguments):
    command = [sys.executable, "-m", "forge.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_pinned_one_stays_and_takes_nobody_s_place(open_store, commit):
    """It is kept for people; the newest are kept for the next resume."""
    store = open_store(keep_last=2)
    for step in (1, 2, 3):
        save(store, commit, step)
    done = forge_pin("pin", store.directory / "step_2", store.directory / "latest")
    assert done.returncode == 0, done.stderr
    for step in (4, 5, 6):
        save(store, commit, step)
    assert steps(store) == [2, 3, 5, 6]
    assert forge_pin("unpin", store.directory / "step_2").returncode == 0
    save(store, commit, 7)
    assert steps(store) == [3, 6, 7]


def test_what_cannot_be_pinned_is_told_and_leaves_nothing(store, commit, capsys, monkeypatch):
    """A pin that does nothing must not look like one."""
    commit(store, 1)
    (store.directory / "step_2").mkdir()
    before = sorted(os.listdir(store.directory))
    paths = [str(store.directory / name) for name in ("step_1", "step_2", "step_9", ".")]
    monkeypatch.setattr(sys, "argv", ["forge", "pin", *paths[1:], paths[0]])
    assert main.main() == ExitCode.IO_ERROR
    told = capsys.readouterr()
    assert "step_2 is not a checkpoint: it has no manifest" in told.err
    assert "step_9 is not a checkpoint" in told.err
    assert "expected the directory of a checkpoint" in told.err
    assert told.out == f"pinned: {paths[0]}\n"
    assert sorted({*os.listdir(store.directory)} - {*before}) == ["pinned_step_1"]
    monkeypatch.setattr(sys, "argv", ["forge", "unpin", *paths[:2]])
    assert main.main() == ExitCode.IO_ERROR
    assert "step_2 is not pinned" in capsys.readouterr().err
    assert sorted(os.listdir(store.directory)) == before


def test_a_pin_that_is_set_while_one_is_being_removed_saves_it(open_store, commit, monkeypatch):
    """The command and the run do not wait for each other; the last look is after the rename."""
    store = open_store(keep_last=1)
    commit(store, 1)
    commit(store, 2)
    rename = os.rename

    def late(source, target):
        if os.path.basename(source) == "step_1":
            retention.add_pin(store.directory / "step_1")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert store.retain() == []
    assert steps(store) == [1, 2]
    assert store.read(store.directory / "step_1").manifest.step == 1


def test_a_pin_that_comes_too_late_is_an_error(store, commit, monkeypatch):
    """Whoever pinned it would look for it later."""
    path = commit(store, 1)
    add = retention.add_pin

    def late(path):
        with store._workspace.entered() as work:
            assert store._workspace.remover.take(path, work)
        add(path)

    monkeypatch.setattr(retention, "add_pin", late)
    with pytest.raises(CheckpointError, match="removed the checkpoint just now"):
        pin.add(path)
    assert not retention.is_pinned(path)


def test_a_kill_before_a_pinned_one_is_put_back_loses_nothing(open_store, commit):
    """Between the rename away and the one back stands a hidden name that is otherwise removed."""
    store = open_store()
    for step in (1, 2):
        path = commit(store, step)
        with store._workspace.entered() as work:
            path.rename(store._workspace.remover.aside(path, work))
    retention.add_pin(store.directory / "step_1")
    commit(store, 3)
    store.close()
    assert {path.name for path in work.iterdir()} == {f"removed_step_{n}-00000{n}" for n in (1, 2)}
    store = open_store()
    assert steps(store) == [1, 3]
    assert not list(store.directory.glob(".[wl]*_*"))
    assert store.read(store.directory / "step_1").manifest.step == 1


def test_what_is_half_deleted_is_not_put_back(open_store, commit):
    """A pin that was set too late must not bring back a checkpoint without its tensors."""
    store = open_store()
    path = commit(store, 1)
    (path / TENSORS).unlink()
    with store._workspace.entered() as work:
        path.rename(store._workspace.remover.aside(path, work))
    retention.add_pin(path)
    store.close()
    store = open_store()
    assert steps(store) == []
    assert not list(store.directory.glob(".[wl]*_*"))


def test_a_rollback_keeps_a_pinned_one_under_another_name(store, commit, caplog):
    """It must not be resumed from, and the new time line needs its name; but it is not ours."""
    for step in (1, 2, 3):
        commit(store, step)
        retention.add_pin(store.directory / f"step_{step}")
    store.discard_after(2)
    commit(store, 3)
    store.discard_after(2)
    retention.add_pin(commit(store, 3))
    store.discard_after(2)
    kept = sorted(store.directory.glob("rolled_back_*"))
    assert kept[0].name == "rolled_back_step_3"
    assert len(kept) == 2
    assert all((path / manifest.NAME).exists() for path in kept)
    assert steps(store) == [1, 2]
    assert sorted(p.name for p in store.directory.glob("pinned*")) == [
        "pinned_step_1",
        "pinned_step_2",
    ]
    assert "no job resumes from it" in caplog.text
