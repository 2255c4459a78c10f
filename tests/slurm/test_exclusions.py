"""Which nodes a job stays off, on a controller that gives the answers it is given.

What a true cluster makes of it: `test_sick_nodes.py`. One module, since all of it is one rule.
"""

import json
import time
from dataclasses import replace

import pytest
from controllers import RUNS, exited, report, state_left
from plans import planned

from forge.errors import NoAnswer, NotRequeueable, Reason
from forge.job.requeue import Counts, Outcome
from forge.jobdir import sick
from forge.jobdir.job_files import STATE, forge_dir, read_json
from forge.jobdir.sick import Sick
from forge.slurm import client
from forge.slurm.client import JobInfo
from forge.slurm.exclusions import Exclusion, Exclusions, choose
from forge.slurm.wrapper import SlurmJob

NODES = ("n1", "n2", "n3")


def exclusion(node, found=1.0, job="/0", **changes):
    return replace(Exclusion(node, "ecc", "3 errors", job, found, time.time() + 3600), **changes)


@pytest.fixture
def folders(tmp_path):
    """(of a job, of its sibling, of their sweep)."""
    plan = planned(ranks=1)
    requeue = replace(plan.requeue, has_other_nodes=True, max_excluded_nodes=3)
    for name in ("0", "1"):
        replace(plan, requeue=requeue).write(make(forge_dir(tmp_path / name)).parent)
    return tmp_path / "0", tmp_path / "1", tmp_path


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def file_of(sweep, node):
    return make(forge_dir(sweep) / "excluded") / f"{node}.json"


