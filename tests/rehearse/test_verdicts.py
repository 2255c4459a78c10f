"""The parts of a rehearsal: the plan, the injected signals, and the verdict on the runs."""

import functools
import os
import signal
import sys
import threading
from math import nan
from pathlib import Path

import pytest
import started

from forge.errors import RehearsalFailed
from forge.jobdir import job_dir, ledger
from forge.jobdir.job_files import REHEARSAL
from forge.jobdir.ledger_writer import Ledger
from forge.rehearse import rehearsal
from forge.rehearse.command import main
from forge.rehearse.comparing import differing_leaves, differing_values, may_differ
from forge.rehearse.plan import Strike, plan, signals_of
from forge.rehearse.rehearsal import Rehearsal, RehearsedRun
from forge.rehearse.verdicts import NO_VERDICT, RehearsalVerdict, Wanted
from forge.training.loop import fault_injection
from forge.training.loop.fault_injection import FaultInjector


def test_a_plan_is_a_stop_and_a_kill_and_the_same_for_the_same_seed():
    """So the printed command repeats the run; consecutive seeds give different plans."""
    plans = [plan(40, seed) for seed in range(50)]
    assert plans == [plan(40, seed) for seed in range(50)]
    assert plans[0] != plans[1]
    for planned in plans:
        assert sorted(one.name == "SIGKILL" for one in planned) == [False, True]
        assert 2 <= planned[0].count <= 41  # after at least one step
        assert planned[1].count >= 1
        comes_to = planned[0].count - 1
        comes_to += planned[0].name != "SIGKILL" and planned[0].fraction > 0  # the step ends
        at = comes_to + planned[1].count - 1
        assert at <= 40  # otherwise the boundary is never reached
        assert at < 40 or planned[1].fraction == 0  # the script could end first
        assert all(0 <= one.fraction < 1 for one in planned)
    assert {one.name for planned in plans for one in planned} == {"SIGKILL", "SIGTERM", "SIGUSR1"}
    assert [len(plan(steps, 0)) for steps in (0, 1, 2)] == [0, 1, 2]


@pytest.mark.parametrize("wanted", ["TERM,KILL", "KILL", "term,SIGHUP", "INT"])
def test_a_plan_draws_from_the_signals_that_are_wanted(wanted):
    """A user can test only kills, or only stops."""
    signals = signals_of(wanted)
    found = {one.name for seed in range(50) for one in plan(40, seed, signals)}
    assert found == set(signals)


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("--signals", "STOP", "expected one or more of TERM, USR1, INT, HUP, KILL, separated"),
        ("--tolerance", "1", "expected at least 0, and less than 1"),
    ],
)
def test_an_option_that_cannot_be_understood_is_refused(option, text, expected, capsys):
    """The error names the option and the expected values."""
    with pytest.raises(SystemExit):
        main([option, text, "--", "true"])
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "codes"), [("SIGKILL", {-9}), ("SIGTERM", {-15, 143, 75}), ("SIGUSR1", {-10, 75, 138})]
)
def test_only_a_code_of_its_own_tells_of_a_strike(name, codes):
    """A script that fails during its stop must not be started again as if it had stopped."""
    strike = Strike(name, 1, 0.0)
    assert {code for code in range(-64, 256) if strike.ends_with(code)} == codes
    assert not strike.ends_with(None)


@pytest.fixture
def hits(monkeypatch):
    """Collects the signals instead of sending them to this process."""
    found = []
    monkeypatch.setattr(fault_injection, "_boundaries", [])
    monkeypatch.setattr(fault_injection.os, "kill", lambda pid, number: found.append((pid, number)))
    return found


@pytest.fixture
def arrive(tmp_path):
    """Reaches a step boundary."""
    ledger = Ledger(tmp_path)
    yield functools.partial(FaultInjector(ledger).on_boundary, step=0)
    ledger.close()


def test_a_strike_comes_once_at_its_boundary(hits, arrive, monkeypatch):
    """The signal is not sent again in the same process or its children."""
    monkeypatch.setenv("FORGE_STRIKE", "SIGTERM 3 0.0")
    found = [arrive() or len(hits) for _ in range(6)]
    assert found == [0, 0, 1, 1, 1, 1]
    assert hits == [(os.getpid(), signal.SIGTERM)]
    assert "FORGE_STRIKE" not in os.environ


