"""The decision whether a job starts again: each reason with each budget, and real jobs.

One module, since almost all cases call one function, `decide_restart`, on the same budgets.
"""

import itertools
import json
import signal
from dataclasses import asdict, replace

import pytest
from sweeps import App

from forge.config.loading import load
from forge.config.schema import Policy, RequeueConfig, RequeueRule
from forge.errors import ConfigError, ExitCode, Reason
from forge.job.ending import Ending
from forge.job.requeue import decide_restart
from forge.jobdir.job_state import Counts
from forge.jobdir.plan import ExecPlan, RequeueLimits
from forge.jobdir.rank_report import RankReport

KILLED = Ending.of(-signal.SIGKILL)
REQUESTED = Ending.of(ExitCode.REQUEUE)
LIMIT = REQUESTED.imposed(Reason.time_limit)
FORCED = Ending.of(ExitCode.FORCED)
HUNG = Ending(Reason.hung, 70, "rank 1 hangs", hung_at=7)
HELD = Ending.of(-signal.SIGKILL, is_held=True)


def text(value) -> str:
    """The name of a case."""
    return value.text if isinstance(value, Ending) else str(value)


def limits(**given) -> RequeueLimits:
    return RequeueLimits.of(RequeueConfig(), **given)


def rules(*pairs) -> list[RequeueRule]:
    return [RequeueRule(list(codes), max_restarts=most) for codes, most in pairs]


def command(code, *stops, is_held=False, is_done=False, **how) -> Ending:
    """The end of a command of `forge exec` that got these signals."""
    report = RankReport(code=code, stops=[*stops], is_held=is_held, is_done=is_done)
    return Ending.of_command(report, ExecPlan(**how), {"USR1": "requeue", "TERM": "stop"})


OOM = "; memory ran out, and the kernel killed 1 process in the task's cgroup"
HELD_TEXT = "stopping took longer than `shutdown.timeout_s`, and the task was killed"
ENDED_WITH = "(the command ended with"
UNDONE = command(0, done_file="done")

