"""Training in which a rank stands still, in a section and in a manner of one's choice.

`hang.where` is a section of the Run, `hang.how` what it stands in, `hang.rank` who does, and
`hang.times` in how many of the job's attempts. With `hang.ddp=false` ranks meet where forge has
them meet, and nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranked_apps import RankedSwept
from sweeps import App

from forge.process import processes

TIMEOUT_S = 4.0
"""What a section may take here: a busy machine must not be taken for a hang."""

TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import forge

    if "-m" not in sys.argv or "FORGE_JOB_TOKEN" in os.environ:
        import torch  # the launcher can do without: a second of each test
        from torch.nn.parallel import DistributedDataParallel

    RESTARTS = int(os.environ.get("FORGE_RESTART_COUNT", 0))
    NUM_RANKS = int(os.environ.get("FORGE_RANKS", 1))
    RANK = int(os.environ.get("FORGE_RANK", 0))

    def misbehave(cfg, step):
        pass

    def stand_lock():
        import threading
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # the line

    def stand_pipe():
        os.read(os.pipe()[0], 1)  # the line

    def stand_gil():
        import ctypes
        while True:
            ctypes.PyDLL(None).sleep(600)  # the line

    def stand_slow():  # until the test has seen what it wants to see
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.01)  # the line

    def stand(cfg, where, step=None):
        at = cfg.hang.at if step is None else step
        if where != cfg.hang.where or at != cfg.hang.at or RANK != cfg.hang.rank:
            return
        if RESTARTS < cfg.hang.times:
            out = Path(os.environ["FORGE_JOB_DIR"])
            (out / f"stands {RESTARTS}").write_text(str(os.getpid()))
            globals()[f"stand_{cfg.hang.how}"]()

    class Planted:
        \"\"\"Whose state is never there.\"\"\"

        def __init__(self, cfg):
            self.cfg = cfg
            self.step = 0

        def state_dict(self):
            stand(self.cfg, "save", self.step)
            return {}

        def load_state_dict(self, state):
            pass

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        if NUM_RANKS > 1:
            forge.distributed.init()
        torch.manual_seed(cfg.seed)
        nn = torch.nn
        net = model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        if NUM_RANKS > 1 and cfg.hang.ddp:
            model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
        torch.manual_seed(cfg.seed + RANK * cfg.hang.ddp)
        out = Path(os.environ["FORGE_JOB_DIR"])
        planted = Planted(cfg)
        with forge.Run(
            cfg.resilience, model=model, optimizer=optimizer, planted=planted
        ) as run:

            @run.every(10)
            def evaluate(step):
                stand(cfg, "evaluation", step)

            stand(cfg, "start_up")
            for step in run.steps(cfg.steps):
                misbehave(cfg, step)
                stand(cfg, "step", step)
                planted.step = step + 1
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                run.update(loss, optimizer, clip_norm=1.0)
                run.log(loss=loss)
        torch.save(net.state_dict(), out / f"weights_{RANK}.pt")
        return run.step

    if __name__ == "__main__":
        main()
"""
CONF = f"""
    defaults: [{{resilience: default}}, _self_]
    lr: 0.1
    seed: 3
    steps: 40
    hang: {{where: nowhere, how: lock, at: 30, rank: 0, times: 1, ddp: true}}
    resilience:
      shutdown: {{timeout_s: 20}}
      checkpoint: {{every_steps: 10, every_s: null}}
      health: {{enabled: false}}
      hang: {{action: restart, timeout_s: {TIMEOUT_S}, start_s: {TIMEOUT_S}}}
"""

COMPILES = """
    if step >= 20 and step % 2 == 0 and RANK == 0:
        def slow(graph, inputs):
            time.sleep(3)
            Path(os.environ["FORGE_JOB_DIR"], f"compiled {step}").touch()
            return graph
        own = {}  # what was compiled before is not compiled again
        exec(f"def shifted(x): return x + {step}", own)
        torch.compile(own["shifted"], backend=slow)(torch.zeros(3))
"""
"""Of rank 0: ten, each longer than a step may be. Of `misbehave`."""


class HangingApp(App):
    """The folder, and the sweeps started in it."""

    def __init__(self, folder: Path, tasks: int = 1, misbehave: str = "") -> None:
        train = TRAIN
        if "torch.compile" in misbehave:  # these come too late where `quick` puts them off
            now = "import torch._prims; torch.compile(abs)\n        from torch.nn.parallel"
            train = train.replace("from torch.nn.parallel", now)
        super().__init__(folder, train, CONF, misbehave)
        self.tasks = tasks

    def command(self, *overrides: str) -> list[str]:
        more = [f"hydra.launcher.tasks_per_job={self.tasks}"] if self.tasks > 1 else []
        return [*super().command(*overrides), *more]

    def job(self, name: str | int) -> HangingJob:
        return HangingJob(self.sweep_dir / str(name))

    def line(self, how: str) -> str:
        """Where `hang.how` stands, as a message has it."""
        path = self.folder / "train.py"
        lines = path.read_text().splitlines()
        first = lines.index(f"def stand_{how}():")
        number = next(n for n, text in enumerate(lines[first:], first) if "# the line" in text)
        return f"{path}:{number + 1} in stand_{how}"


class HangingJob(RankedSwept):
    """One job, seen from outside."""

    @property
    def hangs(self) -> list[dict]:
        """What its ledger says of them."""
        return self.events("hang")

    def summary(self, number: int = 1) -> dict:
        return json.loads((self.directory / f"hangs/{number}/summary.json").read_text())

    def stacks(self, rank: int, number: int = 1) -> str:
        return (self.directory / f"hangs/{number}/rank_{rank}.txt").read_text()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """By a signal, until the end of the block."""
    assert processes.send(pid, signal.SIGSTOP)
    yield
    assert processes.send(pid, signal.SIGCONT)


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """As by a debugger whose user thinks, until the end of the block."""
    attach, detach, wait_all = 16, 17, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(attach, pid, 0, 0) != 0:
        pytest.skip("ptrace is not allowed here")
    os.waitpid(pid, wait_all)
    yield
    libc.ptrace(detach, pid, 0, 0)
