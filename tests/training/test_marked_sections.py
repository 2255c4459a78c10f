"""A real forge.Run writes its current section into its heartbeat page, and no other one."""

import itertools
import json
import math
import os
import sys
import threading

import pytest
import torch
import warm
from harness import PATIENCE_S, wait_for
from ranked import RankedJob

import forge
from forge.checkpoint import files, writing
from forge.checkpoint.format.manifest import CHUNK
from forge.process import sections
from forge.process.progress import HeartbeatPage, HeartbeatRecord, Phase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

START_S = 700.0


@pytest.fixture
def page(monkeypatch):
    page = HeartbeatPage.create()
    for name, value in page.environ.items():
        monkeypatch.setenv(name, value)
    yield page
    page.close()


class Looked:
    """An object that records the page whenever forge saves or loads the object's state."""

    def __init__(self, page):
        self.page = page
        self.taken, self.loaded = [], []

    def state_dict(self):
        self.taken.append(self.page.read())
        return {}

    def load_state_dict(self, state):
        self.loaded.append(self.page.read())


def policy_in(folder, hang=None, **checkpoint):
    return {
        "checkpoint": {"dir": str(folder / "checkpoints"), **checkpoint},
        "hang": {"start_s": START_S} | (hang or {}),
    }


def parts(size=2):
    torch.manual_seed(0)
    model = torch.nn.Linear(size, 1, device="cpu")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(run, model, optimizer):
    loss = model(torch.ones(1, model.in_features, device="cpu")).sum()
    loss.backward()
    run.update(loss, optimizer)


def test_each_part_of_a_run_is_in_its_section(page, tmp_path):
    """The page has the number of finished steps, to distinguish two hangs at one place."""
    model, optimizer = parts()
    looked, seen, evaluated = Looked(page), [], []
    run = forge.Run(
        policy_in(tmp_path, every_steps=4), model=model, optimizer=optimizer, looked=looked
    )
    assert page.read() == HeartbeatRecord()
    with run:
        opened = page.read()

        @run.every(3)
        def held_out(step):
            before = page.read()
            for _ in range(5):
                run.check_stop()
            evaluated.append((step, before, page.read()))

        for step in run.steps(9):
            seen.append((step, page.read()))
            update(run, model, optimizer)
        between = page.read()
        for _ in run.steps(10):
            update(run, model, optimizer)
    after = page.read()

    assert (opened.section, opened.pid, opened.limit_s) == (Phase.start_up, os.getpid(), START_S)
    assert all(one.section is Phase.step and one.step == step for step, one in seen)
    counts = [one.count for _, one in seen]
    assert counts == sorted(set(counts))
    # A boundary without a save or an evaluation sends one heartbeat for its step.
    assert next(b - a for a, b in itertools.pairwise(counts)) == 1
    assert [step for step, *_ in evaluated] == [3, 6, 9]
    for step, before, last in evaluated:
        assert before.section is last.section is Phase.evaluation
        assert (before.step, last.step) == (step, step)
        assert last.count >= before.count + 5
    assert (between.section, between.step, between.limit_s) == (Phase.outside, 9, 0.0)
    assert (after.section, after.limit_s) == (Phase.outside, 0.0)
    # When the Run is entered, forge checks that the object can be saved; the others are saves.
    assert {one.section for one in looked.taken if one.step == 0} == {Phase.start_up}
    assert {one.section for one in looked.taken if one.step} == {Phase.save}
    assert {one.step for one in looked.taken} >= {0, 4, 8, 10}


def test_what_is_written_is_progress(page, tmp_path, monkeypatch):
    """An hour-long save is not a hang as long as it writes one piece after the other."""
    counts = []
    write = os.pwrite

    def pwrite(fd, piece, position):
        if len(piece) >= CHUNK:
            counts.append((page.read().section, page.read().count))
        return write(fd, piece, position)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    model, optimizer = parts(20 << 20)  # 80 MiB, so that there are several pieces
    with forge.Run(policy_in(tmp_path), model=model, optimizer=optimizer) as run:
        for _ in run.steps(1):
            update(run, model, optimizer)
    assert {section for section, _ in counts} == {Phase.save}
    assert counts[-1][1] - counts[0][1] >= len(counts) - 3  # two threads write
    assert len(counts) >= 5