def test_a_strike_within_a_step_comes_later(hits, arrive, monkeypatch):
    """The delay is a fraction of the duration of the previous step."""
    monkeypatch.setenv("FORGE_STRIKE", "SIGKILL 2 0.5")
    monkeypatch.setattr(fault_injection.time, "monotonic", iter([0.0, 0.02]).__next__)
    arrive()
    arrive()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            assert thread.interval == 0.01
            thread.join()
    assert hits == [(os.getpid(), signal.SIGKILL)]


def test_a_strike_within_a_step_comes_before_the_next_boundary_does(hits, arrive, monkeypatch):
    """Regression test: with a late timer thread, the next signal's boundary was never reached."""
    monkeypatch.setenv("FORGE_STRIKE", "SIGTERM 2 0.9")
    monkeypatch.setattr(fault_injection.time, "monotonic", iter([0.0, 3600.0]).__next__)
    found = [arrive() or len(hits) for _ in range(4)]
    assert found == [0, 0, 1, 1]
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.function()  # the latest possible moment
            thread.cancel()
    assert len(hits) == 1


def test_without_a_signal_nothing_is_sent(hits, arrive, monkeypatch):
    """The last start of a rehearsed run has none."""
    monkeypatch.delenv("FORGE_STRIKE", raising=False)
    arrive()
    assert hits == []
    assert fault_injection._boundaries == []


@pytest.mark.parametrize("configured", ["checkpoints", "/scratch/mine/checkpoints"])
def test_a_rehearsed_job_lies_in_its_directory(configured, tmp_path, monkeypatch):
    """An absolute directory is that of the real job, which a rehearsal must not read or change."""
    monkeypatch.setenv(REHEARSAL, str(tmp_path))
    job, checkpoints = job_dir.current(configured)
    assert job == tmp_path
    assert checkpoints == tmp_path / configured.lstrip("/")


def test_a_stop_that_a_script_swallows_is_no_end(tmp_path):
    """`except SystemExit: pass` ends with 0, but only finished runs can be compared."""
    directory = tmp_path / "uninterrupted_1"
    one = Rehearsal([sys.executable, "-c", "pass"], tmp_path)

    def begin_only(run, strike):
        opened = Ledger(directory)
        opened.write("start", step=0)
        opened.close()
        return True

    one._attempt = begin_only
    with pytest.raises(RehearsalFailed, match=r"its forge\.Run did not finish"):
        one.run("uninterrupted 1", [])


def test_a_hit_is_shown_with_the_run_that_it_hit_and_where_that_resumed():
    """A script can have several Runs, whose attempts alternate in the ledger."""

    def attempt(number, place, start):
        events = [{"kind": "run", "checkpoints": place}, {"kind": "start", "step": start}]
        return ledger.AttemptLog(number, events)

    run = RehearsedRun("one", Path(), hits=[("SIGKILL", ledger.Progress(2, 7, 0.0, None))])
    assert run.trace() == "SIGKILL 7"  # no attempt has resumed yet
    run.history.attempts += [attempt(1, "c", 0), attempt(2, "c", 3), attempt(3, "c", 5)]
    assert run.trace() == "SIGKILL 7 → 5"
    run.history.attempts.insert(2, attempt(3, "d", 9))
    run.history.attempts[3].number = 4
    assert run.trace() == "SIGKILL 7 of c → 5"


def run_of(states, metrics):
    history = ledger.History([], {"checkpoints": metrics})
    return RehearsedRun("one", Path(), states={"checkpoints": states}, history=history)


def test_the_first_difference_is_the_first_by_step():
    """Bits are compared and not numbers: NaN equals NaN, and 0 differs from -0."""
    one = run_of({}, {2: {"loss": nan, "b": 0.0}, 10: {"loss": 1.0}, 11: {"loss": 2.0}})
    other = run_of({}, {2: {"loss": nan, "b": -0.0}, 10: {"loss": 1.5}})
    found = [(key[0], key[2], what) for key, what in differing_values(one, other)]
    assert found == [
        (2, "b", "float 0.0 → float -0.0"),
        (10, "loss", "float 1.0 → float 1.5"),
        (11, "loss", "float 2.0 → None"),
    ]
    assert list(differing_values(one, one)) == []


def test_paths_in_the_directory_of_a_run_are_the_same():
    """A trainer's checkpoint callback saves the names of its files, also as keys."""
    runs = []
    for folder in ("/first", "/second"):
        runs.append(run_of({"live": {"best": [f"{folder}/x"], f"{folder}/x": 1.0}}, {}))
        runs[-1].directory = Path(folder)
    assert list(differing_leaves(*runs)) == []
    runs[0].states["checkpoints"]["live"]["best"] = ["/first/y"]
    assert [path for path, _ in differing_leaves(*runs)] == ["live.best[0]"]


