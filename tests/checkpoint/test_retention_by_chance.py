"""Every rule of retention with every other, in random histories of one directory."""

import itertools
import math
import os
import random
from contextlib import ExitStack

import pytest
from rows import few
from stores import STATE, TENSORS

from forge.checkpoint.format import manifest
from forge.checkpoint.retention import reading_lock
from forge.config.schema import BestConfig, BestMode


def steps_of(directory):
    names = [path.name[5:] for path in directory.glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())


class World:
    """A random history of one directory, and the promise, stated for each checkpoint alone."""

    def __init__(self, seed, open_store, commit):
        self.rng = rng = random.Random(seed)
        mode = rng.choice([BestMode.min, BestMode.max])
        self.best = BestConfig(rng.choice([None, "val"]), mode, rng.choice([1, 1, 2, 3]))
        self.keep_last, self.every = rng.choice([1, 2, 3]), rng.choice([None, None, 20, 30])
        self.keep_back = rng.choice([None, None, 0, 15, 40])
        self.commit = commit
        self.store = open_store(
            keep_back_steps=self.keep_back,
            keep_last=self.keep_last,
            keep_every_steps=self.every,
            best=self.best,
        )
        self.directory = self.store.directory
        self.logged, self.is_good, self.held = {}, {}, {}
        self.last = (0, 0.5)

    def act(self):
        act = self.rng.choice(["damage", "hold", "let go", "link", *["save"] * 6])
        there = steps_of(self.directory)
        if act == "save" or not there:
            self.save()
            return
        step = self.rng.choice(there)
        path = self.directory / f"step_{step}"
        if act == "damage" and step in self.is_good:
            self.damage(path)
            self.is_good[step] = False
        elif act == "hold" and step not in self.held and self.is_good.get(step):
            self.held[step] = ExitStack()
            self.held[step].enter_context(reading_lock(path))
        elif act == "let go" and self.held:
            self.held.pop(self.rng.choice(sorted(self.held))).close()
        elif act == "link":
            (self.directory / "latest").unlink()
            (self.directory / "latest").symlink_to(path.name)

    def save(self):
        step = max([0, *self.is_good]) + self.rng.choice([1, 5, 10, 10, 10])
        if self.rng.random() < 0.6:
            self.last = (step - 1, self.rng.choice([0.1, 0.2, 0.3, 0.4, math.nan, math.inf]))
        logged = {} if self.rng.random() < 0.1 else {"val": self.last}
        self.commit(self.store, step, logged)
        self.logged[step], self.is_good[step] = logged.get("val"), True

    def damage(self, path):
        kind = self.rng.choice(["missing", "short", "no manifest", "text", "flip"])
        if kind == "missing":
            (path / STATE).unlink(missing_ok=True)
        elif kind == "short":
            if (path / TENSORS).exists():
                os.truncate(path / TENSORS, 7)
        elif kind == "no manifest":
            (path / manifest.NAME).unlink(missing_ok=True)
        elif kind == "text":
            (path / manifest.NAME).write_text("nothing")
        else:  # seen only by reading it, as a resume or a rollback does
            file = path / self.rng.choice([STATE, TENSORS])
            if file.exists():
                file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
            self.store.newest(int(path.name[5:]))

    def promised(self, step, first_bad):
        """Whether this checkpoint has to be there after a pass."""
        path = self.directory / f"step_{step}"
        good = [s for s in steps_of(self.directory) if self.is_good.get(s)]
        if step not in good or step in self.held:
            return True
        if os.readlink(self.directory / "latest") == path.name or step == max(good):
            return True
        newer = [s for s in good if s > step]
        if len(newer) < self.keep_last or (self.every and step % self.every == 0):
            return True
        if self.keep_back is not None:
            back_to = (max(good) if first_bad is None else first_bad) - self.keep_back
            if all(s > back_to for s in newer):
                return True
        return self.best.metric is not None and self.is_among_the_best(step, good)

    def is_among_the_best(self, step, good):
        mine = self.logged[step]
        if mine is None or not math.isfinite(mine[1]):
            return False
        others = {self.logged[s] for s in good if self.logged[s] and s != step}
        if any(self.logged[s] == mine for s in good if s < step):
            return False
        sign = 1 if self.best.mode is BestMode.min else -1
        better = [
            (at, value)
            for at, value in others - {mine}
            if math.isfinite(value) and (sign * value, at) < (sign * mine[1], mine[0])
        ]
        return len(better) < self.best.keep


@pytest.mark.parametrize("seed", few(8, range(60)))
def test_what_stays_is_what_was_promised(seed, open_store, commit, monkeypatch):
    """Every rule with every other, against the promise stated without any order of looking."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    world = World(seed, open_store, commit)
    unknown = ["notes.txt", "step_x", "best", "step_7.bak", "rolled_back_step_1"]
    for name in unknown:
        (world.directory / name).mkdir()
    num_removed = 0
    for _ in range(40):
        world.act()
        if not (world.directory / "latest").is_symlink():
            continue
        first_bad = world.rng.choice([None, None, max([0, *world.is_good])])
        there = steps_of(world.directory)
        expected = [step for step in there if world.promised(step, first_bad)]
        removed = world.store.retain(first_bad)
        assert steps_of(world.directory) == expected
        assert sorted(removed) == sorted(f"step_{s}" for s in there if s not in expected)
        num_removed += len(removed)
    for held in world.held.values():
        held.close()
    world.store.wait()
    assert all((world.directory / name).is_dir() for name in unknown)
    assert not list(world.directory.glob(".removed*"))
    assert num_removed or world.keep_back == 40 or world.every


def test_the_histories_meet_every_rule(open_store, commit, monkeypatch, tmp_path):
    """Chance that never keeps one for its metric alone, say, would test nothing of it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    met = set()
    for seed in itertools.count():
        world = World(seed, lambda **config: open_store(tmp_path / str(seed), **config), commit)  # noqa: B023
        for _ in range(20):
            world.act()
        good = [s for s in steps_of(world.directory) if world.is_good.get(s)]
        met |= {"best" for s in good if world.best.metric and world.is_among_the_best(s, good)}
        met |= {"held" for _ in world.held} | {"back" for _ in good if world.keep_back}
        met |= {"damaged" for is_good in world.is_good.values() if not is_good}
        for held in world.held.values():
            held.close()
        if met == {"best", "held", "back", "damaged"} or seed == 30:
            break
    assert met == {"best", "held", "back", "damaged"}