# what is known of the end, its reason, the text that is printed, the job's state if it ends so
ENDINGS = [
    # the user's main
    (Ending.of(0), Reason.finished, "finished", "finished"),
    (Ending.of(0, is_held=True), Reason.finished, "finished", "finished"),
    (REQUESTED, Reason.requested, "a requeue was requested", "failed"),
    (Ending.of(75, Reason.time_limit), Reason.time_limit, "time limit", "failed"),
    (
        *(Ending.of(75, Reason.requested, "stopped by SIGUSR1"), Reason.requested),
        *("a requeue was requested", "failed"),
    ),
    (Ending.of(65), Reason.halted, "halted by the policy", "failed"),
    (Ending.of(69), Reason.unhealthy, "this node is unhealthy", "failed"),
    (Ending.of(69, Reason.unhealthy, "ecc on n1"), Reason.unhealthy, "ecc on n1", "failed"),
    (Ending.of(69, Reason.halted, "ecc on n1"), Reason.halted, "ecc on n1", "failed"),
    (FORCED, Reason.forced, "forced exit", "failed"),
    (
        Ending.of(70, Reason.rank_lost, "rank 1"),
        Reason.rank_lost,
        "another rank was lost",
        "failed",
    ),
    (Ending.of(70, Reason.halted, "a text"), Reason.forced, "forced exit", "failed"),
    (HUNG, Reason.hung, "rank 1 hangs", "failed"),
    (HELD, Reason.forced, HELD_TEXT, "failed"),
    (Ending.of(71), Reason.disk_full, "the disk is full", "failed"),
    (Ending.of(73), Reason.in_use, "another run uses its directory", "failed"),
    (Ending.of(74), Reason.io_error, "checkpoints cannot be written or read", "failed"),
    (Ending.of(78), Reason.bad_config, "bad configuration", "failed"),
    (Ending.of(130), Reason.interrupted, "SIGINT (Ctrl+C)", "stopped"),
    (Ending.of(143), Reason.cancelled, "stopped", "stopped"),
    (Ending.of(129), Reason.cancelled, "stopped", "stopped"),
    (KILLED, Reason.crashed, "killed by SIGKILL", "failed"),
    (
        *(Ending.of(-9, oom_kills=2), Reason.out_of_memory),
        "killed by SIGKILL; memory ran out, and the kernel killed 2 processes in the task's cgroup",
        "failed",
    ),
    (Ending.of(-signal.SIGSEGV), Reason.crashed, "killed by SIGSEGV", "failed"),
    (Ending.of(-99), Reason.crashed, "killed by signal 99", "failed"),
    (Ending.of(1), Reason.failed, "exit code 1", "failed"),
    (Ending.of(255, oom_kills=1), Reason.failed, f"exit code 255{OOM}", "failed"),
    (Ending.of(1, Reason.failed, "KeyError: 3"), Reason.failed, "KeyError: 3", "failed"),
    # the same, ended by the wrapper, Slurm or a person
    (Ending.of(0).imposed(Reason.interrupted), Reason.finished, "finished", "finished"),
    (LIMIT, Reason.time_limit, "time limit", "failed"),
    (KILLED.imposed(Reason.time_limit), Reason.time_limit, "time limit", "failed"),
    (HELD.imposed(Reason.time_limit), Reason.time_limit, HELD_TEXT, "failed"),
    (KILLED.imposed(Reason.preempted, "by Slurm"), Reason.preempted, "by Slurm", "failed"),
    (REQUESTED.imposed(Reason.interrupted), Reason.interrupted, "SIGINT (Ctrl+C)", "stopped"),
    (Ending.of(-15).imposed(Reason.cancelled), Reason.cancelled, "stopped", "stopped"),
    (Ending.of(143).imposed(Reason.orphaned), Reason.orphaned, "its launcher exited", "stopped"),
    (HUNG.imposed(Reason.cancelled), Reason.cancelled, "stopped", "stopped"),
    # a command, of whose exit codes only two have a meaning
    (command(0), Reason.finished, "finished", "finished"),
    (command(75), Reason.requested, "a requeue was requested", "failed"),
    *(
        (command(code), Reason.failed, f"exit code {code}", "failed")
        for code in (1, 65, 69, 70, 71, 73, 74, 78, 129, 130, 143)
    ),
    (command(-9), Reason.crashed, "killed by SIGKILL", "failed"),
    (
        *(command(0, "TERM"), Reason.signalled),
        *(f"SIGTERM sent by hand {ENDED_WITH} exit code 0)", "terminated"),
    ),
    (command(0, "TERM", is_zero_finished=True), Reason.finished, "finished", "finished"),
    (
        *(command(-15, "USR1", "TERM"), Reason.requested),
        *(f"a requeue was requested {ENDED_WITH} SIGTERM)", "terminated"),
    ),
    (
        *(command(3, "TERM").imposed(Reason.time_limit), Reason.time_limit),
        *(f"time limit {ENDED_WITH} exit code 3)", "terminated"),
    ),
    (
        *(command(-9, "TERM", is_held=True).imposed(Reason.time_limit), Reason.time_limit),
        *(HELD_TEXT, "terminated"),
    ),
    # a command that writes a file when it is done
    (
        *(UNDONE, Reason.requested),
        *("exit code 0 without `resilience.exec.done_file=done`", "failed"),
    ),
    (command(0, is_done=True, done_file="done"), Reason.finished, "finished", "finished"),
    (
        command(0, "TERM", is_done=True, done_file="done").imposed(Reason.time_limit),
        *(Reason.finished, "finished", "finished"),
    ),
    (
        *(command(0, "TERM", done_file="done", is_zero_finished=True), Reason.signalled),
        *(f"SIGTERM sent by hand {ENDED_WITH} exit code 0)", "terminated"),
    ),
    (command(1, is_done=True, done_file="done"), Reason.failed, "exit code 1", "failed"),
    (command(1).imposed(Reason.crashed, "no srun"), Reason.crashed, "no srun", "failed"),
    (command(0).imposed(Reason.crashed, "no srun"), Reason.finished, "finished", "finished"),
]


