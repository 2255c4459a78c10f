"""A disk without room, on a real cluster: the job is requeued with a delay."""

import contextlib

import pytest
from slurm_apps import SlurmApp

from forge.jobdir import ledger

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.proofs]

FILL = """
    if step == cfg.hold and not RESTARTS:
        import errno
        fsync, gate = os.fsync, Path(cfg.gates, "full")
        gate.touch()

        def failing(fd):
            if gate.exists() and "step_" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            fsync(fd)

        os.fsync = failing
"""


def test_a_job_without_room_for_its_checkpoint_waits_in_the_queue_and_resumes(cluster, tmp_path):
    """The job occupies no node while it waits, and resumes from its previous checkpoint."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", misbehave=FILL)) as app:
        sweep = app.start("++holds.plain=1", "resilience.requeue.max_no_progress=1")
        app.wait_for_gate("plain 0", sweep)
        (job,) = app.jobs_by_place()
        job.scancel("--signal=USR1")
        sweep.wait_for(lambda: "waiting: BeginTime" in sweep.output, "a pause in the queue")
        (app.gates / "full").unlink()
        assert sweep.wait() == 0, sweep.output
        assert "restart 1 after step 13 of 30 (43%): the disk is full" in sweep.output
        assert ledger.read(job.directory).attempts[1].start_step == 10
        assert (job.restarts, job.counts["failures"]) == (1, 1)
        why = [one for one in job.told if one["kind"] == "end"]
        assert [one["code"] for one in why] == [71, 0]