@pytest.fixture
def jobs(wrapper, folders, monkeypatch, silence):
    """Wrappers of the two jobs on one controller, which says that they run on n1."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    controller = wrapper().controller
    controller.nodes = dict.fromkeys(NODES, True)

    def start(number, *answers, **changes):
        job = SlurmJob(folders[number], forge_dir(folders[2]) / "slurm" / "1.sh")
        job._reader, _ = silence
        job.controller = controller
        controller.answers[:] = answers
        vars(job).update(changes)
        return job

    return start


def fails(job, node, action, check="ecc"):
    """Its attempt has ended with 69, on this node; how that is decided and what is done."""
    report(job, 0, 69, node=node)
    sick.write(job.directory, Sick(node, check, "3 errors", action))
    job.controller.answers[:] = [RUNS, RUNS]
    outcome = job._outcome(exited(69))
    decision = job._decide(outcome)
    return decision, job._move_on(outcome, 0.0) if decision.starts_again else None


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "fixed", "required", "needed", "kept", "left_out"),
    [
        ("n1 n2 n3", "", "", 1, "n1 n2", ""),
        ("n1 n2 n3", "", "", 2, "n1", "n2"),
        ("n1 n2 n3", "n3", "", 1, "n1", "n2"),
        ("n1 n2 n3", "n1 n3", "", 1, "", "n2"),
        ("n1 n2", "", "", 2, "", "n1 n2"),
        ("n1 n2", "", "", 1, "n1", "n2"),
        ("n1 n2 n3", "", "n1", 1, "n2", "n1"),
        ("n2 n3", "", "", 1, "n2", ""),
        ("-n1 n2 n3", "", "", 2, "n1", "n2"),
        ("-n1 -n2", "", "", 1, "n1 n2", ""),
        (None, "", "", 1, "n1 n2", ""),
        (None, "", "n2", 1, "n1", "n2"),
    ],
)
def test_never_so_many_that_fewer_nodes_are_left_than_the_job_needs(
    nodes, fixed, required, needed, kept, left_out
):
    """The first of them stay. -n1: a node that takes no jobs, so that it is none to lose."""
    known = nodes and {name.lstrip("-"): not name.startswith("-") for name in nodes.split()}
    standing = [exclusion("n1"), exclusion("n2")]
    found = choose(standing, known, fixed.split(), required.split(), needed)
    assert [[one.node for one in part] for part in found] == [kept.split(), left_out.split()]


def test_what_a_job_has_found_itself_comes_first_then_the_newest(folders):
    """Its own check would fail again; of the others the newest is the likeliest to hold."""
    own, sibling, sweep = folders
    for node, found, job in (("n1", 1, own), ("n2", 2, sibling), ("n3", 3, sibling)):
        Exclusions(job, sweep, 1.0).note([Sick(node, "ecc", "", "exclude_node")])
        path = file_of(sweep, node)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"found": found}))
    assert [one.node for one in Exclusions(own, sweep, 1.0).standing()] == ["n1", "n3", "n2"]
    assert [one.node for one in Exclusions(sibling, sweep, 1.0).standing()] == ["n3", "n2", "n1"]


# -- what jobs of a sweep tell each other ----------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "avoided"), [("exclude_node", ["n1"]), ("refuse", []), ("halt", [])]
)
def test_a_sibling_stays_off_a_node_that_is_to_be_excluded(action, avoided, jobs):
    """And of no other that failed a check: that is for the job alone to avoid."""
    decision, _ = fails(jobs(0), "n1", action)
    assert decision.starts_again == (action != "halt")
    assert [one.node for one in jobs(1)._exclusions.standing()] == avoided
    own = [one.node for one in jobs(0)._exclusions.standing()]
    assert own == ([] if action == "halt" else ["n1"])


def test_siblings_are_told_by_a_job_that_does_not_start_again_itself(jobs):
    """Its budget is used up; the node is sick all the same."""
    job = jobs(0, counts=Counts(excluded=3))
    decision, _ = fails(job, "n1", "exclude_node")
    assert "max_excluded_nodes=3" in decision.because
    assert [one.node for one in jobs(1)._exclusions.standing()] == ["n1"]


def test_a_requeue_for_any_reason_takes_in_what_siblings_have_found(jobs):
    """Beside what its user has excluded."""
    assert fails(jobs(0), "n1", "exclude_node")[1] == 75
    info = replace(RUNS, excluded="n3")
    job = jobs(1, info)
    assert job._move_on(Outcome(75, Reason.preempted), 0.0) == 75
    assert job.controller.did[-1] == ("exclude", ["n3", "n1"])
    assert read_json(job.forge / STATE)["excluded"] == ["n1"]


def test_what_is_over_is_taken_out_again_and_what_the_user_has_excluded_stays(jobs):
    """Else a job would run out of nodes within a month."""
    job = jobs(0)
    job._exclusions._hours = 1e-9
    assert fails(job, "n1", "exclude_node")[1] == 75
    assert job.controller.did == [("requeue", "7")]
    info = replace(RUNS, excluded="n1,n3")
    job = jobs(0, info)
    state_left(job, "starting", restarts=-1, excluded=["n1"])
    assert job._take_over() is None
    job._move_on(Outcome(75, Reason.preempted), 0.0)
    assert job.controller.did[-1] == ("exclude", ["n3"])
    assert read_json(job.forge / STATE)["excluded"] == []


def test_two_jobs_that_write_at_once_lose_nothing(folders):
    """A file for each node: nobody reads, changes and writes what is another one's."""
    own, sibling, sweep = folders
    one, other = (Exclusions(job, sweep, 1.0) for job in (own, sibling))
    one.standing(), other.standing()
    one.note([Sick("n1", "ecc", "", "exclude_node")])
    other.note([Sick("n2", "ecc", "", "exclude_node")])
    assert {found.node for found in Exclusions(own, sweep, 1.0).standing()} == {"n1", "n2"}


def test_a_full_disk_ends_no_job_and_it_leaves_the_node_all_the_same(jobs, capfd):
    """Only the others do not learn of it."""
    job = jobs(0)
    (forge_dir(job.directory.parent) / "excluded").write_text("in the way")
    assert fails(job, "n1", "exclude_node")[1] == 75
    assert job.controller.did[-1] == ("exclude", ["n1"])
    assert "do not learn that n1" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "n1"}', "odd node", "odd time"])
def test_a_file_that_makes_no_sense_excludes_nothing(text, folders):
    """Of another version, or torn."""
    own, _, sweep = folders
    found = exclusion("n1")
    odd = {"odd node": {"node": "--help"}, "odd time": {"until": "never"}}.get(text)
    path = file_of(sweep, "n1")
    path.write_text(text if odd is None else json.dumps(vars(found) | odd))
    assert Exclusions(own, sweep, 1.0).standing() == []
    path.write_text(json.dumps(vars(found)))
    assert Exclusions(own, sweep, 1.0).standing() == [found]