@pytest.mark.parametrize(("ending", "reason", "text", "state"), ENDINGS)
def test_an_attempt_has_one_reason_and_a_text(ending, reason, text, state):
    """A wrong reason would send the user to look for the wrong fault."""
    assert (ending.reason, ending.text, ending.state.name) == (reason, text, state)
    assert ending.ended_as == ("checkpointed" if ending in (command(75), UNDONE) else state)
    assert (ending.exit_code == 0) == (state == "finished")


@pytest.mark.parametrize("code", [0, 1, 65, 69, 70, 71, 73, 74, 75, 78, 129, 130, 143, -9])
def test_no_text_changes_what_becomes_of_a_job(code):
    """Messages can be reworded freely, since no decision depends on their text."""
    for asked, said in itertools.product([None, *Reason], repeat=2):
        found = []
        for text in ("", "time limit", "halted by the NaN policy", "stopped by SIGTERM"):
            counts, ending = Counts(), Ending.of(code, said, text)
            ending = ending if asked is None else ending.imposed(asked)
            decision = decide_restart(ending, counts, limits(), 4)
            found.append((ending.reason, decision.starts_again, decision.pause_s, counts))
        assert all(one == found[0] for one in found)


def test_a_full_disk_is_worth_a_pause_that_grows_within_max_failures():
    """There can be room again later, and no earlier save is lost; damage would not go away."""
    counts, given = Counts(), limits(max_failures=6, max_no_progress=1)
    found = [decide_restart(Ending.of(71), counts, given, 4) for _ in range(7)]
    assert [one.starts_again for one in found] == [True] * 6 + [False]
    assert [one.pause_s for one in found] == [30, 60, 120, 240, 480, 900, 0]
    assert found[-1].because == "the disk is full; given up: `resilience.requeue.max_failures=6`"
    assert not decide_restart(Ending.of(74), Counts(), given, 4).starts_again


COUNTER = {
    Reason.requested: "preemptions",
    Reason.preempted: "preemptions",
    Reason.signalled: "preemptions",
    Reason.time_limit: "timeouts",
    Reason.forced: "failures",
    Reason.crashed: "failures",
    Reason.out_of_memory: "failures",
    Reason.rank_lost: "failures",
    Reason.disk_full: "failures",
    Reason.hung: "hangs",
}
AGAIN = set(COUNTER)


@pytest.mark.parametrize("ending", [row[0] for row in ENDINGS], ids=text)
def test_by_default_what_came_from_outside_starts_again(ending):
    """To retry a bug wastes a night of compute; not to retry after a preemption loses it."""
    counts = Counts()
    decision = decide_restart(ending, counts, limits(), saved_step=5)
    assert decision.starts_again == (ending.reason in AGAIN)
    assert decision.because == ending.text
    used = {"restarts": 0, "preemptions": 0, "timeouts": 0, "failures": 0}
    if ending.reason in AGAIN:
        used |= {"restarts": 1, COUNTER[ending.reason]: 1}
    if ending.reason is Reason.hung:
        used["last_hang"] = [7, 5]
    used["out_of_memory"] = int(ending.reason is Reason.out_of_memory)
    assert counts == Counts(**used, best_step=5)


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize(
    ("ending", "key"),
    [
        (REQUESTED, "max_preemptions"),
        (LIMIT, "max_timeouts"),
        (KILLED, "max_failures"),
        (FORCED, "max_failures"),
        (HELD, "max_failures"),
    ],
    ids=text,
)
def test_a_budget_ends_it_and_is_named(ending, key, most):
    """The message names the key to raise; a used-up budget leaves the other budgets as they are."""
    counts = Counts()
    for step in range(most):
        assert decide_restart(ending, counts, limits(**{key: most}), step).starts_again
    decision = decide_restart(ending, counts, limits(**{key: most}), most)
    assert not decision.starts_again
    assert decision.because == f"{ending.text}; given up: `resilience.requeue.{key}={most}`"
    assert counts.restarts == most
    other = LIMIT if ending is REQUESTED else REQUESTED
    assert decide_restart(other, counts, limits(**{key: most}), most + 1).starts_again


