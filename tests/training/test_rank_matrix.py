"""What people train with, on several ranks: the same bits after a stop, and after a kill.

Several styles at a time where they do not get in each other's way.
"""

import pytest
from harness import assert_same_bits
from ranked import RankedJob
from rows import few

COMBINED = {
    "mixed precision": (2, ["scaler", "accumulated", "two", "average"]),
    "parts of a model": (2, ["unused", "frozen", "views"]),
    "own update": (3, ["guard", "accumulated", "frozen"]),
}
ALONE = {
    "scaler": (2, ["scaler"]),
    "two optimizers": (2, ["two"]),
    "accumulated": (3, ["accumulated"]),
    "accumulated views": (2, ["accumulated", "views"]),
    "unused": (3, ["unused"]),
    "unused, accumulated": (2, ["unused", "accumulated"]),
    "views": (3, ["views"]),
    "own update of views": (2, ["guard", "views"]),
    "recomputed": (3, ["recomputed"]),
    "average": (2, ["average"]),
    "compiled": (3, ["compiled"]),
    "compiled, recomputed": (2, ["compiled", "recomputed"]),
    "compiled inside": (3, ["compiled inside"]),
    "static": (2, ["static"]),
}
EVENTS = {
    "stopped": [[2, 1, "SIGUSR1"], [8, 0, "SIGUSR1"]],
    "killed": [[6, 1, "SIGKILL"], [13, 0, "SIGKILL"]],
}


def interrupted(directory, size, styles, how):
    """To its end; on a busy machine it may train on for some steps before a signal is agreed on."""
    events, is_stop = EVENTS[how], how == "stopped"
    job = RankedJob(directory, size, "styles.py", styles=styles, events=events, pause_s=0.02)
    found = []
    while not found or (any(found[-1]) and len(found) <= len(events)):
        found.append(job.run())
    assert found.pop() == [0] * size, job.output
    assert found, "it was not interrupted"
    for codes in found:
        expected = {75} if is_stop else {-9, 1, 70}
        assert {*codes} <= expected, job.output
        assert is_stop or codes.count(-9) == 1
    return job


def check(directory, size, styles, hows=tuple(EVENTS)):
    whole = RankedJob(directory / "whole", size, "styles.py", styles=styles)
    whole.run_to_end()
    assert len(whole.history.metrics) == 16
    assert_same_bits(*whole.weights[:2])
    for how in hows:
        interrupted(directory / how, size, styles, how).assert_same_run(whole)
    return whole


@pytest.mark.parametrize(
    ("name", "hows"),
    few(1, [("mixed precision", ["stopped"]), *((n, [*EVENTS]) for n in COMBINED)]),
)
def test_what_people_train_with_resumes_with_the_same_bits(name, hows, tmp_path):
    """Gradients between two updates, scales, averages, buckets: each rank's own, and all's."""
    whole = check(tmp_path, *COMBINED[name], hows)
    if "scaler" in COMBINED[name][1]:
        scales = [one["scale"] for one in whole.history.metrics.values()]
        assert min(scales) < scales[0]


@pytest.mark.proofs
@pytest.mark.parametrize("name", ALONE)
def test_each_by_itself_resumes_with_the_same_bits(name, tmp_path):
    """One might hide what another does."""
    check(tmp_path, *ALONE[name])


def test_a_static_graph_on_many_ranks_is_refused(tmp_path):
    """It sums its first two steps in another order, and cannot be given the one of before."""
    job = RankedJob(tmp_path, 3, "styles.py", styles=["static"])
    assert job.run() == [78] * 3, job.output
    assert "static_graph=True" in job.output
