"""A user's folder with an app, run as a sweep by `hydra/launcher=slurm` on the tests' own cluster.

A job waits at a step until the test disturbs it, so that no test depends on a machine's speed.
`kind` names the purpose of a job, and selects its options from a table in its config.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster, submit
from harness import Process, made_once
from sweeps import App, SweptJob

from forge.jobdir import ledger
from forge.jobdir.job_files import forge_dir

PATIENCE_S = 150.0
HOLD = 12
"""The step at which a job of TRAIN waits to be disturbed."""
STEPS = 30

TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import forge
    from forge.shutdown import stopping

    RESTARTS = int(os.environ.get("FORGE_RESTART_COUNT", 0))

    def misbehave(cfg, step):
        pass

    def hold(cfg, run):
        \"\"\"Until a signal has come; once it was disturbed here, a job is left alone.\"\"\"
        num_before = len(list(Path(cfg.gates).glob(f"{cfg.kind} *")))
        Path(cfg.gates, f"{cfg.kind} {num_before}").touch()
        while num_before < cfg.holds.get(cfg.kind, 0):
            hears = cfg.kind not in ("stuck", "deaf", "held")
            if stopping.is_stopping() and hears:
                break
            if cfg.kind == "limit" and run.is_stopping:
                break  # announced early, it is the run's to know when it is near
            time.sleep(0.02)
            if not hears:  # holds the interpreter's lock, and hears nothing
                import ctypes
                ctypes.PyDLL(None).sleep(600)

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        if cfg.kind in cfg.get("idle", []):
            return hold(cfg, None)
        import torch  # neither the launcher nor an idle job needs it: a second of each test

        torch.set_num_threads(1)
        torch.manual_seed(cfg.seed)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        out = Path(HydraConfig.get().runtime.output_dir)
        while cfg.kind == "late" and not RESTARTS:
            time.sleep(0.02)  # data that is copied for longer than the job may run
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step in run.steps(cfg.steps):
                misbehave(cfg, step)
                if step in (cfg.hold, cfg.get("later", {}).get(cfg.kind)):
                    hold(cfg, run)
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
        torch.save(model.state_dict(), out / "weights.pt")
        return run.step

    if __name__ == "__main__":
        main()
"""
CONF = f"""
    defaults: [{{resilience: default}}, _self_]
    kind: plain
    seed: 3
    steps: {STEPS}
    hold: {HOLD}
    gates: ???
    idle: []                     # kinds that train nothing
    holds: {{}}                    # kind -> starts that hold
    later: {{}}                    # kind -> another step at which it does
    nodes: {{}}
    partitions: {{}}
    minutes: {{}}
    seconds: {{}}
    fruitless: {{}}
    resilience:
      signal: {{warning_s: 14}}       # so it comes 16 s after the start, of a minute, or later
      shutdown: {{timeout_s: "${{oc.select:seconds.${{kind}},12}}"}}
      requeue: {{max_no_progress: "${{oc.select:fruitless.${{kind}},6}}"}}
      checkpoint: {{every_steps: 10, every_s: null}}
      health: {{enabled: false}}
      slurm:
        partition: ${{oc.select:partitions.${{kind}},low}}
        nodelist: ${{oc.select:nodes.${{kind}},n1}}
        timeout_min: ${{oc.select:minutes.${{kind}},10}}
"""


BARE_CONF = """
    defaults: [{resilience: default}, _self_]
    kind: plain
    gates: ???
    resilience:
      health: {enabled: false}
"""
"""A config without further keys, for simple mains."""


