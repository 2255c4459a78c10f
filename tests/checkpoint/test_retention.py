"""Which checkpoints stay: the best by a metric, and others."""

import errno
import itertools
import json
import math
import os

import pytest

from forge.checkpoint.format import manifest
from forge.config.schema import BestConfig, BestMode

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
