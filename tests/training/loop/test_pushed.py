"""A loop that forge does not own calls `run.boundary`, and ends with the same bits all the same."""

import itertools
import json
import random

import pytest
import small_scripts
import torch
from harness import assert_same_run
from nan_trainer import outliving
from ranked import RankedJob
from rows import few
from torch.utils.data import DataLoader, DistributedSampler
from updates import a_run

import forge
from forge.checkpoint.format import manifest
from forge.jobdir import process_id

STEPS = 30
SPEC = {"script": "pushed.py", "loop": "trainer", "policy": {"checkpoint": {"every_steps": 6}}}
DRAWN = random.Random(7)
STRIKES = [
    (f"{place} {step}", name)
    for place, (step, name) in zip(
        itertools.cycle(["step", "end"]),
        [(DRAWN.randrange(1, STEPS), DRAWN.choice(["TERM", "KILL", "USR1"])) for _ in range(16)],
        strict=False,
    )
]
KINDS = ("stateful", "distributed", "list")
CODES = {"TERM": 143, "KILL": -9, "USR1": 75}


def starts(job):
    return [json.loads(line) for line in (job.directory / "starts.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("place", "name"),
    few(
        4,
        [
            *(("epoch 1", "KILL"), ("after", "TERM"), ("step 13", "USR1"), ("end 9", "KILL")),
            *(("step 26", "KILL"), ("end 17", "TERM"), ("epoch 2", "TERM"), ("after", "KILL")),
            *STRIKES,
        ],
    ),
)
def test_a_loop_of_somebody_else_s_ends_with_the_same_bits(
    place, name, tmp_path, make_job, undisturbed
):
    """Open accumulations, the mean of an epoch and the place in the data included."""
    job = make_job(tmp_path / "job", kill_at={place: name}, **SPEC)
    job.run_to_end(CODES[name])
    assert_same_run(job, undisturbed(**SPEC))
    if name != "KILL" and place != "after":
        assert job.steps_repeated == [0]


def test_begin_says_where_the_loop_begins_and_that_it_has_ended(tmp_path, make_job, undisturbed):
    job = make_job(tmp_path / "job", kill_at={"step 13": "TERM"}, **SPEC)
    job.run_to_end(143)
    assert starts(job) == [[0, 0, False, False], [14, 1, True, False]]
    assert job.run() == 0
    assert starts(job)[2:] == [[STEPS, 2, True, True]]
    assert_same_run(job, undisturbed(**SPEC))


JUMPS = """
import forge, torch

class Counter:
    i = 1
    def state_dict(self):
        return {"i": self.i}
    def load_state_dict(self, state):
        self.i = state["i"]

torch.manual_seed(0)
model, counter = torch.nn.Linear(2, 1), Counter()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
policy = {"checkpoint": {"dir": "ck", "every_steps": 25, "every_s": None}}
with forge.Run(policy, model=model, optimizer=optimizer, counter=counter) as run:
    run.state["evaluated"] = []
    run.every(20)(lambda step: run.state["evaluated"].append(step))
    print("begins at", run.begin().step)
    while counter.i < 100:
        loss = model(torch.rand(4, 2)).square().mean()
        loss.backward()
        if run.should_step(loss):
            optimizer.step()
        optimizer.zero_grad()
        counter.i += 10
        strike(counter.i)
        run.boundary(counter.i)
    run.end_loop()
print(counter.i, model.weight.tolist(), run.state["evaluated"])
"""


def test_steps_that_jump_over_a_multiple_are_saved_and_evaluated_there(tmp_path):
    """A loop whose steps are 1, 11, 21 … was never saved by `every_steps`, and began anew."""
    whole = small_scripts.starts(tmp_path / "whole", JUMPS)
    killed = small_scripts.starts(tmp_path / "killed", JUMPS, "71:KILL")
    assert [start.returncode for start in killed] == [-9, 0]
    assert "begins at 51" in killed[1].stdout
    assert small_scripts.last_line(killed[1]) == small_scripts.last_line(whole[0])
    assert "[21, 41, 61, 81, 101]" in small_scripts.last_line(whole[0])


def test_a_loader_that_reads_ahead_is_refused_at_the_first_boundary(tmp_path, make_job):
    """The batch in between would be lost at each resume."""
    job = make_job(tmp_path / "job", reads_ahead=True, **SPEC)
    assert job.run() == 78
    assert "run.boundary(taken=1): the loader `loader` has already yielded 2 batches" in job.output
    assert job.history.attempts[0].events[-1]["kind"] == "error"


AHEAD = {"reads_ahead": True, "ahead": 1}


@pytest.mark.parametrize(
    ("place", "name"),
    few(2, [("epoch 1", "KILL"), ("step 21", "TERM"), ("epoch 2", "TERM"), *STRIKES[:8]]),
)
def test_a_loop_that_reads_one_batch_ahead_is_exact_if_forge_knows_it(
    place, name, tmp_path, make_job, undisturbed
):
    """Its data draws: the batch that was read ahead is read again with the same random numbers."""
    job = make_job(tmp_path / "job", kill_at={place: name}, **AHEAD, **SPEC)
    job.run_to_end(CODES[name])
    assert_same_run(job, undisturbed(**AHEAD, **SPEC))
    if name != "KILL":
        assert job.steps_repeated == [0]


@pytest.mark.parametrize(
    ("spec", "place"),
    few(
        2,
        [
            *(({"workers": 1}, "end 20"), ({"limit": 7}, "end 6")),
            *itertools.product(
                [{"workers": 2}, {"limit": 7}, *({"kind": k} for k in KINDS)],
                ["step 17", "end 20", "end 21"],
            ),
        ],
    ),
    ids=str,
)
def test_other_loaders_are_read_ahead_too(spec, place, tmp_path, make_job, undisturbed):
    """With workers, or left early; what makes each kind of loader different is below."""
    spec = AHEAD | SPEC | spec
    job = make_job(tmp_path / "job", kill_at={place: "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize(
    ("spec", "place"),
    few(
        3,
        [
            *(({"kind": "stateful"}, "step 17"), ({"kind": "list"}, "step 17")),
            *(({"kind": "distributed"}, "end 20"), ({"kind": "stateful"}, "end 20")),
            *(({"kind": "list"}, "end 20"), ({"kind": "distributed"}, "step 17")),
            *(({"workers": 2}, "step 17"), ({"workers": 2}, "end 20")),
        ],
    ),
    ids=str,
)
def test_other_loaders_have_their_place_too(spec, place, tmp_path, make_job, undisturbed):
    """Inside a pass, and after its last batch."""
    job = make_job(tmp_path / "job", kill_at={place: "TERM"}, **spec, **SPEC)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec, **SPEC))