def test_a_hang_has_a_budget_of_its_own():
    """Hangs of a flaky network must not use up the budget of crashes."""
    counts, given = Counts(), limits(max_hangs=2, max_failures=0)
    found = [decide_restart(replace(HUNG, hung_at=n), counts, given, n) for n in range(3)]
    assert [one.starts_again for one in found] == [True, True, False]
    assert found[-1].because == "rank 1 hangs; given up: `resilience.hang.max_restarts=2`"
    assert (counts.hangs, counts.restarts, counts.failures) == (2, 2, 0)


@pytest.mark.parametrize(
    ("step", "saved", "starts_again"), [(7, 5, False), (8, 5, True), (7, 6, True)]
)
def test_the_same_hang_ends_the_job_unless_it_has_saved_more(step, saved, starts_again):
    """The job would hang at that step every time; a preemption between the hangs does not count."""
    counts = Counts()
    assert decide_restart(HUNG, counts, limits(), 5).starts_again
    counts = Counts(**json.loads(json.dumps(asdict(counts))))  # as if read back from state.json
    assert decide_restart(PREEMPTED, counts, limits(), 5).starts_again
    again = decide_restart(replace(HUNG, hung_at=step), counts, limits(), saved)
    assert again.starts_again == starts_again
    if not starts_again:
        assert "hung at step 7 twice, and saved nothing new" in again.because


def test_a_hang_ends_the_job_where_the_policy_says_halt():
    decision = decide_restart(HUNG, Counts(), limits(is_hang_final=True), 5)
    assert decision.because == "rank 1 hangs; `resilience.hang.action=halt`"
    assert not decision.starts_again


def test_a_check_whose_action_is_halt_ends_the_job_where_there_are_other_nodes():
    """With action `refuse`, which has the same exit code, the job starts again on other nodes."""
    elsewhere = limits(has_other_nodes=True)
    assert decide_restart(Ending.of(69), Counts(), elsewhere, 1).starts_again
    halted = Ending.of(69, Reason.halted, "ecc on n1: 3 errors")
    decision = decide_restart(halted, Counts(), elsewhere, 1)
    assert (decision.starts_again, decision.because) == (False, "ecc on n1: 3 errors")


@pytest.mark.parametrize("ending", [REQUESTED, LIMIT, KILLED, FORCED], ids=text)
def test_without_a_limit_only_missing_progress_ends_it(ending):
    """A thousand preemptions are accepted, but only if steps are saved between them."""
    unlimited = limits(max_failures=None)
    counts = Counts()
    for step in range(1000):
        assert decide_restart(ending, counts, unlimited, step).starts_again
    assert counts.restarts == 1000
    again = [decide_restart(ending, counts, unlimited, 999) for _ in range(3)]
    assert [one.starts_again for one in again] == [True, True, False]
    assert "given up: 3 attempts in a row saved nothing new" in again[2].because
    assert "`resilience.requeue.max_no_progress=3`" in again[2].because


def test_progress_is_a_step_that_no_attempt_had_saved():
    """After a rollback or a damaged checkpoint, steps that were saved before do not count."""
    counts = Counts()
    steps = [-1, 10, 5, 10, 11, 11, 11]
    found = []
    for step in steps:
        decide_restart(KILLED, counts, limits(), step)
        found.append(counts.no_progress)
    assert found == [1, 0, 1, 2, 0, 1, 2]
    assert counts.best_step == 11


def test_the_first_attempt_counts_where_the_limit_is_one():
    """With `max_no_progress=1` the first attempt without a saved step ends the job."""
    assert not decide_restart(KILLED, Counts(), limits(max_no_progress=1), -1).starts_again
    assert decide_restart(KILLED, Counts(), limits(max_no_progress=1), 0).starts_again


def test_switched_off_nothing_starts_again_and_the_key_is_named():
    """With `requeue.enabled=false` the job runs exactly once."""
    off = limits(enabled=False, rules=rules(([1], 5)))
    for ending in (REQUESTED, LIMIT, KILLED, FORCED, HELD, Ending.of(1)):
        decision = decide_restart(ending, Counts(), off, 3)
        assert not decision.starts_again
        assert decision.because == f"{ending.text}; `resilience.requeue.enabled` is false"
    assert decide_restart(Ending.of(2), Counts(), off, 3).because == "exit code 2"


