"""The nodes that a job excludes, on a simulated cluster (`played_jobs.py`).

`test_sick_nodes.py` tests it on a real cluster. One module, since all cases test one rule.
"""

import json
import time
from dataclasses import asdict, replace

import pytest
from played_jobs import PREEMPTED, RUNS, report

from forge.config.schema import RequeueConfig
from forge.errors import NoAnswer, NotRequeueable
from forge.jobdir import node_fault
from forge.jobdir.job_files import forge_dir
from forge.jobdir.job_state import Counts
from forge.jobdir.node_fault import NodeFault
from forge.jobdir.plan import RequeueLimits, SlurmPlan
from forge.slurm import client
from forge.slurm.exclusions import Exclusion, Exclusions, choose
from forge.slurm.job_info import JobInfo

NODES = ("n1", "n2", "n3")
ON_N1 = {"on": "n1", "nodes": NODES}
"""Arguments of a start: the job's node, and the nodes of the cluster."""
LEAVES = [("requeue", "7"), ("exclude", ["n1"])]
"""The Slurm calls of a job that excludes n1."""
LIMITS = replace(RequeueLimits.of(RequeueConfig()), has_other_nodes=True, max_excluded_nodes=3)
NO_COUNTS = asdict(Counts())
ASKED_TO_STOP = JobInfo("COMPLETING", "None", 0, None)


def exclusion(node, found=1.0, job="/0", **changes):
    return replace(Exclusion(node, "ecc", "3 errors", job, found, time.time() + 3600), **changes)


@pytest.fixture
def folders(tmp_path):
    """The directories of a job, of its sibling, and of their sweep."""
    return tmp_path / "0", tmp_path / "1", tmp_path


def file_of(sweep, node):
    folder = forge_dir(sweep) / "excluded"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{node}.json"


@pytest.fixture
def make(played):
    """Returns a function that makes a job of the sweep, with one rank."""
    return lambda **changes: played(**{"ranks": 1, "requeue": LIMITS} | changes)


@pytest.fixture
def jobs(make):
    """Two jobs of a sweep."""
    return make(), make()


def standing(job):
    """The nodes that the job excludes, according to the files."""
    known = Exclusions(job.directory, job.directory.parent, 1.0)
    return [one.node for one in known.standing()]


def fails(job, node, action, **start):
    """Start the job; its check fails on this node, so that it ends with 69."""
    found = NodeFault(node, "ecc", "3 errors", action)
    job.step(69, report(69, node=node), sick={0: found})
    return job.run(RUNS, **ON_N1 | start)


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
    """The first exclusions are kept. `-n1` is a node that accepts no jobs, so it does not count."""
    known = nodes and {name.lstrip("-"): not name.startswith("-") for name in nodes.split()}
    standing = [exclusion("n1"), exclusion("n2")]
    found = choose(standing, known, fixed.split(), required.split(), needed)
    assert [[one.node for one in part] for part in found] == [kept.split(), left_out.split()]


def test_what_a_job_has_found_itself_comes_first_then_the_newest(folders):
    """The job's own check would fail again; of the siblings' findings, recent ones count more."""
    own, sibling, sweep = folders
    for node, found, job in (("n1", 1, own), ("n2", 2, sibling), ("n3", 3, sibling)):
        Exclusions(job, sweep, 1.0).note([NodeFault(node, "ecc", "", "exclude_node")])
        path = file_of(sweep, node)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"found": found}))
    assert [one.node for one in Exclusions(own, sweep, 1.0).standing()] == ["n1", "n3", "n2"]
    assert [one.node for one in Exclusions(sibling, sweep, 1.0).standing()] == ["n3", "n2", "n1"]


# -- exclusions shared by the jobs of a sweep ------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "avoided"), [("exclude_node", ["n1"]), ("refuse", []), ("halt", [])]
)
def test_a_sibling_stays_off_a_node_that_is_to_be_excluded(action, avoided, jobs):
    """With another action, only the job whose check failed avoids the node."""
    job, sibling = jobs
    assert fails(job, "n1", action).did == ([] if action == "halt" else LEAVES)
    assert standing(sibling) == avoided
    assert standing(job) == ([] if action == "halt" else ["n1"])


def test_siblings_are_told_by_a_job_that_does_not_start_again_itself(jobs):
    """The job's budget is used up, but siblings have to avoid the node all the same."""
    job, sibling = jobs
    ended = fails(job.left("starting", -1, counts={"excluded": 3}), "n1", "exclude_node")
    assert "max_excluded_nodes=3" in ended.state["because"]
    assert ended.did == []
    assert standing(sibling) == ["n1"]


def preempted(job, excluded, on, **start):
    """Start the job with these nodes excluded (by its user, or by forge); Slurm preempts it."""
    says = replace(PREEMPTED, excluded=excluded)
    return job.step(75, report(75)).run(says, nodes=NODES, on=on, **start)