@pytest.mark.parametrize(
    ("place", "kind"),
    few(
        2,
        [
            *(("end 7", "stateful"), ("step 7", "plain")),
            *itertools.product(["step 6", "end 14"], ["plain", "stateful"]),
        ],
    ),
)
def test_a_pass_that_is_left_early_is_ended_by_the_loop(
    kind, place, tmp_path, make_job, undisturbed
):
    """After a resume too: the loader cannot know whether the loop wants more of the pass."""
    spec = SPEC | {"kind": kind, "limit": 7}
    job = make_job(tmp_path / "job", kill_at={place: "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize("more", few(1, [AHEAD, {}]), ids=str)
def test_workers_that_live_for_all_passes_draw_one_seed(more, tmp_path, make_job, undisturbed):
    """A resumed job starts them again between two passes, and must not draw for that."""
    spec = SPEC | {"limit": 7, "workers": 1, "persistent": True} | more
    job = make_job(tmp_path / "job", kill_at={"end 14": "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.parametrize(
    ("more", "place"),
    few(
        2,
        [
            *(({}, "end 10"), ({"kind": "stateful"}, "end 17")),
            *itertools.product([{}, AHEAD, {"workers": 2}], ["step 0", "step 10", "end 17"]),
        ],
    ),
    ids=str,
)
def test_a_loop_that_draws_between_making_an_iterator_and_reading_it(
    more, place, tmp_path, make_job, undisturbed
):
    """A DataLoader draws its seed as the iterator is made, and the order with the first batch."""
    spec = SPEC | {"begins": True} | more
    job = make_job(tmp_path / "job", kill_at={place: "TERM"}, **spec)
    job.run_to_end(143)
    assert_same_run(job, undisturbed(**spec))


def test_a_pass_that_is_left_without_a_word_is_refused(tmp_path, make_job):
    job = make_job(tmp_path / "job", limit=7, forgets=True, **SPEC)
    assert job.run() == 78
    assert "Call `loader.end_pass()` after the `break`" in job.output


def test_a_rollback_is_done_by_the_next_start(tmp_path, make_job):
    """No loop of somebody else's can go back."""
    nan = {"action": "rollback", "max_consecutive": 1}
    spec = SPEC | {"policy": SPEC["policy"] | {"nan": nan}, "bad": 25}
    job = make_job(tmp_path / "job", **spec)
    job.run_to_end(75)
    assert starts(job) == [[0, 0, False, False], [24, 2, True, False]]
    (rolled,) = [e for a in job.history.attempts for e in a.events if e["kind"] == "rollback"]
    assert (rolled["step"], rolled["first_bad"]) == (24, 25)
    assert "rollback to step 24, in a new attempt" in job.output


def test_signals_that_a_trainer_has_taken_are_taken_back(tmp_path, make_job, undisturbed):
    """Lightning installs handlers of its own after it has called the callback that enters."""
    job = make_job(tmp_path / "job", kill_at={"step 13": "TERM"}, takes_signals=True, **SPEC)
    job.run_to_end(143)
    assert "replaced forge's handler of SIGTERM, SIGUSR1 since forge.Run was" in job.output
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**SPEC))


def test_finish_ends_it(tmp_path, make_job):
    job = make_job(tmp_path / "job", finish_at=9, **SPEC)
    assert job.run() == 0
    (attempt,) = job.history.attempts
    assert attempt.events[-1]["kind"] == "finish"
    assert attempt.events[-1]["step"] == 10


def test_ranks_stop_after_the_same_step_and_end_as_in_a_loop_over_steps(tmp_path):
    """One engine: the same bits as `run.steps`, on all ranks, though only one was signalled."""
    whole = RankedJob(tmp_path / "whole", 2, n=12)
    whole.run_to_end()
    job = RankedJob(tmp_path / "job", 2, n=12, pushed=True, signal=[[7, 1]])
    job.run_to_end([75, 75])
    job.assert_same_run(whole)


# -- misuse, and a disabled Run -------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def make(**objects):
        return forge.Run({"checkpoint": {"dir": str(tmp_path / "ck"), "every_steps": 1}}, **objects)

    return make


def test_calls_that_cannot_be_meant_say_what_to_do(run):
    loader = forge.data.resumable(DataLoader(torch.arange(6.0), 2))
    one = run(loader=loader)
    with pytest.raises(forge.ForgeError, match="needs `with forge"):
        one.begin()
    with one:
        with pytest.raises(forge.ForgeError, match="call `start = run"):
            one.boundary(1, taken=0)
        one.begin()
        with pytest.raises(forge.ForgeError, match="was called after another loop"):
            one.begin()
        for step in (0, True, 1.5):
            with pytest.raises(forge.ForgeError, match="expected the number of steps done"):
                one.boundary(step, taken=0)
        next(iter(loader))
        assert one.boundary(1, taken=1) is False
        with pytest.raises(forge.ForgeError, match="inside a step"):
            one.steps(3)
        one.end_loop("enough")
        one.end_loop("harmless")


@pytest.mark.parametrize(("taken", "message"), [(None, "without `taken`"), (1, "yielded only 0")])
def test_a_loop_with_a_loader_counts_the_batches_that_it_took(run, taken, message):
    loader = forge.data.resumable(DataLoader(torch.arange(6.0), 2))

    def train():
        with outliving(), run(loader=loader) as one:
            one.begin()
            one.boundary(1, taken=taken)

    with pytest.raises(forge.Exit, match=message):
        train()


def test_two_loaders_are_refused(run):
    loaders = [forge.data.resumable([1, 2]) for _ in range(2)]
    with run(loaders=loaders) as one, pytest.raises(forge.ForgeError, match="can have only one"):
        one.begin()


def test_a_loop_cannot_become_one_of_the_other_kind(run):
    with run() as one:
        one.begin()
        one.boundary(1)
    for begin in (lambda r: next(r.steps(5)), lambda r: next(r.epochs(5))):
        with (
            pytest.raises(forge.StateMismatch, match=r"has a position in a loop with run.bound"),
            run() as one,
        ):
            begin(one)


def test_a_loop_over_steps_cannot_become_a_pushed_one(run):
    with run() as one:
        for _ in one.steps(5):
            pass
    with (
        pytest.raises(forge.StateMismatch, match=r"has a position in a loop over run.steps"),
        run() as one,
    ):
        one.begin()


def test_a_disabled_run_only_counts():
    seen = []
    with forge.Run({"enabled": False}) as one:
        one.every(2, at_end=True)(seen.append)
        assert [*one.begin()] == [0, 0, False, False]
        for step in range(1, 6):
            assert one.boundary(step, epoch=step // 3) is False
        assert (one.step, one.epoch) == (5, 1)
        one.end_loop()
    assert seen == [2, 4, 5]


def test_a_saved_state_can_be_read_before_the_run_is_entered(run, tmp_path):
    """A trainer needs its counters before it has built what forge.Run is given."""
    assert run().peek("model") is None
    model = torch.nn.Linear(2, 1)
    with run(model=model, trainer=Counter()) as one:
        one.begin()
        one.boundary(3)
        one.end_loop()
    checkpoint = tmp_path / "ck" / "step_3"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").rglob("*")}
    assert run().peek("trainer") == {"count": 7}
    assert torch.equal(run().peek("model")["weight"], model.weight)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ck").rglob("*")} == before
    with pytest.raises(
        forge.CheckpointError, match=r"no state of `trainr`\. It has model, trainer"
    ):
        run().peek("trainr")
    assert forge.Run({"enabled": False}).peek("trainer") is None
    (checkpoint / manifest.TENSORS).write_bytes(b"")
    with pytest.raises(forge.DamagedCheckpoint, match=r"No checkpoint in .* can be used"):
        run().peek("trainer")


def test_a_checkpoint_that_a_killed_save_was_replacing_can_be_read_before(run, tmp_path):
    """The Run will restore it and resume from it: a trainer must not begin its loop elsewhere."""
    with run(trainer=Counter()) as one:
        one.begin()
        one.boundary(3)
        one.end_loop()
    work = tmp_path / "ck" / ".work__0_dead"
    work.mkdir()
    (tmp_path / "ck" / "step_3").rename(work / "replaced_step_3-000001")
    assert run().peek("trainer") == {"count": 7}
    with run(trainer=Counter()) as one:
        assert one.begin().is_finished


class Counter:
    def state_dict(self):
        return {"count": 7}

    def load_state_dict(self, state):
        assert state == self.state_dict()


def test_open_and_close_are_the_block(run):
    one = run().open()
    assert one.begin().step == 0
    one.boundary(1)
    one.close()
    with run() as again:
        assert again.begin() == (1, 0, True, True)


# -- the loader by itself -------------------------------------------------------------------------


def batches(loader, count):
    return [batch.tolist() for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_the_loader_continues_where_it_was(passes, taken):
    """In any loop, without a Run: with its state, and torch's random state."""

    def make():
        torch.manual_seed(3)
        return forge.data.resumable(DataLoader(torch.arange(9.0), 3, shuffle=True))

    whole, stopped = make(), make()
    expected = [batch.tolist() for _ in range(passes + 2) for batch in whole]
    torch.manual_seed(3)
    seen = [batch.tolist() for _ in range(passes) for batch in stopped]
    if taken:
        iterator = iter(stopped)
        seen += [next(iterator).tolist() for _ in range(taken)]
    state, drawn = stopped.state_dict(), torch.get_rng_state()
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert resumed.taken == passes * 3 + taken
    assert resumed.state_dict() == state
    while len(seen) < len(expected):
        seen += [batch.tolist() for batch in resumed]
    assert seen == expected
    assert len(resumed) == 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_pass_can_begin_after_its_first_batches(workers, ahead):
    """A trainer that resumes from a checkpoint of its own skips batches."""

    def make():
        torch.manual_seed(3)
        loader = DataLoader(torch.arange(9.0), 3, shuffle=True, num_workers=workers)
        return forge.data.resumable(loader, ahead=ahead)

    whole, later = make(), make()
    expected = [batch.tolist() for _ in range(2) for batch in whole]
    torch.manual_seed(3)
    later.skip(2)
    iterator = iter(later)
    seen = [next(iterator).tolist()]
    assert later.taken == 3
    state, drawn = later.state_dict(), torch.get_rng_state()
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    seen += [batch.tolist() for _ in range(2) for batch in resumed]
    assert seen == expected[2:]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_first_batch_of_a_later_pass_is_read_again(persistent):
    """A trainer that joins loaders reads ahead into the next pass of a short one."""

    def make():
        options = {"num_workers": 1, "persistent_workers": persistent}
        return forge.data.resumable(DataLoader(range(6), 2, shuffle=True, **options), ahead=1)

    torch.manual_seed(3)
    whole = make()
    list(whole)
    iterator = iter(whole)
    expected = [next(iterator).tolist()]
    whole.pending = 1
    state, drawn = whole.state_dict(), torch.get_rng_state()
    expected += [batch.tolist() for batch in iterator]
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert [batch.tolist() for batch in resumed] == expected
    whole.loader._iterator = resumed.loader._iterator = None  # the workers end


def test_a_sampler_gets_the_number_of_a_pass_if_the_loop_sets_it():
    """Else the script calls `set_epoch` of the sampler, as without forge, or does not."""
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
    loader = forge.data.resumable(DataLoader(range(8), sampler=sampler))
    epochs = []
    for number in (None, 5, None):
        if number is not None:
            loader.set_epoch(number)
        list(loader)
        epochs.append(sampler.epoch)
    assert epochs == [0, 5, 5]


class Several:
    """Two loaders that are read as one, in an object that has the places of both."""

    def __init__(self):
        self.resumables = [forge.data.resumable(iter([1])), forge.data.resumable([1, 2])]

    def state_dict(self):
        return {"places": [one.state_dict() for one in self.resumables]}

    def load_state_dict(self, state):
        pass


def test_loaders_inside_another_object_are_named_if_a_resume_is_inexact(tmp_path, caplog):
    """Otherwise only a loader that is an object of its own would be named."""
    with a_run(tmp_path, loaders=Several()) as run:
        run.begin()
        run.boundary(1)
        run.end_loop()
    assert caplog.text.count("Not known to resume exactly") == 1
