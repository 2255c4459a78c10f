"""Programs that know nothing of forge, most of them awkward, run by `forge exec` as true processes.

Each counts to 20. In the first attempt it holds at 10 until a signal comes, and saves then as well
as it can; later attempts resume from what lies in the job's directory. Most of them log in
`steps.txt` what they have counted, by which one sees what a stop has cost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster import Cluster
from harness import FORGE, Process
from slurm_apps import SlurmApp, SlurmJob
from sweeps import App, SweptJob

from forge.jobdir.job_dir import hydra_quoted

COUNT = r"""
import os, signal, sys, time
from pathlib import Path

job, leaving = Path(os.environ["FORGE_JOB_DIR"]), []
rank = os.environ.get("RANK", "0")
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
state = job / f"state {rank}"
step = int(state.read_text()) if state.exists() else 0
first = not state.exists()
print("from", step, flush=True)
while step < 20 and not leaving:
    step += 1
    with open(job / "steps.txt", "a") as file:
        file.write(f"{step}\n")
    while step == 10 and first and not leaving:
        (job / f"ready {rank}").touch()
        time.sleep(0.01)
time.sleep(0.2 * bool(leaving))  # a save takes a while
state.write_text(str(step))
(job / f"saved {rank}").touch()
sys.exit(0)
"""
"""Saves when it is asked to stop, with exit code 0; so it does when it has come to its end."""

TRAP = """#!/bin/bash
state=$FORGE_JOB_DIR/state
step=$(cat "$state" 2> /dev/null || echo 0)
first=$step
save() {
  sleep 0.3  # while this runs a second signal would end it, and with it the save
  echo "$step" > "$state.new" && mv "$state.new" "$state"
  exit "${1:-0}"
}
trap save TERM
while [ "$step" -lt 20 ]; do
  step=$((step + 1))
  echo "$step" >> "$FORGE_JOB_DIR/steps.txt"
  while [ "$step" = 10 ] && [ "$first" = 0 ]; do
    touch "$FORGE_JOB_DIR/ready"
    sleep 0.2 & wait $!
  done
done
save
"""

KEEPS_TO_ITSELF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)  # it is not passed on, and nobody leaves
sys.exit(subprocess.call(sys.argv[1:]))
"""

DEAF = """#!/bin/bash
trap '' TERM
echo start >> "$FORGE_JOB_DIR/steps.txt"
[ -e "$FORGE_JOB_DIR/ready" ] && exit 0
touch "$FORGE_JOB_DIR/ready"
while true; do sleep 0.1; done
"""

DAEMON = """
import os, signal, subprocess, sys, time
from pathlib import Path

job = Path(os.environ["FORGE_JOB_DIR"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (job / "daemon").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not (job / "daemon").exists():
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

COMMANDS: dict[str, list[str]] = {
    "cd": ["bash", "-c", "cd folder && python count.py"],
    "pipeline": ["bash", "-c", 'python count.py | tee -a "$FORGE_JOB_DIR/printed.txt"'],
    "wrapper": ["python", "keeps_to_itself.py", "python", "count.py"],
    "deaf": ["./deaf.sh"],
    "daemon": ["python", "daemon.py", "count.py"],
    "trap": ["./trap.sh"],
    "torchrun": [
        *(str(Path(sys.executable).with_name("torchrun")), "--standalone"),
        *("--nproc-per-node", "2", "count.py"),
    ],
}
"""What people type, by what is awkward about it."""
CONF = f"""
    defaults: [{{resilience: default}}, _self_]
    kind: ???
    commands: {json.dumps(COMMANDS)}
    command: ${{commands.${{kind}}}}
    hydra: {{job: {{name: awkward}}}}
    resilience: {{shutdown: {{timeout_s: 8}}}}
"""
"""All of them, by `kind`."""


class Commands(App):
    """A folder with these programs, and `forge exec` started in it."""

    launcher = "local"

    def __init__(self, folder: Path, conf: str = CONF):
        App.__init__(self, folder, "", conf)
        (folder / "folder").mkdir()
        (folder / "keeps_to_itself.py").write_text(KEEPS_TO_ITSELF)
        (folder / "daemon.py").write_text(DAEMON)
        for path in (folder / "count.py", folder / "folder" / "count.py"):
            path.write_text(COUNT)
        for name, text in (("trap.sh", TRAP), ("deaf.sh", DEAF)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def command(self, *arguments: str) -> list[str]:
        """`forge exec`, with the folder of this sweep among its overrides."""
        head = [f"hydra/launcher={self.launcher}", "hydra.launcher.progress=plain"]
        place = f"hydra.sweep.dir={hydra_quoted(str(self.sweep_dir))}"
        return [sys.executable, FORGE, "exec", *head, place, *arguments]

    def begin(self, command: Sequence[str], *overrides: str, **env: str) -> Process:
        """Start one command, and let it run."""
        return self.start(*overrides, "--", *command, **env)


class SlurmCommands(Commands, SlurmApp):
    """The same on a cluster."""

    launcher = "slurm"

    def __init__(self, cluster: Cluster, folder: Path, conf: str = CONF):
        Commands.__init__(self, folder, conf)
        self.cluster = cluster


def is_ready(job: SweptJob | SlurmJob) -> bool:
    """Whether what was started holds at the place where it waits for a signal."""
    names = ("ready", "ready 0") if not (job.directory / "ready 1").exists() else ("ready 0",)
    return any((job.directory / name).exists() for name in names)


def wait_ready(job: SweptJob | SlurmJob, sweep: Process) -> None:
    sweep.wait_for(lambda: is_ready(job), f"hold of {job.directory}")


def ends(job: SweptJob) -> list[str]:
    """How each attempt ended: its state, reason and exit code."""
    return [
        f"{one['state']} {one['reason']} {one['code']}" for one in job.told if one["kind"] == "end"
    ]
