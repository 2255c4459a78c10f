"""What a wrapper makes of the answers of its ranks."""

import json
import time
from dataclasses import replace

import pytest

from forge.errors import Reason
from forge.job import hang_files, hangs, padded
from forge.job.hang_files import Answer, Phase, Question
from forge.job.hangs import Hangs, blame
from forge.job.requeue import Outcome

QUESTION = Question(attempt=1, rank=0, time=12.5)


def answer(rank, **changes):
    fields = {
        "question": QUESTION.name,
        "rank": rank,
        "node": "n1",
        "pid": 100 + rank,
        "section": "step",
        "step": 7,
        "count": 9,
        "waited_s": 11.0,
        "limit_s": 10.0,
        "is_expired": True,
        "excuse": "",
    }
    return Answer(**(fields | changes))


class Ruled:
    """A job's directory, and the wrapper's side of its hangs."""

    def __init__(self, folder, ranks=2, action="restart"):
        self.folder, self.forge = folder, folder / ".forge"
        self.forge.mkdir()
        self.lines, self.said = [], []
        self.hangs = Hangs(
            folder,
            ranks,
            action,
            lambda kind, **more: self.lines.append((kind, more)),
            self.said.append,
        )
        self.hangs.begin(1)
        hang_files.ask(self.forge, QUESTION)

    @property
    def phase(self):
        found = hang_files.read(self.forge, 1)
        return None if found is None else found.phase

    def answer(self, *answers, gone=None):
        for one in answers:
            hang_files.answer(self.forge, one)
        self.hangs.look(gone or {})

    def ask_again(self):
        hang_files.ask(self.forge, QUESTION)
        self.hangs._looked = 0.0  # long ago


@pytest.fixture
def job(tmp_path):
    return Ruled(tmp_path)


def stacks(*answers):
    name = replace(QUESTION, phase=Phase.stacks).name
    return [replace(one, question=name) for one in answers]


def test_a_hang_is_shown_by_all_and_then_ended(job):
    both = answer(0), answer(1)
    job.answer(both[0])
    assert job.phase is Phase.expired  # rank 1 may be alive
    job.answer(both[1])
    assert job.phase is Phase.stacks
    job.answer(*stacks(*both))
    assert job.phase is Phase.end
    assert [kind for kind, _ in job.lines] == ["hang"]
    found = json.loads((job.folder / "hangs/1/summary.json").read_text())
    assert (found["rank"], found["step"], sorted(found["ranks"])) == (0, 7, ["0", "1"])
    ended = job.hangs.explain(Outcome(-9, is_held=True, is_supervisor_lost=True))
    assert str(ended) == job.said[0].partition("; the job")[0]
    assert (ended.reason, ended.exit_code, ended.state) == (Reason.hung, 70, "failed")
    assert ended.hung_at == 7


def test_what_the_job_was_asked_meanwhile_stays_its_reason(job):
    both = answer(0), answer(1)
    job.answer(*both)
    job.answer(*stacks(*both))
    cancelled = Outcome(-9, Reason.cancelled)
    assert job.hangs.explain(cancelled) == cancelled
    assert job.hangs.explain(Outcome(0)).is_finished


def test_who_waits_for_a_rank_that_may_take_its_time_does_not_hang(job):
    """Ranks wait for each other: each of them has a limit of its own, and may be stopped."""
    job.answer(answer(0), answer(1, is_expired=False, excuse="is in `compilation`"))
    assert job.phase is None
    assert job.lines == [("no hang", {"rank": 0, "because": "rank 1 is in `compilation`"})]
    assert not (job.folder / "hangs").exists()
    assert job.hangs.explain(Outcome(-9)).reason is Reason.crashed


def test_a_rank_that_has_moved_on_while_stacks_were_written_was_slow(job):
    both = answer(0), answer(1)
    job.answer(*both)
    job.answer(*stacks(both[0], answer(1, count=10)))
    assert job.phase is None
    assert [kind for kind, _ in job.lines] == ["no hang"]
    assert list((job.folder / "hangs").iterdir()) == []


def test_a_rank_outside_of_its_run_is_the_one_that_is_waited_for(job):
    """It never came, or has left: nobody knows how long that takes."""
    both = answer(0), answer(1, is_expired=False, section="outside", step=0, limit_s=0.0)
    job.answer(*both)
    job.answer(*stacks(*both))
    assert (job.lines[0][1]["rank"], job.lines[0][1]["limit_s"]) == (1, 10.0)