def test_a_file_of_somebody_else_s_ends_no_job(folders):
    """Whoever could write it could keep jobs off nodes, and no more: it is said, and not read."""
    own, _, sweep = folders
    said = []
    Exclusions(own, sweep, 1.0).note([Sick("n1", "ecc", "", "exclude_node")])
    file_of(sweep, "n1").chmod(0o666)
    assert Exclusions(own, sweep, 1.0, said.append).standing() == []
    assert "can be written by everybody" in said[0]


# -- where too few nodes are left ------------------------------------------------------------------


def test_a_job_fails_rather_than_run_where_its_own_check_failed(jobs):
    """Nor is that counted as a restart."""
    job = jobs(0)
    job.controller.nodes = {"n1": True, "n2": False}
    decision, _ = fails(job, "n1", "refuse")
    assert not decision.starts_again
    assert decision.because.endswith("given up: too few nodes are left for it without n1")
    assert job.counts == Counts()
    assert job.controller.did == []


def test_a_job_that_asks_for_this_very_node_fails(jobs):
    """`--nodelist`: Slurm would let it wait without an end."""
    job = jobs(0)
    report(job, 0, 69, node="n1")
    job.controller.answers[:] = [replace(RUNS, required="n1")]
    assert "left for it without n1" in job._decide(job._outcome(exited(69))).because


def test_what_a_sibling_has_found_gives_way_and_is_named(jobs, capfd):
    """Its node may be good enough for this job; one that failed here is not."""
    sibling = jobs(1)
    sibling.controller.nodes = dict.fromkeys(["n1", "n2"], True)
    assert fails(sibling, "n2", "exclude_node")[1] == 75
    job = jobs(0)
    assert fails(job, "n1", "exclude_node")[1] == 75
    assert job.controller.did[-1] == ("exclude", ["n1"])
    said = capfd.readouterr().err
    assert said.count("not excluded, since too few other nodes are left: n2 (`ecc` failed") == 1
    assert str(sibling.directory) in said


def test_where_nobody_says_how_many_nodes_are_left_all_are_excluded(jobs, capfd):
    """As before; where none is left, the launcher sees the job wait for one."""
    job = jobs(0)
    job.controller.nodes = None
    assert fails(job, "n1", "refuse")[1] == 75
    assert job.controller.did[-1] == ("exclude", ["n1"])
    assert "sinfo: busy" in capfd.readouterr().err


# -- before anything is started --------------------------------------------------------------------


def begin(job, *answers):
    """As a wrapper does in a start of its job; the task is over at once."""
    job.controller.answers[:] = answers
    job.controller.did.clear()
    job._stage = lambda began: Outcome(0)
    assert job._take_over() is None
    assert job._attempt() == Outcome(0)