class SlurmApp(App):
    """The user's folder, and the sweeps started in it on a cluster."""

    tools: Path | None = None
    """A folder with commands that stand in front of Slurm's."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        train: str = TRAIN,
        conf: str = CONF,
        misbehave: str = "",
    ):
        """Write the app's files. `conf` has to have the key `gates`."""
        super().__init__(folder, train, conf, misbehave)
        self.cluster = cluster
        self.gates = folder / "places"  # there is no config group of that name
        self.gates.mkdir()

    def command(self, *overrides: str) -> list[str]:
        common = super().command(f"gates='{_quoted(self.gates)}'")
        common[common.index("hydra/launcher=local")] = "hydra/launcher=slurm"
        return [*common, *overrides]

    @property
    def environment(self) -> dict[str, str]:
        """The launcher's environment, without variables of a job in which the tests run."""
        outer = {name: "" for name in os.environ if name.startswith(("SLURM", "SBATCH"))}
        found = outer | self.cluster.environment
        return found if self.tools is None else found | {"PATH": f"{self.tools}:{found['PATH']}"}

    def start(self, *overrides: str, **env: str) -> Process:
        return super().start(*overrides, **self.environment, **env)

    def run(self, *overrides: str, **env: str):
        return super().run(*overrides, **self.environment, **env)

    def forge(self, *arguments: str, code: int = 0, **env: str) -> str:
        return super().forge(*arguments, code=code, **self.environment, **env)

    def go_on_here(self, output: str) -> subprocess.CompletedProcess:
        """Run the printed resume command on this cluster."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return self.go_on(output)

    def close(self) -> None:
        """End the processes and queued jobs that a test has left."""
        super().close()
        self.cluster.clear()

    def wait_for_jobs(self, sweep: Process, number: int = 1) -> None:
        """Wait until a sweep has recorded this number of jobs."""
        sweep.wait_for(lambda: len(self._places()) >= number, f"{number} jobs")

    def jobs_by_place(self) -> list[SlurmJob]:
        """The jobs of the sweep, in the order of their numbers."""
        return [SlurmJob(self.cluster, self.sweep_dir / one["subdir"]) for one in self._places()]

    def jobs(self) -> dict[str, SlurmJob]:
        """The jobs of the sweep by their `kind`."""
        kinds = [
            next((text[5:] for text in one["overrides"] if text.startswith("kind=")), "plain")
            for one in self._places()
        ]
        return dict(zip(kinds, self.jobs_by_place(), strict=True))

    def _places(self) -> list[dict]:
        index = forge_dir(self.sweep_dir) / "jobs.jsonl"
        lines = index.read_text().split("\n")[:-1] if index.exists() else []  # whole ones
        return [json.loads(line) for line in lines if line]

    def wait_for_gate(self, name: str, sweep: Process) -> None:
        """Wait until a job of a sweep has reached a point of its script."""
        sweep.wait_for((self.gates / name).exists, f"gate {name}", PATIENCE_S)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "\\'")


class SlurmJob(SweptJob):
    """One job of a sweep on the cluster."""

    def __init__(self, cluster: Cluster, directory: Path):
        super().__init__(directory)
        self.cluster = cluster

    @property
    def slurm_id(self) -> str:
        """The job's id for Slurm's commands."""
        return self.state["job"]

    @property
    def shown(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return self.cluster.show(self.slurm_id)

    @property
    def restarts(self) -> int:
        """How often Slurm has requeued the job."""
        return int(self.shown["Restarts"])

    @property
    def counts(self) -> dict:
        return self.state["counts"]

    @property
    def task(self) -> int:
        return self._process("python", "forge.launch.task")

    @property
    def supervisor(self) -> int:
        return self._process("python", "forge.slurm.step")

    @property
    def srun(self) -> int:
        """pid of the command that waits for the step."""
        return self._process("srun", "")

    def _process(self, program: str, argument: str) -> int:
        """pid of the process that runs a program with an argument."""

        def is_it(pid: int) -> bool:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:  # the process has ended meanwhile
                return False
            return program in Path(words[0]).name and any(argument in one for one in words[1:])

        return next(pid for pid in self.marked if is_it(pid))

    def scancel(self, *options: str) -> None:
        self.cluster.run("scancel", *options, self.slurm_id)

    @property
    def starts(self) -> list[int]:
        """The first step of each attempt."""
        return [attempt.start_step for attempt in ledger.read(self.directory).attempts]

    @property
    def repeated(self) -> list[int]:
        """The number of steps that each attempt after the first has repeated."""
        attempts = ledger.read(self.directory).attempts
        return [_last(one) - two.start_step for one, two in itertools.pairwise(attempts)]


def _last(attempt: ledger.AttemptLog) -> int:
    """The step of an attempt's stop event, or else that of its start."""
    return max(one["step"] for one in attempt.events if one["kind"] in ("stop", "start"))


def table(**values: object) -> str:
    """A mapping in the syntax of overrides."""
    return "{" + ",".join(f"{name}:{value}" for name, value in values.items()) + "}"


def urgent(cluster: Cluster, folder: Path, *options: str) -> str:
    """Submit a job that preempts all jobs on its nodes."""
    return submit(cluster, folder, "sleep 0.1", "--partition=urgent", "--exclusive", *options)


def reasons(job: SlurmJob) -> list[str]:
    """The reason of the end of each attempt."""
    return [one["reason"] for one in job.told if one["kind"] == "end"]


@pytest.fixture(scope="session")
def undisturbed(shared_folder: Path) -> SweptJob:
    """A job of TRAIN that ran without interruption, on this machine, without a cluster."""

    def make(folder: Path) -> None:
        app = App(folder / "app", TRAIN, CONF)
        (app.folder / "places").mkdir()
        app.finish(f"gates={app.folder / 'places'}")

    return SweptJob(made_once(shared_folder / "undisturbed_slurm", make) / "app" / "sweep" / "0")