def test_leaves_are_compared_in_the_checkpoints_of_every_run():
    """A fold that one of the runs lacks is named."""
    one, other = run_of({"live": {"w": 1}}, {}), run_of({"live": {"w": 2}}, {})
    assert list(differing_leaves(one, other)) == [("live.w", "int 1 → int 2")]
    one.states["fold2"] = {"live": {}}
    assert list(differing_leaves(one, other)) == [
        ("live.w of checkpoints", "int 1 → int 2"),
        ("fold2", "only in one"),
    ]


class Ended:
    """A rehearsal whose runs are identical except for the seconds that they log."""

    command = ("python", "train.py")
    root = Path("nowhere")

    def __init__(self, *hits, **state):
        self.hits, self.state, self.num_runs = hits, {"live": {"w": 1}} | state, 0

    def run(self, name, planned, trace=None):
        self.num_runs += 1
        run = run_of(self.state, {0: {"loss": 1.0, "seconds": float(self.num_runs)}})
        events = [{"kind": "run", "checkpoints": "checkpoints"}, {"kind": "finish", "step": 4}]
        run.history.attempts.append(ledger.AttemptLog(1, events))
        run.hits = list(self.hits) if planned else []
        return run


def test_what_is_measured_of_the_machine_is_left_out_by_name(capsys):
    """Times differ even between uninterrupted runs; the loss does not, and is compared."""
    hit = ("SIGKILL", ledger.Progress(1, 2, 0.0, None))
    assert RehearsalVerdict(Ended(hit), Wanted(times=2)).rehearse() == 0
    said = capsys.readouterr().out
    assert "not compared, since they differ even without an interruption: seconds\n" in said
    assert "\nIDENTICAL: all interrupted runs ended with the same bits (2 signals sent, " in said


def test_runs_that_nothing_hit_are_not_called_identical(capsys):
    """If the policy ignores the signals, no resume was tested."""
    assert RehearsalVerdict(Ended(), Wanted(times=2)).rehearse() == NO_VERDICT
    assert "No run got a signal" in capsys.readouterr().out


def test_the_command_that_is_printed_has_the_options_that_matter():
    """Otherwise the command would repeat another run."""
    assert Wanted(times=9).options(4) == ["--times", "1", "--seed", "4"]
    wanted = Wanted(signals=["SIGHUP"], tolerance=0.01).options(4)
    assert wanted[4:] == ["--signals", "HUP", "--tolerance", "0.01"]


def test_a_process_that_is_left_is_found(monkeypatch):
    """The process is named by its command if it has not ended after some time."""
    monkeypatch.setattr(rehearsal, "_GRACE_S", 0.0)
    with started.Popen(["sleep", "600"]) as child:
        assert "sleep 600" in rehearsal._left()
        child.kill()
    assert "sleep 600" not in rehearsal._left()


def test_what_was_logged_last_is_no_leaf():
    """A logged time differs in every run."""
    one, other = run_of({"metrics": {"s": 1}}, {}), run_of({"metrics": {"s": 2}}, {})
    assert list(differing_leaves(one, other)) == []


def test_the_place_of_a_loader_is_compared_only_if_two_plain_runs_agree_on_it(tmp_path):
    """It contains random states, which a generator that is neither seeded nor used changes."""
    place = {"taken": 3, "position": {"start": {"rng": {"python": 1}}}, "is_over": False}
    states = {"loader": place, "net": {}, "data": {"taken": 3, "is_over": [], "loaders": [place]}}
    run = RehearsedRun("one", tmp_path, states={"": {"live": {"states": states}}})
    assert may_differ("rng.python", run)
    assert may_differ("live.states.loader.position.start.rng.python", run)
    assert may_differ("live.states.data.loaders[0].position.start.rng.python[1]", run)
    assert not may_differ("live.states.data.taken", run)
    assert not may_differ("live.states.net.weight", run)
    assert not may_differ("live.states.loader2.position", run)


def test_measured_values_of_an_object_can_differ(tmp_path):
    """A trainer's history has times; without them a resumed job would have another history."""
    run = RehearsedRun("one", tmp_path, states={"": {"live": {"states": {"trainer": {}}}}})
    assert may_differ("live.states.trainer.measured.times[0].eval_runtime", run)
    assert not may_differ("live.states.trainer.measure", run)
    assert not may_differ("live.states.trainer.state.measured", run)