def test_a_rank_that_does_not_answer_is_missing_and_named(tmp_path, monkeypatch):
    """Its node may be gone, and nobody knows yet."""
    job = Ruled(tmp_path)
    monkeypatch.setattr(hangs, "_ANSWER_S", 0.0)
    monkeypatch.setattr(hangs, "_STACKS_S", 0.0)
    job.answer(answer(0))
    job.answer(*stacks(answer(0)))
    assert job.phase is Phase.end
    assert "rank 1 hangs" in job.said[0]
    assert "does not answer" in job.said[0]


def test_who_has_left_its_run_by_the_time_it_is_asked_does_not_hang(tmp_path):
    """Its last save took long; now main does whatever it likes."""
    job = Ruled(tmp_path, ranks=1)
    job.answer(answer(0, is_expired=False, section="outside"))
    assert job.phase is None
    assert "nobody waits" in job.lines[0][1]["because"]


def test_where_a_rank_has_failed_the_others_are_not_killed_as_they_save(job):
    """Their main threads stand in a collective, while others of their threads save."""
    job.answer(answer(0), gone={1: True})
    assert job.phase is None
    assert "rank 1 has failed" in job.lines[0][1]["because"]


def test_one_excuse_is_enough(job):
    """Nobody has to wait for the answer of a thousandth rank."""
    job.answer(answer(0, excuse="is stopped"))
    assert job.phase is None


def test_a_wrapper_that_was_stopped_with_its_job_waits_on(job, monkeypatch):
    """Gang scheduling: an hour has passed, and nobody could answer."""
    job.answer(answer(0))
    later = time.monotonic() + 3600
    monkeypatch.setattr(hangs.time, "monotonic", lambda: later)
    job.hangs.look({})
    assert job.phase is Phase.expired


def test_a_rank_that_has_ended_is_not_waited_for(job):
    job.answer(answer(0), gone={1: False})
    assert job.phase is Phase.stacks


def test_a_rank_that_has_ended_meanwhile_is_not_blamed(job):
    """It had left its Run while the others waited for it, and then came to its end."""
    both = answer(0, section="collective"), answer(1, section="outside", is_expired=False)
    job.answer(*both)
    job.answer(*stacks(both[0]), gone={1: False})
    assert job.lines[0][1]["rank"] == 0


def test_warn_goes_on(tmp_path):
    job = Ruled(tmp_path, action="warn")
    both = answer(0), answer(1)
    job.answer(*both)
    job.answer(*stacks(*both))
    assert job.phase is None
    assert [kind for kind, _ in job.lines] == ["hang"]
    assert job.hangs.explain(Outcome(-9)).reason is Reason.crashed
    job.ask_again()
    moved = answer(0, count=10), answer(1, count=10)
    job.answer(*moved)
    job.answer(*stacks(*moved))
    assert [one["folder"] for _, one in job.lines] == ["hangs/1", "hangs/2"]


def test_a_question_of_an_earlier_attempt_is_gone_when_the_next_begins(job):
    job.hangs.begin(2)
    assert list(job.forge.iterdir()) == []
    hang_files.ask(job.forge, Question(attempt=1, rank=1, time=1.0))
    assert hang_files.read(job.forge, 2) is None


def test_half_a_question_is_gone_when_the_next_attempt_begins(job):
    """Who asked it was killed meanwhile, and its task with it, so there is one."""
    (job.forge / "hang.json").write_text('{"attempt": 1, "ra')
    job.hangs.look({})
    assert job.lines == job.said == []
    job.hangs.begin(2)
    assert list(job.forge.iterdir()) == []


def test_where_nobody_asks_it_is_looked_now_and_then(job, monkeypatch):
    """A wrapper wakes up for much else."""
    job.hangs.begin(1)
    looks = []
    monkeypatch.setattr(hang_files, "read", lambda *_: looks.append(1))
    for _ in range(3):
        job.hangs.look({})
    assert looks == [1]


def test_only_the_first_asks(job):
    hang_files.ask(job.forge, Question(attempt=1, rank=1, time=3.0))
    assert hang_files.read(job.forge, 1) == QUESTION


