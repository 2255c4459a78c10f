"""The time limit of each section, learned from recent sections, but not from the first ones."""

import math
import threading
from dataclasses import replace

import pytest

from forge.config.schema import HangConfig
from forge.process import sections
from forge.process.progress import HeartbeatPage, HeartbeatRecord, HeartbeatWriter, Phase
from forge.process.sections import NUM_FIRST_STEPS, Sections

CONFIG = HangConfig(start_s=1000.0)
LEAST_S = 10.0
"""Shorter than the default, so that learned limits can be told from the least limit."""


class Watched:
    """Sections with an injected clock, and the heartbeat page that they write."""

    def __init__(self, config: HangConfig = CONFIG, listen=None):
        self.page, self.now, self.done = HeartbeatPage.create(), 0.0, 0
        marks = HeartbeatWriter.open(self.page.environ)
        assert marks.is_open
        self.sections = Sections(config, marks, lambda: self.done, listen, clock=lambda: self.now)

    @property
    def record(self) -> HeartbeatRecord:
        return self.page.read()

    @property
    def limit_s(self) -> float:
        return self.record.limit_s

    def steps(self, *seconds: float) -> float:
        """Make steps of these durations, and begin another; return that step's limit."""
        for one in seconds:
            self.sections.begin_step()
            self.now += one
            self.done += 1
        self.sections.begin_step()
        return self.limit_s

    def visit(self, section: Phase, *seconds: float, kind: str = "") -> float:
        """Enter a section, and make progress after each duration; return the section's limit."""
        with self.sections.inside(section, kind):
            limit_s = self.limit_s
            for one in seconds:
                self.now += one
                self.sections.advance(section)
        return limit_s


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(sections, "MIN_S", LEAST_S)
    made = []

    def make(*given):
        made.append(Watched(*given))
        return made[-1]

    yield make
    for one in made:
        one.sections.close()
        one.page.close()


def test_the_limit_is_a_factor_above_the_slowest_step_of_late(watched):
    """The first steps are ignored: they benchmark kernels and rebuild DDP's buckets."""
    one = watched()
    assert one.limit_s == CONFIG.start_s
    assert one.steps(*[400.0] * NUM_FIRST_STEPS) == CONFIG.start_s
    one.now += 8.0  # the step that has begun is the first to be measured
    assert one.steps(4.0) == 5 * 8.0
    assert one.steps(*[2.5] * 200) == 5 * 2.5
    assert one.record.section is Phase.step


def test_the_limit_is_never_below_the_least(watched):
    """Without a least limit, a step of a millisecond that takes 6 ms would count as a hang."""
    assert watched().steps(*[0.001] * 20) == LEAST_S


def test_a_limit_that_is_given_is_not_learned(watched):
    """The first steps still have the limit of the start."""
    one = watched(replace(CONFIG, timeout_s=60.0))
    assert one.limit_s == CONFIG.start_s
    assert one.steps(*[0.1] * NUM_FIRST_STEPS) == 60.0
    assert one.steps(*[50.0] * 20) == 60.0


def test_the_first_ones_may_take_no_less_than_the_others(watched):
    """If `timeout_s` is longer than `start_s`, the first steps get `timeout_s`, too."""
    assert watched(replace(CONFIG, timeout_s=2000.0)).limit_s == 2000.0


def test_what_makes_progress_is_measured_between_two_marks(watched):
    """In a save of an hour that writes a chunk a minute, a single slow chunk is a hang."""
    one = watched()
    one.steps(*[1.0] * 9)
    assert one.visit(Phase.save, *[60.0] * 60) == CONFIG.start_s
    assert one.visit(Phase.save, *[60.0] * 60) == CONFIG.start_s  # nothing learned so far
    assert one.visit(Phase.save, *[70.0] * 60) == 5 * 60.0
    assert one.visit(Phase.save) == 5 * 70.0


def test_each_mark_of_progress_is_a_change(watched):
    """The supervisor sees progress only as a change of the record."""
    one = watched()
    with one.sections.inside(Phase.save, "final"):
        before = one.record
        one.sections.advance(Phase.save)
        assert one.record == replace(before, count=before.count + 1)


def test_another_section_makes_no_progress(watched):
    """The progress of a save in the background is not progress of the main thread's step."""
    one = watched()
    one.steps(1.0)
    before = one.record
    writer = threading.Thread(target=one.sections.advance, args=(Phase.save,))
    writer.start()
    writer.join()
    assert one.record == before
    with one.sections.inside(Phase.save):
        before = one.record
        writer = threading.Thread(target=one.sections.advance, args=(Phase.save,))
        writer.start()
        writer.join()
        assert one.record.count == before.count + 1  # the main thread waits for this save


def test_another_thread_enters_no_section(watched):
    """If a background save waits for other ranks, the main thread is still in its step."""
    one = watched()
    one.steps(1.0)
    before = one.record

    def wait():
        with one.sections.inside(Phase.collective):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert one.record == before


def test_leaving_a_section_is_progress_of_the_one_around_it(watched):
    """The outer section's time starts again, also if the inner section raises."""
    one = watched()
    one.steps(*[1.0] * 9)
    around = one.record

    def failing():
        with one.sections.inside(Phase.save):
            with one.sections.inside(Phase.collective):
                assert one.record.section is Phase.collective
            assert one.record.section is Phase.save
            raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        failing()
    assert (one.record.section, one.record.step) == (Phase.step, around.step)
    assert one.record.limit_s == around.limit_s
    assert one.record.count > around.count


