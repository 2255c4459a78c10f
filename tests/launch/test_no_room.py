"""A sweep on a disk that becomes full: true jobs on a file system of 2 MiB of their own."""

import subprocess

from sweeps import App, SweptJob, assert_same_job

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
SWEEP = """
set -u
disk=$1 said=$2 copy=$3; shift 3
mount -t tmpfs -o size=2m tmpfs "$disk"
(until grep -q "restart 1" "$said"; do sleep 0.1; done; rm "$disk/ballast") &
"$@"; code=$?
cp -r "$disk/sweep" "$copy"
exit $code
"""


def test_a_job_that_a_full_disk_stopped_resumes_once_there_is_room(disk, undisturbed, tmp_path):
    """No byte is free, so the wrapper cannot write its files; the older checkpoint is valid."""
    app = App(tmp_path / "app", misbehave=FILL)
    app.sweep_dir = disk / "sweep"
    output, copy = tmp_path / "said.txt", tmp_path / "copy"
    command = app.command("resilience.requeue.max_no_progress=1")
    with output.open("w") as file:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", SWEEP, "sh", disk, output, copy, *command],
            cwd=app.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=200,
        )
    said = output.read_text()
    assert done.returncode == 0, said
    assert "restart 1 after step 15 of 40 (37%): the disk is full" in said
    assert_same_job(SweptJob(copy / "0"), undisturbed["0.1"])
