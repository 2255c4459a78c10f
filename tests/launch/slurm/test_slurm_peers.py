"""What becomes of jobs on a true cluster, without accounting, with what people use today."""

import signal
import sys

import pytest
from cluster import submit, wait_for
from harness import Process, told

from forge.process import processes

pytestmark = [pytest.mark.proofs, pytest.mark.slurm, pytest.mark.slow]

HYDRA = """
    import os, sys, time
    from pathlib import Path
    import hydra

    class Main:
        \"\"\"A task with a checkpoint of its own, as submitit's documentation has it.\"\"\"

        __name__ = "main"

        def __call__(self, cfg):
            Path(cfg.places, cfg.kind).touch()
            if cfg.kind == "fails":
                raise ValueError("no such luck")
            with open(Path(cfg.places, "starts"), "a") as file:
                file.write(str(os.getpid()) + "\\n")
            starts = Path(cfg.places, "starts").read_text().split()
            while not (cfg.kind == "asked" and len(starts) > 1):
                time.sleep(0.05)

        def checkpoint(self, *args):
            Path(cfg.places, "checkpoint").touch()

    hydra.main(version_base=None, config_path=None)(Main())()
"""
SUBMITIT = """
    import os, sys, time
    from pathlib import Path
    import submitit

    class Task(submitit.helpers.Checkpointable):
        def __call__(self, places):
            with open(Path(places, "starts"), "a") as file:
                file.write(str(os.getpid()) + "\\n")
            if len(Path(places, "starts").read_text().split()) == 1:
                time.sleep(600)

        def checkpoint(self, *args):
            Path(args[0], "checkpoint").touch()
            return super().checkpoint(*args)

    executor = submitit.SlurmExecutor(sys.argv[1])
    executor.update_parameters(time=10, exclusive=True, additional_parameters={"requeue": True})
    print(executor.submit(Task(), sys.argv[1]).job_id)
"""
SAVES_AND_EXITS = """
    import os, signal, sys, time
    from pathlib import Path

    def leave(*received):
        Path("saved").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    Path("begun").touch()
    for _ in range(600):
        time.sleep(1)
"""


@pytest.fixture
def places(tmp_path):
    """Where jobs say how far they have come."""
    path = tmp_path / "places"
    path.mkdir()
    return path


@pytest.fixture
def start(cluster, tmp_path):
    """Start a script that submits; it is ended with the test."""
    started = []

    def begin(text, *arguments):
        script = tmp_path / "train.py"
        script.write_text("\n".join(line[4:] for line in text.splitlines()))
        command = [sys.executable, str(script), *map(str, arguments)]
        one = Process(command, tmp_path / "output.txt", tmp_path, **cluster.environment)
        started.append(one)
        return one

    yield begin
    for one in started:
        one.popen.kill()
        one.popen.wait()
    cluster.clear()


def the_job(cluster):
    """The number of the only job in the queue, once it is there."""
    wait_for(lambda: cluster.run("squeue", "--noheader", "--format=%A").strip(), "a job")
    return cluster.run("squeue", "--noheader", "--format=%A").split()[0]


def test_submitit_slurm_says_completed_of_a_job_that_failed(cluster, start, places):
    """Hydra keeps the exception, and the process ends with 0: `afterok` starts in vain."""
    start(HYDRA, "-m", "hydra/launcher=submitit_slurm", "+kind=fails", f"+places={places}")
    job = the_job(cluster)
    wait_for(lambda: cluster.show(job)["JobState"] not in ("PENDING", "RUNNING"), "its end")
    wait_for(lambda: cluster.show(job)["JobState"] != "COMPLETING", "its end")
    assert (places / "fails").exists()
    assert cluster.show(job)["JobState"] == "COMPLETED"


def test_submitit_slurm_waits_for_a_job_that_is_gone(cluster, start, places):
    """It asks sacct, which has nothing to say, and nobody starts the job again."""
    launcher = start(
        HYDRA, "-m", "hydra/launcher=submitit_slurm", "+kind=killed", f"+places={places}"
    )
    task = launcher.wait_for(lambda: told(places / "starts"), "start of the task")
    job = the_job(cluster)
    processes.send(int(task), signal.SIGKILL)
    wait_for(lambda: cluster.show(job)["JobState"] == "FAILED", "its end")
    # Its first look is at once, the next after 2, 4, 8 s: none of them tells it.
    launcher.wait_for(lambda: launcher.output.count("Bypassing sacct error") >= 3, "sacct")
    assert launcher.popen.poll() is None
    assert cluster.show(job)["Restarts"] == "0"


def test_submitit_slurm_never_calls_the_task_s_own_checkpoint(cluster, start, places):
    """The launcher's does, which knows nothing of the task's state."""
    launcher = start(
        HYDRA,
        "-m",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.max_num_timeout=3",
        "+kind=asked",
        f"+places={places}",
    )
    launcher.wait_for((places / "starts").exists, "start of the task")
    job = the_job(cluster)
    cluster.run("scancel", "--signal=USR2", job)
    wait_for(lambda: cluster.show(job)["Restarts"] == "1", "requeue")
    wait_for(lambda: len((places / "starts").read_text().split()) == 2, "second start")
    assert not (places / "checkpoint").exists()


def test_submitit_bypasses_the_notice_of_a_preemption(cluster, start, places, tmp_path):
    """Slurm brings the job back when the grace time is over; its checkpoint was never called."""
    launcher = start(SUBMITIT, places)
    assert launcher.wait() == 0
    job = launcher.output.split()[-1]
    wait_for((places / "starts").exists, "start of the task")
    submit(cluster, tmp_path, "sleep 1", "--partition=urgent", "--exclusive", "--nodes=2")
    wait_for(lambda: cluster.show(job)["Restarts"] == "1", "requeue")
    assert not (places / "checkpoint").exists()
    said = "".join(path.read_text() for path in places.glob("*.err"))
    assert "Bypassing signal SIGTERM" in said


def test_a_job_that_saves_and_exits_with_0_is_done_for_slurm(cluster, start, places, tmp_path):
    """An emergency save, a clean exit: the training is lost, and nothing says so."""
    script = tmp_path / "task.py"
    script.write_text("\n".join(line[4:] for line in SAVES_AND_EXITS.splitlines()))
    command = f"cd {places} && exec srun --ntasks=1 --nodes=1 {sys.executable} {script}"
    job = submit(cluster, tmp_path, command, "--requeue", "--exclusive", "--nodes=2")
    wait_for((places / "begun").exists, "start of the task")
    submit(cluster, tmp_path, "sleep 1", "--partition=urgent", "--exclusive", "--nodes=2")
    wait_for(lambda: cluster.show(job)["JobState"] == "COMPLETED", "its end")
    assert (places / "saved").exists()
    assert cluster.show(job)["Restarts"] == "0"