def test_a_step_is_not_charged_for_what_has_a_limit_of_its_own(watched):
    """Otherwise a save of an hour would raise the limit of each step to five hours."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.visit(Phase.evaluation, 3600.0)
    one.now += 3.0
    assert one.steps(1.0) == 5 * 3.0


def test_what_a_step_took_before_it_was_left_for_another_section_is_learned(watched):
    """At its end a step can wait for other ranks, or save."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.now += 4.0
    one.visit(Phase.collective, 1.0)
    assert one.steps(1.0) == 5 * 4.0


def test_waits_of_the_start_teach_nothing_about_those_of_steps(watched):
    """At the start the other ranks can wait an hour while rank 0 reads a checkpoint."""
    one = watched()
    for _ in range(3):
        one.visit(Phase.collective, 3600.0)
    one.steps(*[1.0] * 9)
    for _ in range(2):
        one.visit(Phase.collective, 1.0)
    assert one.visit(Phase.collective) == LEAST_S


def test_a_loop_that_begins_inside_of_a_section_ends_it(watched):
    """Leaving the section later does not return to it."""
    one = watched()
    with one.sections.inside(Phase.evaluation):
        one.sections.begin_epoch()  # the data of an evaluation
        assert one.record.section is Phase.evaluation
        one.sections.begin_step()
    assert one.record.section is Phase.step


def test_each_kind_has_a_limit_of_its_own(watched):
    """After a hundred quick evaluations of another kind, a slow evaluation is not a hang."""
    one = watched()
    for _ in range(4):
        slow = one.visit(Phase.evaluation, 900.0, kind="whole test set")
        quick = [one.visit(Phase.evaluation, 4.0, kind="a few batches") for _ in range(100)]
    assert slow == 5 * 900.0
    assert quick[-1] == 5 * 4.0


def test_waiting_for_others_is_told_apart_by_what_they_do_meanwhile(watched):
    """Waits for an evaluation on rank 0 and the short waits of steps have separate limits."""
    one = watched()
    for _ in range(4):
        with one.sections.inside(Phase.evaluation, "held_out"):
            after = one.visit(Phase.collective, 3600.0)
        steps = [one.visit(Phase.collective, 4.0) for _ in range(200)]
    assert after == 5 * 3600.0
    assert steps[-1] == 5 * 4.0


def test_the_first_step_of_an_epoch_is_a_kind_of_its_own(watched):
    """The first step of an epoch includes the start of the loader's workers."""
    one = watched()
    one.steps(*[1.0] * 9)
    limits = []
    for _ in range(4):
        one.sections.begin_epoch()
        limits.append(one.limit_s)
        one.now += 500.0
        limit_s = one.steps(*[1.0] * 200)
        assert limit_s == LEAST_S
    assert limits == [CONFIG.start_s, CONFIG.start_s, 5 * 500.0, 5 * 500.0]


def test_a_compilation_has_the_limit_of_a_start_and_nothing_is_learned_from_its_step(watched):
    """Long compilations are not hangs, and do not raise the limit of later steps."""
    heard = {}

    def listen(begins, ends):
        heard.update(begins=begins, ends=ends, is_over=False)
        return lambda: heard.update(is_over=True)

    one = watched(CONFIG, listen)
    learned = one.steps(*[3.0] * 20)
    for _ in range(10):
        heard["begins"]()
        assert (one.record.section, one.limit_s) == (Phase.compilation, CONFIG.start_s)
        assert one.record.step == one.done
        one.now += 900.0
        heard["ends"]()
        # The compiled code runs for the first time.
        assert (one.record.section, one.limit_s) == (Phase.step, CONFIG.start_s)
        one.now += 100.0
        assert one.steps(3.0) == learned == 5 * 3.0
    one.sections.close()
    assert heard["is_over"]


def test_the_compiler_may_be_loaded_later(watched):
    """Scripts can import the compiler late, so each boundary checks whether it is loaded."""
    answers = [None, None, lambda: None]
    one = watched(CONFIG, lambda begins, ends: answers.pop(0))
    one.steps(*[1.0] * 9)
    assert answers == []


def test_after_a_loop_there_is_no_limit_until_the_next_one(watched):
    """Code after a loop can evaluate for hours, and cannot report progress."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.sections.rest()
    assert (one.record.section, one.record.step, one.limit_s) == (Phase.outside, 9, 0.0)
    assert one.steps(1.0) == LEAST_S  # limits learned before the end of the loop are kept


def test_after_the_run_nothing_hangs(watched):
    """After the Run, the script can take any time."""
    one = watched()
    one.steps(1.0)
    with one.sections.inside(Phase.save):
        one.sections.close()
        assert (one.record.section, one.limit_s) == (Phase.outside, 0.0)
    one.sections.begin_step()
    one.sections.rest()
    assert one.record.section is Phase.outside


def test_without_a_supervisor_no_clock_is_read():
    """A training without a supervisor has no overhead."""

    def clock():
        reads.append(None)
        return math.nan

    reads: list[None] = []
    one = Sections(CONFIG, HeartbeatWriter(), clock=clock)
    reads.clear()
    one.begin_step()
    one.begin_epoch()
    with one.inside(Phase.save):
        one.advance(Phase.save)
    one.rest()
    one.close()
    assert reads == []


def test_those_of_the_run_that_is_open_are_the_current_ones():
    """Lower layers use the current sections, since they have no access to the Run."""
    page = HeartbeatPage.create()
    sections.begin(CONFIG, page.environ)
    with sections.in_section(Phase.evaluation, "held_out"):
        sections.current().advance(Phase.evaluation)
        assert page.read().section is Phase.evaluation
    sections.end()
    assert page.read().section is Phase.outside
    with sections.in_section(Phase.save):
        assert page.read().section is Phase.outside
    page.close()
