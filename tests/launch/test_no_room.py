"""A sweep on a disk that becomes full: true jobs on a file system of 2 MiB of their own."""

from functools import partial

from sweeps import App, SweptJob, assert_same_job
from warm import own_disk

FILL = """
    if step == 14 and not RESTARTS:
        disk = Path(HydraConfig.get().runtime.output_dir).parents[1]
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass
        os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_job_that_a_full_disk_stopped_resumes_once_there_is_room(disk, undisturbed, tmp_path):
    """No byte is free, so the wrapper cannot write its files; the older checkpoint is valid."""
    app = App(tmp_path / "app", misbehave=FILL)
    app.popen = partial(app.popen, disk=(disk, "2m"))
    app.sweep_dir = disk / "sweep"
    sweep = app.start("resilience.requeue.max_no_progress=1")
    its = own_disk(sweep.popen, disk, "sweep")
    sweep.wait_for(lambda: "restart 1" in sweep.output, "the stop")
    (its / "ballast").unlink()
    assert sweep.wait() == 0, sweep.output
    assert "restart 1 after step 15 of 40 (37%): the disk is full" in sweep.output
    assert_same_job(SweptJob(its / "sweep" / "0"), undisturbed["0.1"])