def test_a_rule_grants_its_restarts_and_no_more():
    """A flaky license server is worth three tries, a bug with another code none."""
    counts = Counts()
    given = limits(max_failures=0, rules=rules(([7, 8], 2), ([8, 9], 1), ([65], 1)))
    codes = [7, 8, 9, 65]
    for step, code in enumerate(codes):
        assert decide_restart(Ending.of(code), counts, given, step).starts_again, code
    for code, rule, most in ((7, 0, 2), (8, 0, 2), (9, 1, 1), (65, 2, 1)):
        decision = decide_restart(Ending.of(code), counts, given, 100 + code)
        assert not decision.starts_again
        key = f"resilience.requeue.rules[{rule}].max_restarts={most}"
        assert decision.because.endswith(f"; given up: `{key}`")
    assert not decide_restart(Ending.of(1), counts, given, 999).starts_again
    assert counts.by_rule == {"0": 2, "1": 1, "2": 1}
    assert counts.failures == 0
    assert asdict(counts) == asdict(Counts(**asdict(counts))), "as state.json brings it back"


def test_a_rule_for_changed_code_is_for_that_alone():
    """A rule that names only exit codes is for these codes, whatever the code is."""
    edited = Ending(Reason.code_changed, 1, "the code changed")
    of_both = RequeueRule([7], "code_changed")
    of_reason = RequeueRule([], "code_changed")
    for given, failed, expected in (
        (of_reason, edited, True),
        (of_reason, Ending.of(1), False),
        (of_reason, Ending.of(65), False),
        (of_both, edited, False),
        (of_both, replace(edited, code=7), True),
        (of_both, Ending.of(7), False),
        (RequeueRule([1]), edited, True),
    ):
        decision = decide_restart(failed, Counts(), limits(rules=[given]), 5)
        assert decision.starts_again == expected, (given, failed)


def test_a_rule_does_not_bring_back_what_a_person_stopped():
    """Ctrl+C ends a job even if a rule names its exit code."""
    given = limits(rules=rules(([1, 7], 5)))
    for asked in (Reason.interrupted, Reason.cancelled, Reason.orphaned):
        assert not decide_restart(Ending.of(7).imposed(asked), Counts(), given, 5).starts_again


def test_a_rule_needs_progress_as_well():
    """Otherwise a rule for exit code 1 would retry a bug at the first step a hundred times."""
    counts = Counts()
    given = limits(rules=rules(([1], 100)))
    decisions = [decide_restart(Ending.of(1), counts, given, -1) for _ in range(3)]
    assert [one.starts_again for one in decisions] == [True, True, False]


PREEMPTED = Ending.of(143).imposed(Reason.preempted)
LOST = KILLED.imposed(Reason.node_failed)


@pytest.mark.parametrize("ending", [PREEMPTED, LOST, LIMIT], ids=text)
def test_attempts_that_the_cluster_cut_short_have_a_limit_of_their_own(ending):
    """A job is not at fault if Slurm announces its time limit after 16 of 60 s, three times."""
    counts = Counts()
    decisions = [decide_restart(ending, counts, limits(), -1, is_cut_short=True) for _ in range(11)]
    assert [one.starts_again for one in decisions] == [True] * 10 + [False]
    assert "the cluster ended 11 attempts in a row before they could save" in decisions[10].because
    assert "the limit is 10" in decisions[10].because
    assert counts.no_progress == 0


def test_pauses_grow_while_the_cluster_ends_whatever_begins():
    """There is no pause after the first time, which can be chance; a save resets the pauses."""
    counts = Counts()
    pauses = [
        decide_restart(PREEMPTED, counts, limits(), -1, is_cut_short=True).pause_s for _ in range(9)
    ]
    assert pauses == [0, 30, 60, 120, 240, 480, 900, 900, 900]
    assert decide_restart(PREEMPTED, counts, limits(), 4, is_cut_short=True).pause_s == 0
    assert counts.early_evictions == 0


