"""A disk without room, on a true cluster: the job goes back into the queue for a while."""

import contextlib

import pytest
from jobs import BARE_CONF, SlurmApp

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAIN = """
    import errno, os, time
    from pathlib import Path
    import hydra
    import forge

    if "FORGE_JOB_TOKEN" in os.environ:
        import torch

    def fill(gates):
        \"\"\"From now on there is no room for a checkpoint, as long as the gate is there.\"\"\"
        fsync, gate = os.fsync, gates / "full"
        gate.touch()

        def failing(fd):
            if gate.exists() and "step_" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            fsync(fd)

        os.fsync = failing

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        gates = Path(cfg.gates)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step in run.steps(6):
                loss = model(torch.randn(3, 2)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                if step == 4 and run.resumed_from is None:
                    fill(gates)
                    while not forge.stopping._state.handler.signal_received:
                        time.sleep(0.05)
        (gates / str(run.resumed_from)).touch()

    if __name__ == "__main__":
        main()
"""


def test_a_job_without_room_for_its_checkpoint_waits_in_the_queue_and_resumes(cluster, tmp_path):
    """It holds no node meanwhile; the checkpoint before is good, and room returns."""
    conf = BARE_CONF + "      checkpoint: {every_steps: 2}\n      requeue: {no_progress_limit: 1}\n"
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, conf)) as app:
        sweep = app.start()
        app.wait_for_gate("full", sweep)
        (job,) = app.jobs_by_place()
        job.scancel("--signal=USR1")
        sweep.wait_for(lambda: "waiting: BeginTime" in sweep.output, "a pause in the queue")
        (app.gates / "full").unlink()
        assert sweep.wait() == 0, sweep.output
        assert "restart 1 at step 5 of 6 (83%): the disk is full" in sweep.output
        assert (app.gates / "step_4").exists()
        assert (job.restarts, job.counts["failures"]) == (1, 1)
        why = [one for one in job.told if one["kind"] == "end"]
        assert [one["code"] for one in why] == [71, 0]
