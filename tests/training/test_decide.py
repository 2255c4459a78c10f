"""The decision at a boundary: all combinations, compared with a second implementation."""

import dataclasses
import itertools
import typing

import pytest

from forge.errors import Reason
from forge.group.requests import Consensus, FailureReport, FinishRequest, SaveRequest, StopRequest
from forge.training import decide as module
from forge.training.decide import (
    Decision,
    Finish,
    Go,
    Halt,
    LocalInputs,
    RollBack,
    Save,
    Stop,
    decide,
)

STOP = StopRequest(75, Reason.requested, "SIGUSR1")
FAILED = FailureReport(74, "the disk is gone")
STEPS, N = range(7), 6
FACTS = {
    "failed": [None, FAILED],
    "finish": [
        None,
        FinishRequest(1, 2, "converged"),
        FinishRequest(1, 5, "a"),
        FinishRequest(0, 1, "b"),
    ],
    "stop": [None, STOP],
    "save": [None, SaveRequest(3), SaveRequest(4, is_periodic=True)],
}
KNOWN = {
    "every_steps": [None, 2],
    "saved": [None, 0, 3, 4],
    "nan": [None, Halt("bad"), RollBack(3)],
}


def combinations(table: dict[str, list]) -> list[dict]:
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*table.values())]


def is_save_due(step: int, agreed: Consensus, known: LocalInputs) -> bool:
    if known.saved == step:
        return False
    saved = -1 if known.saved is None else known.saved
    first = 1 if known.saved is None else 0
    if known.every_steps is not None and step in range(0, 100, known.every_steps)[first:]:
        return True
    return agreed.save is not None and agreed.save.step in range(saved + 1, step + 1)


@pytest.mark.parametrize("facts", combinations(FACTS), ids=str)
def test_the_first_that_applies_is_decided(facts):
    """Halt, RollBack, Finish, Stop, Save, Go: ranks that decide differently would hang."""
    agreed = Consensus(**facts)
    for values, step in itertools.product(combinations(KNOWN), STEPS):
        known = LocalInputs(loop=1, n=N, **values)
        end = agreed.finish.step if agreed.finish and agreed.finish.loop == 1 else N
        has_finished = step in (N, *range(end, N))
        applies = [
            (agreed.failed is not None or isinstance(known.nan, Halt), Halt),
            (isinstance(known.nan, RollBack), RollBack),
            (has_finished, Finish),
            (agreed.stop is not None, Stop),
            (is_save_due(step, agreed, known), Save),
            (True, Go),
        ]
        expected = next(kind for does_apply, kind in applies if does_apply)
        found = decide(agreed, step, known)
        assert type(found) is expected, (agreed, step, known)
        if isinstance(found, Finish):  # the code after the loop can take long
            assert (found.save is not None) == is_save_due(step, agreed, known)
            assert found.stop is agreed.stop


def test_the_order_of_the_classes_is_the_order_of_precedence():
    """A reader of the module sees the rule in the order of its classes."""
    assert typing.get_args(Decision) == (Halt, RollBack, Finish, Stop, Save, Go)


def test_n_and_every_steps_need_no_proposal():
    """Every rank knows the step number: a proposal would cost a message at each step."""
    known = LocalInputs(loop=0, n=4, every_steps=2, saved=0, nan=None)
    found = [decide(Consensus(), step, known) for step in (1, 2, 4)]
    assert found == [Go(), Save(is_periodic=True), Finish(None, Save(is_periodic=True), None)]


def test_periodic_saves_fall_on_multiples_and_not_on_what_is_saved():
    """A resumed run must not save the loaded step again, and no run an untrained model."""

    def saved(steps, saved):
        known = LocalInputs(loop=0, n=99, every_steps=10, saved=saved, nan=None)
        return [
            step for step in steps if decide(Consensus(), step, known) == Save(is_periodic=True)
        ]

    assert saved(range(31), None) == [10, 20, 30]
    assert saved(range(20, 31), 20) == [30]


def test_a_decision_carries_what_was_agreed():
    """All ranks exit with the code of the signal that one of them received."""
    known = LocalInputs(loop=0, n=4, every_steps=None, saved=None, nan=None)
    assert decide(Consensus(stop=STOP), 1, known) == Stop(STOP)
    assert decide(Consensus(failed=FAILED, stop=STOP), 1, known) == Halt("the disk is gone", 74)
    asked = FinishRequest(0, 1, "converged")
    assert decide(Consensus(finish=asked, stop=STOP), 1, known) == Finish(asked, None, STOP)


def test_a_rollback_undoes_the_step_that_asked_for_the_end():
    """After the rollback the run repeats the step, with another loss."""
    known = LocalInputs(loop=0, n=9, every_steps=None, saved=None, nan=None, rollbacks=1)
    assert decide(Consensus(finish=FinishRequest(0, 3, "NaN")), 4, known) == Go()
    asked = FinishRequest(0, 3, "converged", rollbacks=1)
    assert decide(Consensus(finish=asked), 4, known) == Finish(asked, None, None)


def test_a_save_that_was_made_is_not_made_again_until_it_is_rolled_back():
    """Requests stay in the consensus: only the step shows which of them are done."""
    agreed = Consensus(save=SaveRequest(3))
    saved = LocalInputs(loop=0, n=9, every_steps=None, saved=3, nan=None)
    assert [decide(agreed, step, saved) for step in (3, 4)] == [Go(), Go()]
    back = saved._replace(saved=1)
    assert [decide(agreed, step, back) for step in (1, 2, 3)] == [Go(), Go(), Save(False)]


def test_the_types_of_decide_hold_no_local_fact():
    """With a clock, a signal handler or a disk among its inputs, the ranks would differ."""
    plain = {int, str, bool, type(None)}
    seen: set[type] = set()

    def check(kind):
        for one in typing.get_args(kind) or (kind,):
            if one in plain or one in seen:
                continue
            seen.add(one)
            is_frozen = dataclasses.is_dataclass(one) and one.__dataclass_params__.frozen
            is_value = is_frozen or issubclass(one, tuple)
            assert is_value or one is Reason, one
            if is_value:
                for inner in typing.get_type_hints(one).values():
                    check(inner)

    for kind in typing.get_type_hints(decide).values():
        check(kind)
    assert {Consensus, LocalInputs, StopRequest} <= seen
    assert not {"time", "signal", "os"} & vars(module).keys()
