"""A user's folder with an app, run as a sweep of real processes by `hydra/launcher=local`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import torch
import warm
from harness import FORGE, Process, until

from forge.jobdir import ledger, ledger_writer
from forge.jobdir.job_files import LOCK, PLAN, STATE, TOKEN, forge_dir, job_ledger, read_json
from forge.process import processes

TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import forge

    if "hydra/launcher=local" not in sys.argv or "FORGE_JOB_TOKEN" in os.environ:
        import torch  # the launcher can do without: a second of each test

    RESTARTS = int(os.environ.get("FORGE_RESTART_COUNT", 0))

    def misbehave(cfg, step):
        pass

    def hold(out, run, step):
        \"\"\"Until a stop is asked for, or the test lets it go.\"\"\"
        file = Path(__file__).with_name(f"hold {out.name}")
        steps = file.read_text().split() if file.exists() else []
        while steps[RESTARTS : RESTARTS + 1] == [str(step)] and file.exists():
            if run.is_stopping:
                break
            time.sleep(0.01)

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        torch.manual_seed(cfg.seed)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
        out = Path(HydraConfig.get().runtime.output_dir)
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step in run.steps(cfg.steps):
                hold(out, run, step)
                misbehave(cfg, step)
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
                time.sleep(cfg.step_s)
        torch.save(model.state_dict(), out / "weights.pt")
        return run.step  # not the loss: a job stopped after its last step has none

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 0.1
    seed: 3
    steps: 40
    step_s: 0.01
    resilience:
      shutdown: {timeout_s: 20}
      checkpoint: {every_steps: 10, every_s: null}
"""


class App:
    """The user's folder, and the sweeps started in it."""

    popen = partial(warm.Popen, is_parent=True)

    def __init__(self, folder: Path, train: str = TRAIN, conf: str = CONF, misbehave: str = ""):
        self.folder = folder
        self.sweep_dir = folder / "sweep"
        self.started: list[Process] = []
        folder.mkdir()
        text = textwrap.dedent(train)
        if misbehave:
            body = textwrap.indent(textwrap.dedent(misbehave).strip(), "    ")
            text = text.replace(
                "def misbehave(cfg, step):\n    pass", "def misbehave(cfg, step):\n" + body
            )
            assert body in text
        (folder / "train.py").write_text(text)
        (folder / "conf.yaml").write_text(textwrap.dedent(conf))

    def hold(self, job: str | int, *steps: int) -> None:
        """Let a job of TRAIN wait in a step for a stop; one step for each start of the job."""
        (self.folder / f"hold {job}").write_text(" ".join(map(str, steps)))

    def command(self, *overrides: str) -> list[str]:
        return [
            sys.executable,
            "train.py",
            "-m",
            "hydra/launcher=local",
            "hydra.launcher.progress=plain",
            f"hydra.sweep.dir='{str(self.sweep_dir).replace(chr(39), chr(92) + chr(39))}'",
            *overrides,
        ]

    def start(self, *overrides: str, **env: str) -> Process:
        output = self.folder / "sweep.txt"
        self.started.append(
            Process(self.command(*overrides), output, self.folder, self.popen, **env)
        )
        return self.started[-1]

    def forge(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run a command of forge; returns its output."""
        done = warm.run(
            [sys.executable, FORGE, *arguments],
            cwd=self.folder,
            env=os.environ | env,
            text=True,
            timeout=250,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            is_parent=True,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def close(self) -> None:
        """End the launchers of a failed test; jobs without a launcher end by themselves."""
        for process in self.started:
            if process.popen.poll() is None:
                process.signal(signal.SIGKILL)
                process.wait()

    def run(self, *overrides: str, **env: str) -> subprocess.CompletedProcess:
        return warm.run(
            self.command(*overrides),
            cwd=self.folder,
            text=True,
            timeout=280,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
            is_parent=True,
        )

    def finish(self, *overrides: str) -> str:
        """Run a sweep that has to succeed; returns its output."""
        done = self.run(*overrides)
        logs = "".join(path.read_text() for path in self.sweep_dir.glob("*/output.log"))
        assert done.returncode == 0, done.stdout + logs
        return done.stdout

    def go_on(self, output: str, **how: bool) -> subprocess.CompletedProcess:
        """Run the printed resume command."""
        return warm.run_printed(output, **how)

    def job(self, name: str | int) -> SweptJob:
        return SweptJob(self.sweep_dir / str(name))


class SweptJob:
    """One job of a sweep, seen from outside."""

    def __init__(self, directory: Path):
        self.directory = directory

    @property
    def state(self) -> dict:
        return read_json(forge_dir(self.directory) / STATE) or {}

    @property
    def token(self) -> str:
        return (read_json(forge_dir(self.directory) / PLAN) or {"token": "none yet"})["token"]

    @property
    def output(self) -> str:
        return (self.directory / "output.log").read_text(errors="replace")

    @property
    def wrapper(self) -> int:
        return self.state["pid"]

    @property
    def supervisor(self) -> int:
        return processes.descendants(self.wrapper)[0]

    @property
    def task(self) -> int:
        return processes.descendants(self.wrapper)[1]

    def kill(self, kind: str, number: int = signal.SIGKILL) -> None:
        assert processes.send(getattr(self, kind), number)

    @property
    def step(self) -> int:
        progress = ledger.read_progress(self.directory)
        return progress.step if progress else -1

    @property
    def attempts(self) -> int:
        return len(ledger_writer.shares(self.directory))

    def wait_for_step(self, step: int) -> None:
        until(lambda: self.step >= step, f"step {step} of {self.directory}")

    def wait_for_attempt(self, number: int) -> None:
        def has_begun() -> bool:
            progress = ledger.read_progress(self.directory)
            return progress is not None and progress.attempt >= number

        until(has_begun, f"attempt {number} of {self.directory}")

    @property
    def told(self) -> list[dict]:
        """The wrapper's events in the job's ledger."""
        lines = job_ledger(self.directory).read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def marked(self) -> list[int]:
        """pids of live processes with this job's mark in their environment."""
        return processes.marked(TOKEN, self.token)

    def is_free(self) -> bool:
        """Whether the job has no live process, and its lock is free."""
        import fcntl

        with (forge_dir(self.directory) / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return not self.marked

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.directory / "weights.pt", weights_only=True)

    @property
    def metrics(self) -> dict:
        return ledger.read(self.directory).metrics


def command_in(text: str) -> list[str]:
    """The last resume command in an output, as a list of words."""
    line = next(one for one in reversed(text.splitlines()) if one.strip().startswith("cd "))
    return shlex.split(line.strip())


def assert_same_job(job: SweptJob, undisturbed: SweptJob) -> None:
    """Assert equal final bits, and equal metrics at every step."""
    one, other = job.weights, undisturbed.weights
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
    assert job.metrics == undisturbed.metrics
