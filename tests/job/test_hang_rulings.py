"""How the wrapper of a job decides from its ranks' reports whether the job hangs.

One module, since every case is a few reports and the wrapper's decision on one job directory.
"""

import json
import time
from dataclasses import replace

import pytest
from plans import planned

from forge.errors import Reason
from forge.filesystem import preallocated_file
from forge.job import hang_files, hangs
from forge.job.ending import Ending
from forge.job.hang_files import HangQuery, HangReport, QueryPhase
from forge.job.hangs import Hangs, find_culprit
from forge.job.wrapper import job_of
from forge.jobdir import job_state
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State

QUERY = HangQuery(attempt=1, rank=0, time=12.5)


def report(rank, **changes):
    """The report of a rank whose time limit has passed, written without a query."""
    fields = {
        "attempt": 1,
        "query": "",
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
    return HangReport(**(fields | changes))


class Ruled:
    """The directory of a job, and the hang detection in the job's wrapper."""

    def __init__(self, folder, ranks=2, action="restart"):
        self.folder, self.forge = folder, folder / ".forge"
        self.files = self.forge / "hang"
        self.said = []
        self.job = job_of(folder, planned(ranks=ranks), nodes="n1", say=self.said.append)
        self.job.write(State.running)
        self.hangs = Hangs(self.job, ranks, action)
        self.hangs.begin_attempt(1)

    @property
    def lines(self):
        """Kind and fields of each event in the job's ledger."""
        path = job_ledger(self.folder)
        events = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
        return [(one.pop("kind"), one) for one in events]

    @property
    def noted(self):
        """The hang in the job's state, which the launcher shows."""
        return job_state.read(self.folder).hang

    @property
    def query(self):
        return hang_files.read_query(self.forge, 1)

    @property
    def phase(self):
        return None if self.query is None else self.query.phase

    def expire(self, *reports, gone=None):
        """Ranks report without a query that their limit has passed."""
        for one in reports:
            hang_files.write_report(self.forge, one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hangs, "TICK_S", 0.0)
            self.hangs.look(gone or {})

    def answer(self, *reports, gone=None):
        """Ranks answer the wrapper's query."""
        for one in reports:
            hang_files.write_report(self.forge, replace(one, query=self.query.name))
        self.hangs.look(gone or {})


@pytest.fixture
def job(tmp_path):
    """A job in which the limit of rank 0 has passed, and the wrapper has queried both ranks."""
    ruled = Ruled(tmp_path)
    ruled.expire(report(0))
    return ruled


def full(*_, **__):
    raise OSError(28, "no space")


def test_a_hang_is_shown_by_all_and_then_ended(job):
    both = report(0), report(1)
    job.answer(both[0])
    assert job.phase is QueryPhase.report  # rank 1 can be alive
    job.answer(both[1])
    assert job.phase is QueryPhase.stacks
    job.answer(*both)
    assert job.phase is QueryPhase.end
    assert [kind for kind, _ in job.lines] == ["hang"]
    found = json.loads((job.folder / "hangs/1/summary.json").read_text())
    assert (found["rank"], found["step"], sorted(found["ranks"])) == (0, 7, ["0", "1"])
    ended = job.hangs.explain(Ending.of(-9, is_held=True))
    assert ended.text == job.said[0].partition("; the job")[0]
    assert (ended.reason, ended.exit_code, ended.state) == (Reason.hung, 70, State.failed)
    assert job.noted == ""  # the launcher prints the reason of the attempt's end anyway
    assert ended.hung_at == 7


def test_what_the_job_was_asked_meanwhile_stays_its_reason(job):
    both = report(0), report(1)
    job.answer(*both)
    job.answer(*both)
    cancelled = Ending.of(-9).imposed(Reason.cancelled)
    assert job.hangs.explain(cancelled) == cancelled
    assert job.hangs.explain(Ending.of(0)).is_finished


def test_a_rank_that_waits_for_a_working_rank_does_not_hang(job):
    """Each rank has its own limit: rank 1 can compile for as long as its limit allows."""
    job.answer(report(0), report(1, is_expired=False, excuse="is in `compilation`"))
    assert job.phase is None
    ((kind, event),) = job.lines
    assert (kind, event["rank"], event["because"]) == ("no hang", 0, "rank 1 is in `compilation`")
    assert not (job.folder / "hangs").exists()
    assert job.hangs.explain(Ending.of(-9)).reason is Reason.crashed


def test_a_rank_that_has_moved_on_while_stacks_were_written_was_slow(job):
    both = report(0), report(1)
    job.answer(*both)
    job.answer(both[0], report(1, count=10))
    assert job.phase is None
    assert [kind for kind, _ in job.lines] == ["no hang"]
    assert list((job.folder / "hangs").iterdir()) == []


def test_a_rank_outside_of_its_run_is_the_one_that_is_waited_for(job):
    """The rank has not entered its Run yet, or has left it; outside a Run there is no limit."""
    both = report(0), report(1, is_expired=False, section="outside", step=0, limit_s=0.0)
    job.answer(*both)
    job.answer(*both)
    assert (job.lines[0][1]["rank"], job.lines[0][1]["limit_s"]) == (1, 10.0)


def test_a_rank_that_does_not_report_is_the_culprit(tmp_path, monkeypatch):
    """The rank's node can be down before Slurm notices."""
    job = Ruled(tmp_path)
    job.expire(report(0))
    for phase in hangs.PATIENCE_S:
        monkeypatch.setitem(hangs.PATIENCE_S, phase, 0.0)
    job.answer(report(0))
    job.answer(report(0))
    assert job.phase is QueryPhase.end
    assert "rank 1 hangs" in job.said[0]
    assert "does not report" in job.said[0]


def test_a_rank_that_has_left_its_run_since_its_report_does_not_hang(tmp_path):
    """The rank's last save took long; after its Run there is no time limit."""
    job = Ruled(tmp_path, ranks=1)
    job.expire(report(0))
    job.answer(report(0, is_expired=False, section="outside"))
    assert job.phase is None
    assert "no rank is past its limit any more" in job.lines[0][1]["because"]


def test_if_a_rank_has_failed_the_other_ranks_are_not_killed_while_they_save(job):
    """The main threads of the other ranks wait in a collective, while other threads save."""
    job.answer(report(0), gone={1: True})
    assert job.phase is None
    assert "rank 1 has failed" in job.lines[0][1]["because"]


def test_one_excuse_is_enough(job):
    """The wrapper does not wait for the reports of all other ranks."""
    job.answer(report(0, excuse="is stopped"))
    assert job.phase is None


def test_a_wrapper_that_was_stopped_with_its_job_waits_on(job, monkeypatch):
    """Gang scheduling suspends the job for an hour, in which no rank can report."""
    job.answer(report(0))
    later = time.monotonic() + 3600
    monkeypatch.setattr(hangs.time, "monotonic", lambda: later)
    job.hangs.look({})
    assert job.phase is QueryPhase.report


def test_slow_reports_leave_the_stacks_their_time(job, monkeypatch):
    """A rank that makes progress reads the query file only once a minute."""
    now = time.monotonic()
    monkeypatch.setattr(hangs.time, "monotonic", lambda: now)
    for _ in range(50):
        now += 2.0
        job.hangs.look({})
    job.answer(report(0), report(1))
    now += 2.0
    job.answer(report(0))
    assert job.phase is QueryPhase.stacks


def test_a_rank_that_has_ended_is_not_waited_for(job):
    job.answer(report(0), gone={1: False})
    assert job.phase is QueryPhase.stacks


def test_a_rank_that_has_ended_meanwhile_is_not_blamed(job):
    """The rank had left its Run while the other ranks waited for it, and then ended."""
    both = report(0, section="collective"), report(1, section="outside", is_expired=False)
    job.answer(*both)
    job.answer(both[0], gone={1: False})
    assert job.lines[0][1]["rank"] == 0


def test_warn_goes_on(tmp_path):
    job = Ruled(tmp_path, action="warn")
    job.expire(report(0))
    both = report(0), report(1)
    job.answer(*both)
    job.answer(*both)
    assert job.phase is None
    assert [kind for kind, _ in job.lines] == ["hang"]
    assert [job.noted] == job.said  # the launcher prints the warning, too
    assert job.hangs.explain(Ending.of(-9)).reason is Reason.crashed
    moved = report(0, count=10), report(1, count=10)
    job.expire(moved[0])
    job.answer(*moved)
    job.answer(*moved)
    assert [one["folder"] for _, one in job.lines] == ["hangs/1", "hangs/2"]


def test_files_of_an_earlier_attempt_are_removed_when_the_next_begins(job):
    """The wrapper of the earlier attempt was killed before it could delete its query."""
    hang_files.write_report(job.forge, report(1))
    (job.files / ".rank1.tmp-0").write_text("{")  # its supervisor was killed as well
    job.hangs.begin_attempt(2)
    assert list(job.files.iterdir()) == []


def test_files_of_another_attempt_are_ignored(job):
    """A network file system can still list a file that was deleted."""
    assert hang_files.read_query(job.forge, 2) is None
    assert hang_files.read_reports(job.forge, 2, range(2)) == []
    job.hangs.begin_attempt(2)
    job.expire(report(0))
    assert hang_files.read_query(job.forge, 2) is None
    assert job.lines == job.said == []


def test_half_a_report_is_ignored(tmp_path):
    """Reports are replaced atomically; a disk that fails can still truncate a report."""
    job = Ruled(tmp_path)
    (job.files / "rank1").write_text('{"attempt": 1, "ra')
    (job.files / ".rank0.tmp-0").write_text("{")
    job.expire()
    assert job.query is None
    assert job.lines == job.said == []


def test_without_a_query_the_wrapper_looks_every_two_seconds(job, monkeypatch):
    """The wrapper wakes up much more often, for other reasons."""
    job.hangs.begin_attempt(1)
    now = time.monotonic()
    looks = []
    monkeypatch.setattr(hang_files, "read_reports", lambda *_: looks.append(now))
    monkeypatch.setattr(hangs.time, "monotonic", lambda: now)
    for tick_s in (0.5, 0.5, 1.5, 0.5, 0.5):
        now += tick_s
        job.hangs.look({})
    assert len(looks) == 1


def test_if_several_limits_have_passed_one_query_names_the_rank_that_waits_longest(tmp_path):
    """In a blocked collective all ranks exceed their limits at the same time."""
    job = Ruled(tmp_path)
    job.expire(report(0), report(1, waited_s=12.0))
    query = job.query
    assert (query.rank, query.phase) == (1, QueryPhase.report)
    job.expire(report(0))  # its supervisor has not seen the query yet
    assert job.query == query
    job.answer(report(0), report(1))
    assert job.phase is QueryPhase.stacks


def test_a_rank_that_has_ended_since_its_report_is_no_reason_to_ask(tmp_path):
    job = Ruled(tmp_path)
    job.expire(report(0), gone={0: False})
    assert job.query is None


def test_a_report_that_comes_after_its_query_was_withdrawn_asks_nothing(job):
    """On a slow disk a rank can answer a query that the wrapper has deleted meanwhile."""
    query = job.query
    job.answer(report(0, excuse="is stopped"))
    job.expire(report(1, query=query.name))
    assert job.query is None
    assert len(job.lines) == 1


@pytest.mark.parametrize("phase", [QueryPhase.report, QueryPhase.stacks])
def test_on_a_full_disk_the_job_is_left_alone(tmp_path, monkeypatch, phase):
    """If the stacks cannot be written, the job is not ended for the hang."""
    job, both = Ruled(tmp_path), (report(0), report(1))
    if phase is QueryPhase.stacks:
        job.expire(both[0])
        job.answer(both[0])
        both = [replace(one, query=job.query.name) for one in both]
    with monkeypatch.context() as patch:
        patch.setattr(preallocated_file, "write_atomically", full)
        job.expire(*both)
    assert job.query is None
    said = "hang detection failed; training continues, and forge tries again: "
    assert job.said == [f"{said}OSError: [Errno 28] no space"]
    assert job.hangs.explain(Ending.of(-9)).reason is Reason.crashed
    job.expire(report(0))  # again, once there is room
    job.answer(report(0), report(1))
    assert job.phase is QueryPhase.stacks


def test_a_folder_that_a_full_disk_had_no_room_for_is_made_later(tmp_path, monkeypatch):
    """The job starts without the folder, and has hang detection once there is room."""
    with monkeypatch.context() as patch:
        patch.setattr(hang_files, "make_directory", full)
        job = Ruled(tmp_path)
    assert not job.files.exists()
    job.expire()
    job.expire(report(0))
    assert job.phase is QueryPhase.report


@pytest.mark.parametrize("what", ["read-only", "by another version"])
def test_a_file_that_cannot_be_read_or_written_never_ends_the_wrapper(tmp_path, monkeypatch, what):
    """On a disk that has failed the wrapper cannot even delete its query."""
    job = Ruled(tmp_path)
    hang_files.write_report(job.forge, report(0))
    path = job.files / "rank0"
    if what == "read-only":

        def refuse(*_, **__):
            raise OSError(30, "read-only")

        monkeypatch.setattr(preallocated_file, "write_atomically", refuse)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    monkeypatch.setattr(hang_files, "clear", full)
    for _ in range(3):
        job.expire()
    assert len(job.said) == 1
    assert job.said[0].startswith("hang detection failed; ")
    assert job.hangs.explain(Ending.of(-9)).reason is Reason.crashed


def test_a_disk_that_fills_up_meanwhile_does_not_keep_a_hang_from_its_end(job, monkeypatch):
    """The disk has no room for another file, but the query can be overwritten in place."""
    both = report(0), report(1)
    job.answer(*both)
    job.answer(both[0])
    for module in (preallocated_file, hangs):
        monkeypatch.setattr(module, "write_atomically", full)
    monkeypatch.setattr(hangs, "write_json", full)
    job.answer(both[1])
    assert job.phase is QueryPhase.end
    assert job.hangs.explain(Ending.of(-9)).reason is Reason.hung


def test_a_rank_that_shows_no_stacks_is_not_missing(job, monkeypatch):
    """The rank has reported before; its disk or node was too slow to write the stacks."""
    both = report(0), report(1, step=6)
    job.answer(*both)
    monkeypatch.setitem(hangs.PATIENCE_S, QueryPhase.stacks, 0.0)
    job.answer(both[0])
    assert job.phase is QueryPhase.end
    assert "fewest steps" in job.said[0]


TORCH = "/v/site-packages/torch/autograd/graph.py"
BEHIND = {
    "the fewest steps": ({1: {"step": 6}}, 1, "fewest steps"),
    "not in a collective": (
        {0: {"section": "collective"}, 2: {"section": "collective"}, 3: {"section": "collective"}},
        1,
        "wait in a collective",
    ),
    "elsewhere": ({1: {"line": "a:1 in f", "inside": "b:2 in g"}}, 1, "another line"),
    "all in torch": (
        {n: {"line": f"a:{n} in f", "inside": f"{TORCH}:{n} in b"} for n in range(4)},
        0,
        "nothing distinguishes it",
    ),
    "all the same": ({}, 0, "nothing distinguishes it"),
    "outside of torch": (
        {
            n: {"line": f"a:{n} in f", "inside": f"{'/x' if n == 2 else TORCH}:1 in b"}
            for n in range(4)
        },
        2,
        "outside torch",
    ),
    "nobody knows": (
        {n: {"line": f"a:{n} in f"} for n in range(4)},
        0,
        "nothing distinguishes it",
    ),
}


@pytest.mark.parametrize(("changes", "rank", "because"), BEHIND.values(), ids=BEHIND)
def test_the_rank_that_holds_up_the_others_is_named(changes, rank, because):
    """A rank that only waits must not be named."""
    reports = {n: report(n, **changes.get(n, {})) for n in range(4)}
    hang = find_culprit(QUERY, reports, set(range(4)))
    assert hang.culprit.rank == rank
    assert because in str(hang)
    other = find_culprit(replace(QUERY, rank=3), reports, set(range(4)))
    assert other.culprit.rank == (3 if "nothing distinguishes" in because else rank)