def test_a_job_does_not_begin_on_a_node_that_a_sibling_has_excluded(jobs, monkeypatch, capfd):
    """In no budget, but once: what Slurm gives it again, it tries."""
    fails(jobs(0), "n1", "exclude_node")
    job = jobs(1)
    with pytest.raises(SystemExit) as ended:
        begin(job, RUNS)
    assert ended.value.code == 75
    assert job.controller.did == [("requeue", "7"), ("exclude", ["n1"])]
    state = read_json(job.forge / STATE)
    assert (state["state"], state["left"], state["excluded"]) == ("starting", ["n1"], ["n1"])
    assert "`ecc` failed there for the job in" in state["because"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = jobs(1)
    begin(again, replace(RUNS, restarts=1, excluded="n1"))
    assert again.controller.did == []
    assert again.counts == Counts()
    assert "runs all the same" in capfd.readouterr().err


def test_a_job_on_other_nodes_asks_nobody(jobs):
    """A thousand jobs that start together are no thousand questions."""
    fails(jobs(0), "n2", "exclude_node")
    begin(jobs(1))


def test_a_wrapper_killed_before_it_has_requeued_leaves_the_node_when_it_is_back(jobs):
    """The batch script has started another, in the same allocation."""
    job = jobs(0, RUNS)
    report(job, 0, 69, node="n1")
    sick.write(job.directory, Sick("n1", "ecc", "3 errors", "refuse"))
    assert job._decide(job._outcome(exited(69))).starts_again
    job._write_state("starting", "ecc")  # and here it is killed
    with pytest.raises(SystemExit):
        begin(jobs(0), RUNS)
    assert job.controller.did == [("requeue", "7"), ("exclude", ["n1"])]
    assert read_json(job.forge / STATE)["counts"]["excluded"] == 1


def test_a_wrapper_killed_before_it_has_read_who_is_sick_leaves_the_node_when_it_is_back(jobs):
    """Else the same check fails there once more, if at the start; if beside training, later."""
    job = jobs(0, RUNS)
    job._write_state("running")
    sick.write(
        job.directory, Sick("n1", "ecc", "3 errors", "exclude_node")
    )  # and here it is killed
    again = jobs(0, RUNS)
    assert again._take_over() == Outcome(-9)
    with pytest.raises(SystemExit):
        again._attempt()
    assert job.controller.did == [("requeue", "7"), ("exclude", ["n1"])]


def test_where_no_node_is_to_blame_none_is_excluded(jobs):
    """A network between two nodes: the first rank that leaves is no culprit."""
    job = jobs(0)
    fails(job, "", "exclude_node")
    assert job._exclusions.standing() == []


ASKED_TO_STOP = JobInfo("COMPLETING", "None", 0, None)
PREEMPTED = JobInfo("RUNNING", "None", 0, "2026-01-01T00:00:00", left_s=3000.0)


@pytest.mark.parametrize("says", [ASKED_TO_STOP, PREEMPTED])
def test_what_slurm_is_ending_is_not_requeued(says, jobs):
    """A cancelled job would come back to life."""
    fails(jobs(0), "n1", "exclude_node")
    job = jobs(1)
    begin(job, says)
    assert job.controller.did == []


@pytest.mark.parametrize("error", [NoAnswer("busy"), NotRequeueable("denied")])
def test_a_job_that_cannot_be_requeued_tries_the_node(error, jobs, monkeypatch, capfd):
    """Its own checks look at it before it trains."""
    fails(jobs(0), "n1", "exclude_node")

    def refuse(job, within_s):
        raise error

    job = jobs(1)
    monkeypatch.setattr(client, "requeue", refuse)
    begin(job, RUNS)
    assert f"runs on nodes that were found sick: {error}" in capfd.readouterr().err


def test_a_job_that_is_not_to_be_requeued_is_not(jobs):
    """`resilience.requeue.enabled=false`."""
    fails(jobs(0), "n1", "exclude_node")
    job = jobs(1)
    job.plan = replace(job.plan, requeue=replace(job.plan.requeue, enabled=False))
    begin(job)
    assert job.controller.did == []


def test_a_job_that_is_resubmitted_stays_off_the_nodes_as_well(jobs, monkeypatch):
    """Its new number has the batch script's own list."""
    job, asked = jobs(0), []

    def refuse(job, within_s):
        raise NotRequeueable("presently disabled")

    monkeypatch.setattr(client, "requeue", refuse)
    monkeypatch.setattr(client, "submit", lambda script, *options: asked.append(options) or "99")
    assert fails(job, "n1", "refuse")[1] == 75
    assert asked == [("--exclude=n1",)]
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    successor = jobs(0)
    assert successor._take_over() is None
    assert successor._exclusions.ours == ["n1"]


# -- what the controller says of nodes -------------------------------------------------------------

SINFO = """\
n1|idle|a100,big|gpu:a100:4(S:0-1)
n2|allocated|a100|gpu:a100:4
n2|allocated|a100|gpu:a100:4
n3|drained|a100|gpu:a100:4
n4|down*|a100|gpu:a100:4
n5|mixed*|a100|gpu:a100:4
n6|idle~|big|(null)
n7|maint|(null)|shard:2
n8|draining|a100|gpu:4
"""


@pytest.mark.parametrize(
    ("job", "usable"),
    [
        ("Features=(null)", "n1 n2 n6 n7"),
        ("Features=a100", "n1 n2"),
        ("Features=a100&big", "n1"),
        ("Features=a100|big", "n1 n2 n6"),
        ("Features=[rack1*2&rack2*4]", "n1 n2 n6 n7"),
        ("Features=(null) TresPerNode=gres:gpu:2", "n1 n2"),
        ("Features=big TresPerTask=gres/gpu:a100:1", "n1"),
    ],
)
def test_the_nodes_that_a_job_could_run_on(job, usable, monkeypatch):
    """Not those that wait for an administrator; those that only sleep, or are busy, count."""
    monkeypatch.setattr(client, "_ask", lambda *command, within_s: SINFO)
    found = client.nodes_for(JobInfo.parse(f"JobId=7 Partition=low {job}"), 1.0)
    assert [name for name, is_usable in found.items() if is_usable] == usable.split()
    assert len(found) == 8