def test_pauses_grow_while_a_program_asks_at_once_to_be_run_again():
    """Without pauses a program that waits for a file would start 62 times a minute."""
    counts, given = Counts(), limits()

    def pause_s(took_s, **more):
        return decide_restart(REQUESTED, counts, given, -1, took_s=took_s, **more).pause_s

    assert [pause_s(0.5, has_run=False) for _ in range(12)] == [
        *(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900)
    ]
    assert pause_s(31, has_run=False) == 0
    assert [pause_s(0.5, has_run=False) for _ in range(3)] == [0, 1, 2]
    assert pause_s(0.5, has_run=True) == 0  # with a Run `max_no_progress` is the limit


@pytest.mark.parametrize("ending", [KILLED, FORCED, REQUESTED], ids=text)
def test_a_crash_is_the_job_s_own_however_early(ending):
    """A script that is killed as it starts must not be tried eleven times."""
    counts = Counts()
    decisions = [decide_restart(ending, counts, limits(), -1, is_cut_short=True) for _ in range(3)]
    assert [one.starts_again for one in decisions] == [True, True, False]


def test_a_function_without_a_run_has_no_progress_to_lack():
    """The function starts from the beginning each time, so only its other budgets apply."""
    counts = Counts()
    for _ in range(20):
        assert decide_restart(PREEMPTED, counts, limits(), -1, has_run=False).starts_again
    assert (
        "max_failures=1"
        in [
            decide_restart(KILLED, counts, limits(max_failures=1), -1, has_run=False).because
            for _ in range(2)
        ][1]
    )


# -- values of the policy ----------------------------------------------------------------------

LIST = "expected a list of {exit_codes: [1, …], max_restarts: 2}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_preemptions", -1, "has to be at least 0. 0 means no restart, null no limit"),
        ("max_timeouts", -1, "has to be at least 0"),
        ("max_failures", -2, "has to be at least 0"),
        ("max_failures", "many", "expected a whole number, found 'many'"),
        ("max_failures", 1.5, "expected a whole number, found a fraction"),
        ("max_failures", True, "expected a whole number, found a boolean"),
        ("max_no_progress", 0, "has to be at least 1. 1 stops after the first"),
        ("max_no_progress", None, "expected a whole number, found None"),
        ("enabled", "perhaps", "expected true or false, found 'perhaps'"),
        ("on_code_change", "ignore", "expected warn | refuse, found 'ignore'"),
        ("rules", 7, LIST),
        ("rules", [7], LIST),
        ("rules", [{"exit_code": [7]}], LIST),
        ("rules", [{"exit_codes": ["seven"]}], LIST),
        ("rules", {"exit_codes": [7]}, "`resilience.requeue.rules.exit_codes"),
        ("rules", [{"reason": "failed"}], "expected code_changed, found 'failed'"),
    ],
)
def test_a_bad_value_is_told_with_its_key_and_what_was_expected(key, value, expected):
    """A typo in a budget has to be an error at the start, and not a job that never restarts."""
    with pytest.raises(ConfigError) as caught:
        load({"requeue": {key: value}})
    (problem,) = caught.value.problems
    assert f"resilience.requeue.{key}" in problem
    assert expected in problem


