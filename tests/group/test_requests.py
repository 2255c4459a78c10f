"""A proposal from any thread is part of the consensus."""

import itertools
import signal
import threading

import pytest

from forge.errors import Reason
from forge.group.group import Coordinator
from forge.group.requests import Consensus, FailureReport, FinishRequest, SaveRequest, StopRequest

FIRST = StopRequest(75, Reason.requested, "SIGUSR1")
FACTS = [
    FIRST,
    FinishRequest(0, 4, "converged"),
    SaveRequest(3),
    FailureReport(74, "the disk is gone"),
]


@pytest.mark.parametrize("facts", list(itertools.permutations(FACTS)), ids=str)
def test_requests_of_different_kinds_are_agreed_on_in_any_order(facts):
    """Two ranks can propose at the same time, so the consensus must not depend on the order."""
    agreed = Consensus()
    for fact in facts:
        agreed = agreed.including(fact)
    assert agreed == Consensus(FACTS[3], FACTS[1], FACTS[0], FACTS[2])


@pytest.mark.parametrize(
    "later", [StopRequest(143, Reason.cancelled), FinishRequest(0, 1, "other")]
)
def test_the_first_of_a_kind_counts(later):
    """A process exits with one code, for one reason."""
    agreed = Consensus(stop=FIRST, finish=FACTS[1])
    assert agreed.including(later) == agreed


def test_the_save_for_the_latest_step_counts_and_a_call_outranks_the_clock():
    """If the disk is busy, forge can skip a periodic save, but not one that a user requested."""
    clock, call = SaveRequest(5, is_periodic=True), SaveRequest(5)
    for facts in itertools.permutations([SaveRequest(3), clock, call]):
        agreed = Consensus()
        for fact in facts:
            agreed = agreed.including(fact)
        assert agreed.save == call


@pytest.mark.parametrize("kind", [SaveRequest, lambda *a: FinishRequest(0, a[0], "", a[2])])
def test_what_is_asked_for_after_a_rollback_outranks_what_was_before(kind):
    """The later request is for an earlier step, and must not wait for the step of the other."""
    before, after = kind(9, False, 0), kind(4, False, 1)
    for facts in ((before, after), (after, before)):
        agreed = Consensus().including(facts[0]).including(facts[1])
        assert after in (agreed.save, agreed.finish)


def test_each_loop_has_an_end_of_its_own():
    """The end of the first stage must not be the end of the second."""
    first, second = FinishRequest(0, 4, "stage 1"), FinishRequest(1, 9, "stage 2")
    assert Consensus(finish=first).including(second).finish == second
    assert Consensus(finish=second).including(first).finish == second


def test_a_group_of_one_agrees_with_itself_at_once():
    """A single process has no other rank to wait for."""
    group = Coordinator()
    assert (group.rank, group.size, group.gather("k", b"v", 0.0)) == (0, 1, [b"v"])
    assert group.agreed(0) == Consensus()
    group.propose(FIRST)
    assert group.agreed(0).stop is group.agreed(1).stop is FIRST


def test_proposals_from_threads_and_from_a_signal_handler_all_arrive():
    """A signal handler can interrupt a proposal: no request is lost, and there is no deadlock."""
    group, count = Coordinator(), 200
    before = signal.signal(
        signal.SIGUSR2, lambda *_: group.propose(FinishRequest(0, 1, "from a handler"))
    )
    try:
        threads = [
            threading.Thread(target=group.propose, args=(SaveRequest(step),))
            for step in range(count)
        ]
        for thread in threads:
            thread.start()
            signal.raise_signal(signal.SIGUSR2)
            group.propose(FIRST)
        for thread in threads:
            thread.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    agreed = group.agreed(0)
    assert agreed.save == SaveRequest(count - 1)
    assert agreed.stop is FIRST
    assert agreed.finish == FinishRequest(0, 1, "from a handler")