def test_what_is_read_at_the_start_is_progress(page, tmp_path, monkeypatch):
    """A terabyte on a slow disk takes longer than any limit: the job would restart forever."""
    counts = []
    read = os.preadv

    def preadv(*given):
        counts.append((page.read().section, page.read().count))
        return read(*given)

    policy = policy_in(tmp_path, every_steps=2)
    policy["nan"] = {"action": "rollback", "max_consecutive": 1}  # a rollback reads like a start
    model, optimizer = parts(10 << 20)
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(4):
            monkeypatch.setattr(files.os, "preadv", preadv)
            loss = model(torch.ones(1, model.in_features, device="cpu")).sum()
            if step == 3 and not counts:
                loss = loss * math.nan
            loss.backward()
            run.update(loss, optimizer)
    assert {section for section, _ in counts} == {Phase.start_up}
    assert len(counts) >= 40
    assert counts[-1][1] - counts[0][1] >= len(counts) - 8  # threads read


def test_a_save_in_the_background_is_no_progress_of_the_step(page, tmp_path, monkeypatch):
    """Training can hang in a step while a large checkpoint is still being written."""
    is_in_step, is_written, seen = threading.Event(), threading.Event(), []
    write_file = writing.write_file

    def written(*given):
        if not is_written.is_set():  # otherwise the thread can write before the step begins
            assert is_in_step.wait(PATIENCE_S)
            assert page.read().section is Phase.step
            before = page.read()
            found = write_file(*given)
            seen.append((before, page.read()))
            is_written.set()
            return found
        return write_file(*given)

    monkeypatch.setattr(writing, "write_file", written)
    model, optimizer = parts()
    policy = policy_in(tmp_path, every_steps=2, async_save=True)
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(4):
            update(run, model, optimizer)
            if step == 2:
                is_in_step.set()
                assert is_written.wait(PATIENCE_S)
    assert seen
    assert all(before == after for before, after in seen)


def test_an_evaluation_after_an_epochs_pass_is_one(page, tmp_path):
    """The code after a pass can take long, and each of its polls sends a heartbeat."""
    model, optimizer = parts()
    found = []
    with forge.Run(policy_in(tmp_path), model=model, optimizer=optimizer) as run:
        for _ in run.epochs(2):
            before = page.read()
            for _ in run.batches([1, 2, 3]):
                update(run, model, optimizer)
            after = page.read()
            run.check_stop()
            found.append((before.section, after.section, page.read().count > after.count))
    assert found == [(Phase.step, Phase.evaluation, True)] * 2


def test_an_evaluation_inside_the_step_of_a_trainer_is_one(page, tmp_path):
    """It can take much longer than the steps from which the limit of a step is learned."""
    seen = []
    with forge.Run(policy_in(tmp_path)) as run:
        run.begin()
        run.boundary(1)
        with run.evaluating():
            before = page.read()
            run.check_stop()
            seen += [before, page.read()]
        seen.append(page.read())
        with pytest.raises(forge.ForgeError, match="only in a function decorated"):
            run.check_stop()
        run.end_loop()
    assert [one.section for one in seen] == [Phase.evaluation, Phase.evaluation, Phase.step]
    assert seen[1].count > seen[0].count


def test_the_first_step_of_an_epoch_is_told_from_the_others(page, tmp_path):
    """It starts workers, so it has a limit of its own, learned from the second epoch on."""
    model, optimizer = parts()
    limits = {}
    with forge.Run(policy_in(tmp_path / "a"), model=model, optimizer=optimizer) as run:
        for step, _ in run.steps(18, list(range(6))):
            limits[step] = page.read().limit_s
            update(run, model, optimizer)
    assert [step for step, one in limits.items() if one == START_S] == [0, 1, 2, 3, 6]
    before = []
    with forge.Run(policy_in(tmp_path / "b"), model=model, optimizer=optimizer) as run:
        for _ in run.epochs(3):
            before.append(page.read().limit_s)
            for _ in run.batches(range(6)):
                update(run, model, optimizer)
    assert before == [START_S, START_S, 300.0]


def test_a_rollback_may_take_as_long_as_a_start(page, tmp_path):
    """A rollback loads the model, as a start does."""
    model, optimizer = parts()
    looked = Looked(page)
    policy = policy_in(tmp_path, every_steps=2)
    policy["nan"] = {"action": "rollback", "max_consecutive": 1}
    bad = [5]
    with forge.Run(policy, model=model, optimizer=optimizer, looked=looked) as run:
        for step in run.steps(8):
            loss = model(torch.ones(1, 2, device="cpu")).sum()
            if bad and step == bad[0]:
                loss = loss * float(f"{'nan' if bad.pop() else ''}")
            loss.backward()
            run.update(loss, optimizer)
    assert [(one.section, one.limit_s) for one in looked.loaded] == [(Phase.start_up, START_S)]