def test_all_problems_of_rules_are_told_together():
    """If only the first problem were reported, each problem would cost another start."""
    with pytest.raises(ConfigError) as caught:
        load(
            {
                "requeue": {
                    "rules": [
                        {"exit_codes": [0, 75, 130, 143, 256, -9], "max_restarts": 0},
                        {"exit_codes": []},
                    ]
                }
            }
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 8
    key = "`resilience.requeue.rules[0].exit_codes`"
    assert f"{key}: 256 is not an exit code; they are 1 to 255." in text
    assert f"{key}: -9 is not an exit code" in text
    assert f"{key}: 0 already has a meaning (finished)" in text
    for code, why in ((75, "run again"), (130, "Ctrl+C"), (143, "stop")):
        (line,) = [
            one for one in caught.value.problems if f"{key}: {code} already has a meaning" in one
        ]
        assert why in line
    assert "`resilience.requeue.rules[0].max_restarts=0`: has to be at least 1." in text
    assert "`resilience.requeue.rules[1].exit_codes=[]`: names no exit code" in text
    assert "List the codes after which the job is restarted, for example [1]" in text


def test_good_rules_come_in_typed():
    """The rules come as plain dicts from the command line, and are converted to dataclasses."""
    policy = load({"requeue": {"rules": [{"exit_codes": [7, 8], "max_restarts": 2}]}})
    assert policy.requeue.rules == rules(([7, 8], 2))
    assert load({"requeue": {"max_failures": None, "rules": []}}).requeue.max_failures is None
    assert Policy().requeue.rules == []


# -- real jobs ---------------------------------------------------------------------------------

FLAKY = """
    import os, signal, sys
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        out = Path(HydraConfig.get().runtime.output_dir)
        count = len(list(out.glob("attempt*")))
        restarts = os.environ["FORGE_RESTART_COUNT"]
        (out / f"attempt{count}").write_text(restarts)
        if count < cfg.bad_starts:
            print("bad start", count, flush=True)
            if cfg.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(cfg.how)
        return count

    if __name__ == "__main__":
        main()
"""
CONF = "defaults: [{resilience: default}, _self_]\nbad_starts: 2\nhow: 7\n"


def test_rules_and_budgets_of_true_jobs(tmp_path):
    """The wrapper applies the rules and budgets of the command line, and prints them."""
    app = App(tmp_path / "app", FLAKY, CONF)
    rule = "resilience.requeue.rules=[{exit_codes:[7],max_restarts:2}]"
    budget = "resilience.requeue.max_failures=2"
    done = app.run(rule, budget, "how=7,kill", "bad_starts=2,3")
    assert done.returncode == 1
    expected = {
        # exit code 7 is in the rule: two restarts, then the job has finished or is given up
        0: ("finished", ["0", "1", "2"], "finished"),
        1: ("failed", ["0", "1", "2"], "given up: `resilience.requeue.rules[0].max_restarts=2`"),
        # a kill has its own budget
        2: ("finished", ["0", "1", "2"], "finished"),
        3: (
            "failed",
            ["0", "1", "2"],
            "killed by SIGKILL; given up: `resilience.requeue.max_failures=2`",
        ),
    }
    for number, (state, counts, because) in expected.items():
        job = app.job(number)
        found = [path.read_text() for path in sorted(job.directory.glob("attempt*"))]
        assert (job.state["state"], found) == (state, counts), number
        assert because in job.state["because"]
        if state == "failed":
            assert because in done.stdout
    assert app.job(0).state["counts"]["by_rule"] == {"0": 2}
    assert app.job(2).state["counts"]["failures"] == 2


def test_no_requeue_no_budget_and_no_policy(tmp_path):
    """A budget of 0 runs a job once, and the message names it; a new sweep resets the budgets."""
    app = App(tmp_path / "app", FLAKY, CONF)
    off = "resilience.requeue.enabled=false"
    points = "{enabled:false},{max_failures:0},{rules:[{exit_codes:[7],max_restarts:1}]}"
    done = app.run("how=kill", "bad_starts=1", f"+resilience.requeue={points}")
    expected = [f"`{off[:-6]}` is false", "given up: `resilience.requeue.max_failures=0`"]
    assert done.returncode == 1
    for number, because in enumerate(expected):
        assert app.job(number).state["state"] == "failed"
        assert app.job(number).state["because"] == f"killed by SIGKILL; {because}"
        assert because in done.stdout
    assert app.job(2).state["state"] == "finished"  # rules leave the other budgets alone
    again = app.run("how=kill", "bad_starts=1", f"+resilience.requeue={points}")
    assert again.returncode == 0, again.stdout
    assert [app.job(n).state["state"] for n in range(3)] == ["finished"] * 3

    plain = App(tmp_path / "plain", FLAKY, "bad_starts: 1\nhow: kill\n")
    done = plain.run("how=kill")
    assert done.returncode == 1
    assert plain.job(0).state["counts"]["restarts"] == 0
    assert "killed by SIGKILL" in plain.job(0).state["because"]
