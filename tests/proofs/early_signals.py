"""Signals in the first instants of a task, on a true cluster: how many of them are acted on.

    python tests/proofs/early_signals.py 50

Each job of a sweep gets USR2, in every process of its step, at a random moment of the first 100 ms
after srun's exec of the task. It has to be requeued for it, once, and to finish.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing
from slurm_apps import SlurmApp

WITHIN_S = 0.1
MAIN = """
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        return cfg.number

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    number: 0
    gates: ???
    resilience:
      health: {enabled: false}
      requeue: {max_no_progress: 9}
"""
# slurmstepd runs it as a sibling of the task to be, and starts that as soon as this has ended. What
# is left behind strikes as Slurm does: every process of the step, whatever its session.
PROLOG = """#!{python} -IS
import os, random, signal, sys, time
sys.path.append({root!r})
from forge.process import processes

if os.environ["FORGE_RESTART_COUNT"] == "0" and os.fork() == 0:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    delay_s = random.Random(os.environ["FORGE_JOB_TOKEN"]).uniform(0, {within_s})
    task = int(os.environ["SLURM_TASK_PID"])
    while b"forge-step" not in open(f"/proc/{{task}}/cmdline", "rb").read():
        time.sleep(0.0002)
    time.sleep(delay_s)
    pids = [task, *processes.descendants(task)]
    with open({log!r}, "a") as file:  # before: with the task this process ends as well
        file.write(f"{{delay_s:.4f}} {{len(pids)}}\\n")
    for pid in pids:
        processes.send(pid, signal.SIGUSR2)
"""


class Struck:
    """A sweep of jobs that are signalled early."""

    def __init__(self, cluster: Cluster, folder: Path, count: int):
        self.app = SlurmApp(cluster, folder, MAIN, CONF)
        self.count = count
        self.log = folder / "struck"
        self.log.touch()
        prolog = folder / "prolog"
        prolog.write_text(
            PROLOG.format(
                python=sys.executable,
                root=str(Path(__file__).parents[2]),
                within_s=WITHIN_S,
                log=str(self.log),
            )
        )
        prolog.chmod(0o755)
        self.sweep = self.app.start(
            f"number=range({count})",
            f"hydra.launcher.srun_args=['--task-prolog={prolog}']",
            "hydra.launcher.timeout_min=10",
        )

    def survivors(self) -> int:
        """Jobs that were requeued for the signal, once, and have finished."""
        self.sweep.wait(600)
        found = 0
        for job in self.app.jobs_by_place():
            reasons = [one["reason"] for one in job.told if one["kind"] == "end"]
            is_good = reasons == ["requested", "finished"] and job.restarts == 1
            found += is_good
            if not is_good:
                print(f"{job.directory}: {reasons}", job.output, sep="\n", file=sys.stderr)
        return found

    @property
    def strikes(self) -> list[tuple[float, int]]:
        """For each signal: seconds after the exec, and how many processes there were."""
        pairs = (line.split() for line in self.log.read_text().splitlines())
        return sorted((float(delay), int(count)) for delay, count in pairs)


def main(count: int) -> int:
    """Print how many survive."""
    problem = missing()
    if problem:
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="forge-early-") as name:
        cluster = Cluster(Path(name) / "slurm")
        try:
            struck = Struck(cluster, Path(name) / "app", count)
            survivors = struck.survivors()
            for delay_s, num_processes in struck.strikes:
                print(f"  {1000 * delay_s:5.1f} ms  {num_processes} processes")
        finally:
            cluster.stop()
    print(f"{survivors} of {count} survived a signal in their first {1000 * WITHIN_S:.0f} ms")
    return 0 if survivors == count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
