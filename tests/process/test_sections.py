"""How long each section may take: learned from those of late, and never from the first ones."""

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
"""Short, so that the limits of the tests differ."""


class Watched:
    """Sections of which a page is read, by a clock of the test's."""

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
        """So many steps, which take so long; then one more has begun, with this limit."""
        for one in seconds:
            self.sections.begin_step()
            self.now += one
            self.done += 1
        self.sections.begin_step()
        return self.limit_s

    def visit(self, section: Phase, *seconds: float, kind: str = "") -> float:
        """Be in a section, and make progress after so many seconds each; what its limit was."""
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
    """The first ones count for nothing: kernels are chosen then, and buckets made anew."""
    one = watched()
    assert one.limit_s == CONFIG.start_s
    assert one.steps(*[400.0] * NUM_FIRST_STEPS) == CONFIG.start_s
    one.now += 8.0  # the step that has begun, the first that is learned from
    assert one.steps(4.0) == 5 * 8.0
    assert one.steps(*[2.5] * 200) == 5 * 2.5
    assert one.record.section is Phase.step


def test_the_limit_is_never_below_the_least(watched):
    """A step of a millisecond may take five, and five hundred."""
    assert watched().steps(*[0.001] * 20) == LEAST_S


def test_a_limit_that_is_given_is_not_learned(watched):
    """The first ones may take as long as the start, still."""
    one = watched(replace(CONFIG, timeout_s=60.0))
    assert one.limit_s == CONFIG.start_s
    assert one.steps(*[0.1] * NUM_FIRST_STEPS) == 60.0
    assert one.steps(*[50.0] * 20) == 60.0


def test_the_first_ones_may_take_no_less_than_the_others(watched):
    """A limit above that of the start counts for the start as well."""
    assert watched(replace(CONFIG, timeout_s=2000.0)).limit_s == 2000.0


def test_what_makes_progress_is_measured_between_two_marks(watched):
    """A save that writes for an hour, a piece a minute, is to be found by one slow piece."""
    one = watched()
    one.steps(*[1.0] * 9)
    assert one.visit(Phase.save, *[60.0] * 60) == CONFIG.start_s
    assert one.visit(Phase.save, *[60.0] * 60) == CONFIG.start_s  # nothing learned so far
    assert one.visit(Phase.save, *[70.0] * 60) == 5 * 60.0
    assert one.visit(Phase.save) == 5 * 70.0


def test_each_mark_of_progress_is_a_change(watched):
    """That is all that the supervisor sees of it."""
    one = watched()
    with one.sections.inside(Phase.save, "final"):
        before = one.record
        one.sections.advance(Phase.save)
        assert one.record == replace(before, count=before.count + 1)


def test_another_section_makes_no_progress(watched):
    """What a save in the background writes says nothing of the main thread's step."""
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
        assert one.record.count == before.count + 1  # that of a save which the main thread awaits


def test_another_thread_enters_no_section(watched):
    """A save in the background waits for other ranks; the main thread is in its step."""
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
    """Its time begins anew, and an error leaves as a return does."""
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
    """Else the save of an hour would let each step take five."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.visit(Phase.evaluation, 3600.0)
    one.now += 3.0
    assert one.steps(1.0) == 5 * 3.0


def test_what_a_step_took_before_it_was_left_for_another_section_is_learned(watched):
    """Steps wait for other ranks, or save, at their ends."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.now += 4.0
    one.visit(Phase.collective, 1.0)
    assert one.steps(1.0) == 5 * 4.0


def test_waits_of_the_start_teach_nothing_about_those_of_steps(watched):
    """Rank 0 may read for an hour."""
    one = watched()
    for _ in range(3):
        one.visit(Phase.collective, 3600.0)
    one.steps(*[1.0] * 9)
    for _ in range(2):
        one.visit(Phase.collective, 1.0)
    assert one.visit(Phase.collective) == LEAST_S


def test_a_loop_that_begins_inside_of_a_section_ends_it(watched):
    """What is left of the section then is no return to it."""
    one = watched()
    with one.sections.inside(Phase.evaluation):
        one.sections.begin_epoch()  # the data of an evaluation
        assert one.record.section is Phase.evaluation
        one.sections.begin_step()
    assert one.record.section is Phase.step


def test_each_kind_has_a_limit_of_its_own(watched):
    """A hundred quick evaluations between two slow ones: the slow one is no hang."""
    one = watched()
    for _ in range(4):
        slow = one.visit(Phase.evaluation, 900.0, kind="whole test set")
        quick = [one.visit(Phase.evaluation, 4.0, kind="a few batches") for _ in range(100)]
    assert slow == 5 * 900.0
    assert quick[-1] == 5 * 4.0


def test_waiting_for_others_is_told_apart_by_what_they_do_meanwhile(watched):
    """Rank 0 evaluates alone for an hour now and then; each step has its short wait, too."""
    one = watched()
    for _ in range(4):
        with one.sections.inside(Phase.evaluation, "held_out"):
            after = one.visit(Phase.collective, 3600.0)
        steps = [one.visit(Phase.collective, 4.0) for _ in range(200)]
    assert after == 5 * 3600.0
    assert steps[-1] == 5 * 4.0


def test_the_first_step_of_an_epoch_is_a_kind_of_its_own(watched):
    """It starts workers, once in a thousand steps."""
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
    """Ten long ones are no hang, and do not hide the next."""
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
        # What was compiled runs for the first time.
        assert (one.record.section, one.limit_s) == (Phase.step, CONFIG.start_s)
        one.now += 100.0
        assert one.steps(3.0) == learned == 5 * 3.0
    one.sections.close()
    assert heard["is_over"]


def test_the_compiler_may_be_loaded_later(watched):
    """The script imports it as it likes; each boundary asks for it, until it is there."""
    answers = [None, None, lambda: None]
    one = watched(CONFIG, lambda begins, ends: answers.pop(0))
    one.steps(*[1.0] * 9)
    assert answers == []


def test_after_a_loop_there_is_no_limit_until_the_next_one(watched):
    """What stands there may evaluate for hours, and has no way to say that it makes progress."""
    one = watched()
    one.steps(*[1.0] * 9)
    one.sections.rest()
    assert (one.record.section, one.record.step, one.limit_s) == (Phase.outside, 9, 0.0)
    assert one.steps(1.0) == LEAST_S  # what was learned before counts


def test_after_the_run_nothing_hangs(watched):
    """What the script does then is its own."""
    one = watched()
    one.steps(1.0)
    with one.sections.inside(Phase.save):
        one.sections.close()
        assert (one.record.section, one.limit_s) == (Phase.outside, 0.0)
    one.sections.begin_step()
    one.sections.rest()
    assert one.record.section is Phase.outside


def test_without_a_supervisor_no_clock_is_read():
    """A training that nobody watches pays for nothing."""

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


def test_those_of_the_run_that_is_open_are_the_current_ones(monkeypatch):
    """Lower layers mark by these, and know of no Run."""
    page, shown = HeartbeatPage.create(), []
    monkeypatch.setattr(sections.stacks, "register", shown.append)
    sections.begin(CONFIG, page.environ)
    assert shown == [page.environ]  # main may train in a process that it has spawned
    with sections.in_section(Phase.evaluation, "held_out"):
        sections.current().advance(Phase.evaluation)
        assert page.read().section is Phase.evaluation
    sections.end()
    assert page.read().section is Phase.outside
    with sections.in_section(Phase.save):
        assert page.read().section is Phase.outside
    page.close()