def test_on_a_full_disk_the_job_is_left_alone(job, monkeypatch):
    """A hang that cannot be shown is no reason to end anything."""

    def full(*_, **__):
        raise OSError(28, "no space")

    for rank in range(2):
        hang_files.answer(job.forge, answer(rank))
    monkeypatch.setattr(hang_files, "write_atomically", full)
    job.hangs.look({})
    assert job.phase is None
    assert "no space" in job.said[0]
    assert job.hangs.explain(Outcome(-9)).reason is Reason.crashed
    monkeypatch.undo()
    job.ask_again()  # once there is room
    job.answer(answer(0), answer(1))
    assert job.phase is Phase.stacks


@pytest.mark.parametrize("what", ["read-only", "by another forge"])
def test_what_cannot_be_read_or_written_never_ends_the_wrapper(job, monkeypatch, what):
    """A disk that has failed takes back no question; code may be exchanged below a job."""
    for rank in range(2):
        hang_files.answer(job.forge, answer(rank))
    if what == "read-only":

        def refuse(*_, **__):
            raise OSError(30, "read-only")

        monkeypatch.setattr(hang_files, "write_atomically", refuse)
        monkeypatch.setattr(hang_files, "withdraw", refuse)
    else:
        content = json.loads((job.forge / "hang.json").read_text())
        (job.forge / "hang.json").write_text(json.dumps(content | {"more": 1}))
    for _ in range(3):
        job.hangs._looked = 0.0
        job.hangs.look({})
    assert len(job.said) == 1
    assert "cannot be found out" in job.said[0]
    assert job.hangs.explain(Outcome(-9)).reason is Reason.crashed


def test_a_disk_that_fills_up_meanwhile_does_not_keep_a_hang_from_its_end(job, monkeypatch):
    """There is no room for another file; there is for new content of the one that is there."""

    def full(*_, **__):
        raise OSError(28, "no space")

    both = answer(0), answer(1)
    job.answer(*both)
    for one in stacks(*both):
        hang_files.answer(job.forge, one)
    for module in (padded, hangs, hang_files):
        monkeypatch.setattr(module, "write_atomically", full)
    job.hangs.look({})
    assert job.phase is Phase.end
    assert job.hangs.explain(Outcome(-9)).reason is Reason.hung


def test_a_rank_that_shows_no_stacks_is_not_missing(job, monkeypatch):
    """It has answered, and its disk or its node was too slow for more."""
    both = answer(0), answer(1, step=6)
    job.answer(*both)
    monkeypatch.setattr(hangs, "_STACKS_S", 0.0)
    job.answer(*stacks(both[0]))
    assert job.phase is Phase.end
    assert "fewest steps" in job.said[0]


TORCH = "/v/site-packages/torch/autograd/graph.py"
BEHIND = {
    "the fewest steps": ({1: {"step": 6}}, 1, "fewest steps"),
    "not in a collective": (
        {0: {"section": "collective"}, 2: {"section": "collective"}, 3: {"section": "collective"}},
        1,
        "wait in a collective",
    ),
    "elsewhere": ({1: {"line": "a:1 in f", "inside": "b:2 in g"}}, 1, "elsewhere"),
    "all in torch": (
        {n: {"line": f"a:{n} in f", "inside": f"{TORCH}:{n} in b"} for n in range(4)},
        0,
        "nothing tells it",
    ),
    "who asked": ({}, 0, "nothing tells it from the others"),
    "outside of torch": (
        {
            n: {"line": f"a:{n} in f", "inside": f"{'/x' if n == 2 else TORCH}:1 in b"}
            for n in range(4)
        },
        2,
        "outside of torch",
    ),
    "nobody knows": (
        {n: {"line": f"a:{n} in f"} for n in range(4)},
        0,
        "nothing tells it from the others",
    ),
}


@pytest.mark.parametrize(("changes", "rank", "because"), BEHIND.values(), ids=BEHIND)
def test_the_rank_that_holds_up_the_others_is_named(changes, rank, because):
    """Whoever is ahead must not be blamed."""
    answers = {n: answer(n, **changes.get(n, {})) for n in range(4)}
    found = blame(QUESTION, answers, set(range(4)))
    assert found.who.rank == rank
    assert because in str(found)
    other = blame(replace(QUESTION, rank=3), answers, set(range(4)))
    assert other.who.rank == (3 if "nothing tells" in because else rank)
