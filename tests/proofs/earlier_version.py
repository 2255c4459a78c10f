"""Jobs that an earlier version of forge has submitted end with the same bits on this version.

    python tests/proofs/earlier_version.py [REVISION]

Starts a Slurm of its own, and submits with forge as it was at REVISION: a sweep, commands of
`forge exec`, batch scripts by hand, tasks of submitit, and a sweep on this machine that is stopped.
Some wait without having started, some were preempted after a save. If REVISION had them, their
policy sets keys that do not exist any more. Then forge is replaced by that of the working tree, and
all of them go on.
Prints one table; exits with 1 unless each ends COMPLETED, with the weights and losses of a run that
nobody interrupted, and with one notice about ignored keys where it reads such a policy.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from harness import Process
from red_then_green import environment_of
from slurm_apps import SlurmJob, urgent
from sweeps import SweptJob, assert_same_job, command_in

ROOT = Path(__file__).parents[2]
FORGE = ("forge", "hydra_plugins", "conf")
BEFORE_LESS = "c3c2430"
"""The last revision at which a policy had the keys of POLICY."""
NOTICE = "was started by an earlier version of forge"
HOLD, STEPS = 12, 30
MODEL = """
    import time
    from pathlib import Path
    import torch
    import forge

    def train(policy, out, gate, seed):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.TensorDataset(torch.randn(40, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        gate = Path(f"{gate} {seed}")
        holds = "begun" in gate.name and not gate.exists()
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            for step, (x,) in run.steps(STEPS, loader):
                loss = (model(x + torch.randn(4, 4) / 9) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
                while holds and step == HOLD:
                    gate.touch()
                    if run.is_stopping:
                        break
                    time.sleep(0.02)
        torch.save(model.state_dict(), Path(out, "weights.pt"))
""".replace("STEPS", str(STEPS)).replace("HOLD", str(HOLD))
TRAIN = """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        from model import train
        train(cfg.resilience, HydraConfig.get().runtime.output_dir, cfg.gate, cfg.seed)

    if __name__ == "__main__":
        main()
"""
POLICY = """
    shutdown: {timeout_s: 20}
    requeue: {max_unfair: 4}
    hang: {factor: 7.0, min_s: 200}
    checkpoint: {every_steps: 10, every_s: null, on_foreign: ignore}
    health:
      checks:
        disk: {action: halt, threshold: 0.0}
        shm: {threshold: 0.1}
        ecc: {action: refuse, timeout_s: 30}
        straggler: {threshold: 0.5}
"""
KEPT = """
    shutdown: {timeout_s: 20}
    checkpoint: {every_steps: 10, every_s: null}
"""
"""Without keys that have been removed since: what a user has after correcting the config."""
CONF = """
    defaults: [{{resilience: default}}, _self_]
    seed: 3
    gate: none
    resilience: {policy}
      slurm: {{partition: low, timeout_min: 10}}
"""
SUBMIT = """
    import sys
    import submitit
    import yaml
    import forge
    from model import train

    folder, gate, policy, run_policy = sys.argv[1:]
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(time=10, partition="low")
    job = f"{folder}/job"
    task = forge.Checkpointable(train, yaml.safe_load(policy), job)
    print(executor.submit(task, yaml.safe_load(run_policy), job, gate, 3).job_id)
"""
COUNT = """
    import os, signal, sys, time
    from pathlib import Path

    out, leaving = Path(os.environ["FORGE_JOB_DIR"]), []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    state = out / "state"
    first = not state.exists()
    step = 0 if first else int(state.read_text())
    while step < STEPS and not leaving:
        step += 1
        with open(out / "steps.txt", "a") as file:
            file.write(f"{step}\\n")
        while "begun 3" in sys.argv[1] and step == HOLD and first and not leaving:
            Path(sys.argv[1]).touch()
            time.sleep(0.02)
    state.write_text(str(step))
""".replace("STEPS", str(STEPS)).replace("HOLD", str(HOLD))
OTHERS = ("exec", "script", "submitit")
EXEC_KEYS = ("resilience.requeue.max_unfair=4", "resilience.hang.factor=7")


class Row(NamedTuple):
    """One line of the table."""

    job: str
    waited: str
    state: str
    restarts: str
    resumed_at: str
    notices: str
    result: str


class Upgrade:
    """The user's folder, the environment whose forge is replaced, and the jobs."""

    def __init__(self, folder: Path, cluster: Cluster, revision: str) -> None:
        self.folder, self.cluster = folder, cluster
        self.tree, self.app, self.gates = folder / "tree", folder / "app", folder / "gates"
        archive = subprocess.check_output(["git", "archive", revision, *FORGE], cwd=ROOT)
        ancestor = ["git", "merge-base", "--is-ancestor", revision, BEFORE_LESS]
        self.has_removed_keys = subprocess.run(ancestor, cwd=ROOT).returncode == 0
        self.policy = POLICY if self.has_removed_keys else KEPT
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self.tree, filter="data")
        (self.tree / "conf").rename(self.tree / "forge" / "conf")  # where a wheel has it
        self.python = environment_of(self.tree, folder / "environment")
        self.app.mkdir()
        self.gates.mkdir()
        files = {"model.py": MODEL, "train.py": TRAIN, "submit.py": SUBMIT, "count.py": COUNT}
        for name, text in files.items():
            (self.app / name).write_text(textwrap.dedent(text))
        for name, policy in (("conf", self.policy), ("kept", KEPT)):
            group = textwrap.indent(textwrap.dedent(policy).rstrip(), "  ")
            text = textwrap.dedent(CONF).format(policy=group)
            (self.app / f"{name}.yaml").write_text(text)
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment = outer | cluster.environment
        self.environment["PATH"] = f"{Path(self.python).parent}:{cluster.environment['PATH']}"
        self.environment |= {"PYTHONPATH": str(self.app), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment.pop("VIRTUAL_ENV", None)
        self.numbers: dict[str, str] = {}
        """Slurm's numbers of the jobs that no launcher has submitted."""
        self.problems: list[str] = []

    # -- with the earlier version ------------------------------------------------------------------

    def run(self, *command: str, code: int = 0) -> str:
        """A command of the user's, to its end; what it printed."""
        done = subprocess.run(
            command,
            cwd=self.app,
            env=self.environment,
            text=True,
            timeout=300,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == code, f"{command}:\n{done.stdout}"
        return done.stdout

    def sweep(self, name: str, *overrides: str) -> list[str]:
        """The command of a sweep."""
        words = [self.python, "train.py", "-m", f"gate={self.gates / name}", *overrides]
        return [*words, f"hydra.sweep.dir={self.folder / name}", "hydra.launcher.progress=plain"]

    def submit(self, when: str) -> None:
        """One of each kind; `when`: begun | waiting."""
        on_slurm = ("hydra/launcher=slurm", "hydra.launcher.wait=false")
        self.run(*self.sweep(f"sweep {when}".replace(" ", "_"), *on_slurm, "seed=3,4"))
        place = [
            f"hydra.sweep.dir={self.folder / f'exec_{when}'}",
            "resilience.slurm.partition=low",
        ]
        keys = EXEC_KEYS if self.has_removed_keys else ()
        words = ["-m", "forge", "exec", *on_slurm, *place, *keys]
        gate = str(self.gates / f"exec_{when} 3")
        self.run(self.python, *words, "--", self.python, str(self.app / "count.py"), gate)
        name = "conf" if when == "begun" else "kept"  # a start reads the user's own config
        script = f"{self.python} train.py --config-name {name} gate={self.gates / f'script_{when}'}"
        self.numbers[f"script_{when}"] = self._by_hand(script, f"script_{when}")
        texts = [textwrap.dedent(self.policy), textwrap.dedent(KEPT)]
        arguments = [str(self.folder / f"submitit_{when}"), str(self.gates / f"submitit_{when}")]
        lines = self.run(self.python, "submit.py", *arguments, *texts).split()
        self.numbers[f"submitit_{when}"] = lines[-1]

    def _by_hand(self, command: str, name: str) -> str:
        logs = self.folder / f"{name}_log"
        logs.mkdir()
        script = logs / "job.sh"
        script.write_text(f"#!/bin/sh\n{command} hydra.run.dir={self.folder / name}\n")
        options = ["--partition=low", "--open-mode=append", f"--output={logs}/%j.out"]
        return self.run("sbatch", "--parsable", *options, str(script)).strip()

    def stop_local(self) -> str:
        """A sweep on this machine, stopped in the middle; the command that goes on."""
        launcher = ("hydra/launcher=local", "hydra.launcher.n_jobs=2")
        words = self.sweep("local_begun", *launcher, "seed=3,4")
        output = self.folder / "local.txt"
        process = Process(words, output, self.app, subprocess.Popen, **self.environment)
        for seed in "34":
            gate = self.gates / f"local_begun {seed}"
            wait_for(gate.exists, f"local sweep, seed {seed}", 120)
        process.signal(signal.SIGTERM)
        process.wait()
        return process.output

    def begin(self) -> None:
        """Everything that starts with the earlier version, until it waits."""
        for seed in "34":
            place = f"hydra.run.dir={self.folder / 'undisturbed'}_{seed}"
            self.run(self.python, "train.py", place, f"seed={seed}")
        self.submit("begun")
        self.local_output = self.stop_local()
        for name in ("sweep_begun 3", "sweep_begun 4", *(f"{one}_begun 3" for one in OTHERS)):
            wait_for((self.gates / name).exists, f"{name} at its step", 180)
        self.cluster.run("scontrol", "update", "PartitionName=low", "State=DOWN")
        self.submit("waiting")
        for node in ("n1", "n2"):
            urgent(self.cluster, self.folder, f"--nodelist={node}")
        queue = ["squeue", "--noheader", "--array", "--partition=low", "--format=%T"]
        is_waiting = lambda: self.cluster.run(*queue).split() == ["PENDING"] * 10  # noqa: E731
        try:
            wait_for(is_waiting, "queue of ten jobs", 240)
        finally:
            print(self.cluster.run("squeue", "--array", "--format=%i %P %T %r %j"), flush=True)

    # -- with this version -------------------------------------------------------------------------

    def replace(self) -> None:
        """Install forge as the working tree has it."""
        shutil.rmtree(self.tree)
        for name in FORGE:
            place = "forge/conf" if name == "conf" else name
            ignored = shutil.ignore_patterns("*.pyc", *(["conf"] if name == "forge" else []))
            shutil.copytree(ROOT / name, self.tree / place, ignore=ignored)

    def go_on(self) -> None:
        """Let the queue run, and start the local sweep again as its user does."""
        self.cluster.run("scontrol", "update", "PartitionName=low", "State=UP")
        words = command_in(self.local_output)
        self.local_output = self.run(*words[words.index("&&") + 1 :])
        queue = ["squeue", "--noheader", "--partition=low"]
        wait_for(lambda: not self.cluster.run(*queue).strip(), "end of all jobs", 400)

    def swept(self, name: str) -> list[SlurmJob]:
        """The two jobs of a sweep."""
        return [SlurmJob(self.cluster, self.folder / name / number) for number in "01"]

    def rows(self) -> list[Row]:
        """What became of each."""
        found = []
        for when, waited in (("begun", "preempted after a save"), ("waiting", "not started yet")):
            for seed, job in zip("34", self.swept(f"sweep_{when}"), strict=True):
                result = self._compared(job, seed)
                found.append(self._row(f"sweep, seed {seed}", waited, job.slurm_id, job, 1, result))
            job = SlurmJob(self.cluster, self.folder / f"exec_{when}" / "0")
            lines = _read(job.directory / "steps.txt").split()
            result = "IDENTICAL" if lines == [str(n + 1) for n in range(STEPS)] else "DIFFERENT"
            # Nothing of its policy but the plan is read in the job, which is without a notice.
            found.append(self._row("forge exec", waited, job.slurm_id, job, 0, result))
            for kind in ("script", "submitit"):
                name = f"{kind}_{when}"
                one = SweptJob(self.folder / name / ("job" if kind == "submitit" else ""))
                num = 0 if name == "script_waiting" else 1  # it has no stored policy yet
                result, number = self._compared(one, "3"), self.numbers[name]
                found.append(self._row(kind, waited, number, one, num, result))
        for seed, name in zip("34", "01", strict=True):
            one = SweptJob(self.folder / "local_begun" / name)
            result = self._compared(one, seed)
            found.append(self._row(f"local sweep, seed {seed}", "stopped", "", one, 1, result))
        return found

    def _compared(self, job: SweptJob, seed: str) -> str:
        try:
            assert_same_job(job, SweptJob(self.folder / f"undisturbed_{seed}"))
        except AssertionError:
            return "DIFFERENT"
        except FileNotFoundError:
            return "no weights"
        return "IDENTICAL"

    def _row(
        self, kind: str, waited: str, number: str, job: SweptJob, num_notices: int, result: str
    ) -> Row:
        """A line of the table; remembers what is wrong in it."""
        num_notices *= self.has_removed_keys
        if number:
            shown = self.cluster.show(number)
            state, restarts = shown["JobState"], shown["Restarts"]
        else:
            state, restarts = str(job.state.get("state")).replace("finished", "COMPLETED"), "-"
        logs = [job.directory / "output.log", *job.directory.parent.glob("*_log.err")]  # submitit's
        logs += job.directory.with_name(f"{job.directory.name}_log").glob("*.out")  # sbatch's
        text = "".join(map(_read, logs))
        resumed = re.findall(r"resumes at step (\d+)", text)
        notices = text.count(NOTICE) if number else self.local_output.count(NOTICE) // 2
        row = Row(kind, waited, state, restarts, ", ".join(resumed) or "-", str(notices), result)
        if (state, result, notices) != ("COMPLETED", "IDENTICAL", num_notices):
            expected = f"COMPLETED, {num_notices} notices, IDENTICAL"
            self.problems.append(f"{kind} ({waited}): {row[2:]}, expected {expected}\n{text}")
        return row


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("revision", nargs="?", default=BEFORE_LESS)
    parser.add_argument("--keep", type=Path, help="a folder for all files, instead of a temporary")
    arguments = parser.parse_args()
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory(prefix="forge-upgrade-") as name:
        folder = arguments.keep or Path(name)
        cluster = Cluster(folder / "slurm")
        try:
            upgrade = Upgrade(folder, cluster, arguments.revision)
            upgrade.begin()
            upgrade.replace()
            upgrade.go_on()
            rows = upgrade.rows()
        finally:
            cluster.stop()
    header = [one.replace("_", " ") for one in Row._fields]
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    for problem in upgrade.problems:
        print(f"\n{problem}")
    return 1 if upgrade.problems else 0


if __name__ == "__main__":
    sys.exit(main())