@pytest.mark.parametrize("hang", [{"action": "ignore"}, None])
def test_who_is_not_to_be_watched_marks_nothing(hang, page, tmp_path):
    """With `hang.action=ignore`, or with resilience disabled."""
    model, optimizer = parts()
    policy = policy_in(tmp_path, hang) | ({"enabled": False} if hang is None else {})
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for _ in run.steps(3):
            update(run, model, optimizer)
            assert page.read() == HeartbeatRecord()
    assert page.read() == HeartbeatRecord()


def test_a_run_that_cannot_be_entered_is_left(page, tmp_path):
    """The script can continue for hours without the Run."""
    model, optimizer = parts()

    class Failing(Looked):
        def state_dict(self):
            super().state_dict()
            raise ValueError("planted")

    looked = Failing(page)
    with pytest.raises(BaseException, match="planted"):
        forge.Run(policy_in(tmp_path), model=model, optimizer=optimizer, a=looked).__enter__()
    assert [one.section for one in looked.taken] == [Phase.start_up]
    assert page.read().section is Phase.outside


def test_a_run_that_raises_is_left(page, tmp_path):
    """The code that catches the error has no time limit."""
    model, optimizer = parts()

    def train():
        with forge.Run(policy_in(tmp_path), model=model, optimizer=optimizer) as run:
            for _ in run.steps(3):
                raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        train()
    assert page.read().section is Phase.outside


COMPILING = """
import os, sys, json
import torch
import torch._prims  # comes too late where `quick` puts off torch._dynamo
import forge
from forge.process.progress import HeartbeatPage

page, found, rest = HeartbeatPage.create(), [], {}
os.environ.update(page.environ)

def read():
    one = page.read()
    return one.section.name, one.step, one.limit_s

def backend(module, inputs):
    found.append(read())
    return module.forward

double = torch.compile(lambda x: x * 2, backend=backend)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with forge.Run(json.loads(sys.argv[1]), model=model, optimizer=optimizer) as run:
    for step in run.steps(9):
        if step == 6:
            double(torch.ones(2))
        rest[step] = read()
        model(torch.ones(2)).sum().backward()
        run.update(0.0, optimizer)
print(json.dumps([found, *rest.values()]))
"""


def test_a_compilation_in_a_step_is_one(tmp_path):
    """torch's compiler reports it: a compilation can take half an hour, in any step."""
    (tmp_path / "compiling.py").write_text(COMPILING)
    command = [sys.executable, "compiling.py", json.dumps(policy_in(tmp_path))]
    options = {"cwd": tmp_path, "stdout": -1, "text": True}
    with warm.Popen(command, imports=warm.SHARDING, **options) as process:
        found, *steps = json.loads(process.communicate()[0])
    assert found == [["compilation", 6, START_S]]
    assert [(section, step) for section, step, _ in steps] == [("step", n) for n in range(9)]
    # The step before, the same step after the compilation, and the next step.
    assert [steps[step][2] for step in (5, 6, 7)] == [300.0, START_S, 300.0]


def test_the_bits_of_a_training_are_the_same_with_marks(page, tmp_path, monkeypatch):
    """Watching a training must not change it."""

    def weights(folder):
        model, optimizer = parts(8)
        data = torch.utils.data.DataLoader(list(torch.rand(24, 8)), batch_size=4, shuffle=True)
        with forge.Run(policy_in(folder), model=model, optimizer=optimizer) as run:
            for _, batch in run.steps(20, data):
                loss = model(batch).square().mean()
                loss.backward()
                run.update(loss, optimizer)
        return model.weight.detach().clone()

    with_marks = weights(tmp_path / "with")
    assert page.read().count
    for name in page.environ:
        monkeypatch.delenv(name)
    assert torch.equal(with_marks, weights(tmp_path / "without"))


@pytest.mark.parametrize(
    ("stands", "step", "section"),
    [("stuck", 7, Phase.step), ("unfinished", 5, Phase.evaluation)],
)
def test_a_rank_that_waits_for_another_says_so(stands, step, section, tmp_path):
    """The other rank is the culprit of a hang, not the rank in the collective."""
    pages = [HeartbeatPage.create(), HeartbeatPage.create()]
    job = RankedJob(tmp_path, wrap="plain", norm=False, **{stands: [[step, 1]]})
    processes = job.start([one.environ for one in pages])
    expected = [(Phase.collective, step), (section, step)]

    def is_there():
        found = [one.read() for one in pages]
        return all(found) and [(one.section, one.step) for one in found] == expected

    wait_for(is_there, processes[0].popen, f"{expected}")
    assert [one.read().pid for one in pages] == [one.pid for one in processes]
    for one in pages:
        one.close()


def test_no_run_is_open_after_these():
    """Otherwise the tests after these would see module-level state."""
    before = HeartbeatPage.create()
    sections.current().begin_step()
    assert before.read() == HeartbeatRecord()
    before.close()
