"""The throwaway cluster behaves as a cluster does, and leaves nothing behind."""

import multiprocessing
import subprocess
import sys

import pytest
from cluster import Cluster, missing, submit, wait_for
from started import Popen

from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_job_runs_and_its_exit_code_is_told(cluster, tmp_path):
    """Without accounting, by scontrol alone."""
    good = submit(cluster, tmp_path, "srun hostname")
    bad = submit(cluster, tmp_path, "exit 7")
    wait_for(lambda: cluster.show(good)["JobState"] == "COMPLETED", "end of the good job")
    wait_for(lambda: cluster.show(bad)["JobState"] == "FAILED", "end of the bad job")
    assert cluster.show(bad)["ExitCode"] == "7:0"


def test_an_urgent_job_preempts_with_a_grace_time(cluster, tmp_path):
    """PreemptTime is set at once, and the requeue comes when the grace time is over."""
    script = "trap 'touch told' TERM; touch begun; while :; do sleep 0.2; done"
    job = submit(cluster, tmp_path, script, "--exclusive", "--nodes=2", "--requeue")
    wait_for((tmp_path / "begun").exists, "start of the job")
    urgent = submit(cluster, tmp_path, "sleep 1", "--partition=urgent", "--exclusive", "--nodes=2")
    wait_for(lambda: cluster.show(job).get("PreemptTime", "None") != "None", "preemption")
    assert cluster.show(job)["Restarts"] == "0"
    wait_for(lambda: cluster.show(job)["Restarts"] == "1", "requeue")
    cluster.run("scancel", job, urgent)


def test_nothing_is_left_when_its_owner_is_killed(tmp_path):
    """A test run that is killed must not leave a controller on somebody's machine."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from cluster import Cluster\n"
        "one = Cluster(Path(sys.argv[2])); print(one._keeper.pid, flush=True); input()"
    )
    owner = Popen(
        [
            sys.executable,
            "-c",
            code,
            str(__import__("cluster").__file__.rpartition("/")[0]),
            str(tmp_path / "run"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    keeper = int(owner.stdout.readline())
    family = [keeper, *processes.descendants(keeper)]
    assert len(family) >= 5
    owner.kill()
    owner.communicate()
    assert processes.wait_gone(family, 30) == []


def test_a_process_that_inherits_the_keeper_s_pipe_does_not_delay_the_end(tmp_path):
    """Workers of a DataLoader are forked, so they keep all open files of the test process."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    cluster = Cluster(tmp_path / "run")
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    heir = fork.Process(target=reader.recv, daemon=True)
    heir.start()
    cluster.stop()
    assert heir.is_alive()
    writer.send("end")
    heir.join()


def test_a_cluster_that_cannot_start_says_where_to_look(tmp_path, monkeypatch):
    """A broken installation must not look like a broken forge."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(RuntimeError, match="did not start"):
        Cluster(tmp_path / "run")