def test_a_requeue_for_any_reason_takes_in_what_siblings_have_found(jobs):
    """The nodes that the user has excluded stay in the list."""
    job, sibling = jobs
    assert fails(job, "n1", "exclude_node").code == 75
    ended = preempted(sibling, excluded="n3", on="n2")
    assert (ended.code, ended.did[-1]) == (75, ("exclude", ["n3", "n1"]))
    assert ended.state["excluded"] == ["n1"]


@pytest.mark.parametrize(("name", "error"), [("nodes_for", None), ("requeue", NoAnswer("busy"))])
def test_a_job_that_is_cancelled_right_before_its_requeue_is_not_requeued(name, error, jobs):
    """`scontrol requeue` would start it again; sinfo and a busy controller take many seconds."""
    job, sibling = jobs
    fails(job, "n1", "exclude_node")
    cancelled = {"then": (name, ASKED_TO_STOP), "refuses": error}
    ended = preempted(sibling, excluded="", on="n2", **cancelled)
    assert (ended.did, ended.state["state"], ended.state["reason"]) == ([], "stopped", "cancelled")
    assert begin(job, RUNS, restarts=1, **cancelled).did == []  # to avoid the node


def test_what_is_over_is_taken_out_again_and_what_the_user_has_excluded_stays(make):
    """Otherwise a job would run out of nodes within a month."""
    short = SlurmPlan(ranks=1, kill_wait_s=30.0, srun_args=[], start=["true"], exclude_h=1e-9)
    job = make(slurm=short)
    ended = fails(job, "n1", "exclude_node")
    assert (ended.code, ended.did) == (75, [("requeue", "7")])
    ended = preempted(job.left("starting", -1, excluded=["n1"]), excluded="n1,n3", on="n1")
    assert ended.did[-1] == ("exclude", ["n3"])
    assert ended.state["excluded"] == []


def test_two_jobs_that_write_at_once_lose_nothing(folders):
    """Each node has its own file, so there is no read-modify-write of a shared file."""
    own, sibling, sweep = folders
    one, other = (Exclusions(job, sweep, 1.0) for job in (own, sibling))
    one.standing(), other.standing()
    one.note([NodeFault("n1", "ecc", "", "exclude_node")])
    other.note([NodeFault("n2", "ecc", "", "exclude_node")])
    assert {found.node for found in Exclusions(own, sweep, 1.0).standing()} == {"n1", "n2"}


def test_a_full_disk_ends_no_job_and_it_leaves_the_node_all_the_same(jobs, tmp_path):
    """The job excludes the node, although its siblings do not learn of it."""
    forge_dir(tmp_path).mkdir(exist_ok=True)
    (forge_dir(tmp_path) / "excluded").write_text("in the way")
    ended = fails(jobs[0], "n1", "exclude_node")
    assert (ended.code, ended.did) == (75, LEAVES)
    assert "The exclusion of node n1 (`" in ended.said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "n1"}', "odd node", "odd time"])
def test_a_file_that_makes_no_sense_excludes_nothing(text, folders):
    """A file can be truncated, or of another version."""
    own, _, sweep = folders
    found = exclusion("n1")
    odd = {"odd node": {"node": "--help"}, "odd time": {"until": "never"}}.get(text)
    path = file_of(sweep, "n1")
    path.write_text(text if odd is None else json.dumps(vars(found) | odd))
    assert Exclusions(own, sweep, 1.0).standing() == []
    path.write_text(json.dumps(vars(found)))
    assert Exclusions(own, sweep, 1.0).standing() == [found]


def test_a_file_of_somebody_else_s_ends_no_job(folders):
    """A file that other users can write is ignored, with a warning."""
    own, _, sweep = folders
    said = []
    Exclusions(own, sweep, 1.0).note([NodeFault("n1", "ecc", "", "exclude_node")])
    file_of(sweep, "n1").chmod(0o666)
    assert Exclusions(own, sweep, 1.0, said.append).standing() == []
    assert "can be written by everybody" in said[0]


# -- if too few nodes are left ---------------------------------------------------------------------


def test_a_job_fails_rather_than_run_where_its_own_check_failed(jobs):
    """The failure does not count as a restart."""
    ended = fails(jobs[0], "n1", "refuse", nodes={"n1": True, "n2": False})
    because = ended.state["because"]
    assert "not started again, since too few nodes are left for it without n1." in because
    assert ended.state["counts"] == NO_COUNTS
    assert ended.did == []


def test_a_job_that_asks_for_this_very_node_fails(jobs):
    """With `--nodelist` on an excluded node, Slurm would leave the job pending forever."""
    ended = jobs[0].step(69, report(69)).run(replace(RUNS, required="n1"), **ON_N1)
    assert "too few nodes are left for it without n1." in ended.state["because"]
    assert ended.did == []


def test_what_a_sibling_has_found_gives_way_and_is_named(jobs):
    """A node that failed for a sibling can work for this job; a node that failed here cannot."""
    job, sibling = jobs
    assert fails(sibling, "n2", "exclude_node", nodes=("n1", "n2")).code == 75
    ended = fails(job, "n1", "exclude_node", nodes=("n1", "n2"))
    assert (ended.code, ended.did) == (75, LEAVES)
    what = "the job can start on this node, since too few others are left: n2 (`ecc` failed"
    assert ended.said.count(what) == 1
    assert str(sibling.directory) in ended.said


def test_where_nobody_says_how_many_nodes_are_left_all_are_excluded(jobs):
    """Without an answer of sinfo all are excluded; at worst the job stays pending."""
    ended = fails(jobs[0], "n1", "refuse", nodes=None)
    assert (ended.code, ended.did) == (75, LEAVES)
    assert "sinfo: busy" in ended.said


# -- before anything is started --------------------------------------------------------------------


def begin(job, /, *answers, **start):
    """Start the job; its task finishes at once, if the wrapper starts it."""
    return job.run(*answers, left_s=None, **ON_N1 | start)


def test_a_job_does_not_begin_on_a_node_that_a_sibling_has_excluded(jobs):
    """The requeue counts in no budget, and happens once; if the node is the same again, it runs."""
    job, sibling = jobs
    fails(job, "n1", "exclude_node")
    ended = begin(sibling, RUNS)
    assert (ended.code, ended.did, ended.num_attempts) == (75, LEAVES, 0)
    state = ended.state
    assert (state["state"], state["left"], state["excluded"]) == ("queued", ["n1"], ["n1"])
    assert "`ecc` failed there for the job in" in state["because"]
    ended = begin(sibling, replace(RUNS, restarts=1, excluded="n1"), restarts=1)
    assert (ended.code, ended.did, ended.num_attempts) == (0, [], 1)
    of_the_attempt = {"no_progress": 0, "unsaved_s": 0.0}
    assert ended.state["counts"] | of_the_attempt == NO_COUNTS
    assert "as Slurm has no others" in ended.said


def test_a_job_on_other_nodes_asks_nobody(jobs):
    """Otherwise a thousand jobs that start together would send a thousand requests."""
    job, sibling = jobs
    fails(job, "n2", "exclude_node")
    ended = begin(sibling, RUNS)
    assert (ended.code, ended.num_attempts) == (0, 1)
    assert len(ended.noted("show")) == 1  # for the job's time limit


def test_a_wrapper_killed_before_it_has_requeued_leaves_the_node_when_it_is_back(jobs):
    """The batch script has started another wrapper in the same allocation."""
    killed = fails(jobs[0], "n1", "refuse", refuses=KeyboardInterrupt())
    assert (killed.did, killed.state["state"]) == ([], "starting")
    ended = begin(jobs[0], RUNS)
    assert (ended.code, ended.did) == (75, LEAVES)
    assert ended.state["counts"]["excluded"] == 1


def test_a_wrapper_killed_before_it_has_read_who_is_sick_leaves_the_node_when_it_is_back(jobs):
    """Otherwise the same check would fail again on that node, at the start or during training."""
    job = jobs[0].left("running", restarts=0)
    node_fault.write(job.directory, NodeFault("n1", "ecc", "3 errors", "exclude_node"))
    ended = begin(job, RUNS)
    assert (ended.code, ended.did, ended.num_attempts) == (75, LEAVES, 0)
    assert "killed by SIGKILL" in ended.said


def test_where_no_node_is_to_blame_none_is_excluded(jobs):
    """If the network between two nodes fails, the first rank that exits is not the culprit."""
    ended = fails(jobs[0], "", "exclude_node")
    assert ended.noted("exclude") == []
    assert standing(jobs[0]) == []


@pytest.mark.parametrize("says", [ASKED_TO_STOP, PREEMPTED])
def test_what_slurm_is_ending_is_not_requeued(says, jobs):
    """Otherwise a cancelled job would be started again."""
    job, sibling = jobs
    fails(job, "n1", "exclude_node")
    ended = begin(sibling, says)
    assert (ended.did, ended.num_attempts) == ([], 1)


@pytest.mark.parametrize("error", [NoAnswer("busy"), NotRequeueable("denied")])
def test_a_job_that_cannot_be_requeued_tries_the_node(error, jobs):
    """The job's own checks test the node before training."""
    job, sibling = jobs
    fails(job, "n1", "exclude_node")
    ended = begin(sibling, RUNS, refuses=error)
    assert f"so the job starts on the nodes that it has: {error}" in ended.said
    assert (ended.code, ended.num_attempts) == (0, 1)


def test_a_job_that_is_not_to_be_requeued_is_not(jobs, make):
    """`resilience.requeue.enabled=false` also applies to requeues before the first attempt."""
    fails(jobs[0], "n1", "exclude_node")
    ended = begin(make(requeue=replace(LIMITS, enabled=False)), RUNS)
    assert (ended.did, ended.num_attempts) == ([], 1)


# -- the controller's list of nodes ----------------------------------------------------------------

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
def test_the_nodes_that_a_job_could_run_on(job, usable, tmp_path, monkeypatch):
    """Nodes that are down or drained do not count; busy and powered-down nodes do."""
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat <<'END'\n{SINFO}END\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = client.nodes_for(JobInfo.parse(f"JobId=7 Partition=low {job}"), 60.0)
    assert [name for name, is_usable in found.items() if is_usable] == usable.split()
    assert len(found) == 8
