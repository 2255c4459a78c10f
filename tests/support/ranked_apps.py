"""A user's training on several ranks, swept over by `hydra/launcher=local` and `=slurm`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from harness import assert_same_bits, until
from sweeps import App, SweptJob

from forge.jobdir import ledger

TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    import forge

    if "-m" not in sys.argv or "FORGE_JOB_TOKEN" in os.environ:
        import torch  # the launcher can do without: a second of each test
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    RESTARTS = int(os.environ.get("FORGE_RESTART_COUNT", 0))

    def misbehave(cfg, step):
        pass

    def hold(out, run, step, rank):
        \"\"\"Until a stop is asked for, or the test lets it go: on every rank, or on some.\"\"\"
        file = Path(__file__).with_name(f"hold {out.name}")
        asked = file.read_text().split() if file.exists() else []
        if asked[RESTARTS : RESTARTS + 1] == [str(step)]:
            (out / f"holds {RESTARTS} {rank}").write_text(str(os.getpid()))
            while file.exists() and not run.is_stopping:
                time.sleep(0.01)

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        world = forge.distributed.init()
        torch.manual_seed(cfg.seed)
        nn = torch.nn
        net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
        torch.manual_seed(cfg.seed + world.rank)
        out = Path(HydraConfig.get().runtime.output_dir)
        with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
            for step, (x, y) in run.steps(cfg.steps, loader):
                hold(out, run, step, world.rank)
                misbehave(cfg, step)
                loss = (model(x) - y).square().mean()
                loss.backward()
                run.update(loss, optimizer, clip_norm=1.0)
                run.log(loss=loss)
        torch.save(model.state_dict(), out / f"weights_{world.rank}.pt")
        return world.rank, world.size, run.step

    if __name__ == "__main__":
        main()
"""


class RankedApp(App):
    """The folder, and the sweeps started in it."""

    def __init__(self, folder: Path, tasks: int = 2, misbehave: str = "") -> None:
        super().__init__(folder, TRAIN, misbehave=misbehave)
        self.tasks = tasks

    def command(self, *overrides: str) -> list[str]:
        return [*super().command(*overrides), f"hydra.launcher.tasks_per_job={self.tasks}"]

    def job(self, name: str | int) -> RankedSwept:
        return RankedSwept(self.sweep_dir / str(name))


class RankedSwept(SweptJob):
    """One job of several ranks, seen from outside."""

    def weights_of(self, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(self.directory / f"weights_{rank}.pt", weights_only=True)

    def held(self, restarts: int = 0, size: int = 2) -> list[int]:
        """The pid of each rank, once all of them stand at their step."""
        paths = [self.directory / f"holds {restarts} {rank}" for rank in range(size)]
        until(lambda: all(p.exists() and p.read_text() for p in paths), f"{size} ranks to hold")
        return [int(path.read_text()) for path in paths]

    def events(self, kind: str) -> list[dict]:
        """Of the job's own ledger."""
        path = self.directory / ".forge/ledger/job.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    @property
    def repeated(self) -> list[int]:
        """Steps that each start after the first has done again."""
        attempts = ledger.read(self.directory).attempts
        starts = [e for one in attempts for e in one.events if e["kind"] == "start"][1:]
        return [e["previous_step"] - e["step"] for e in starts]


def assert_same_ranks(job: RankedSwept, undisturbed: RankedSwept, size: int = 2) -> None:
    """The same final bits on every rank, and the same metrics at every step."""
    for rank in range(size):
        assert_same_bits(job.weights_of(rank), undisturbed.weights_of(rank))
    assert job.metrics == undisturbed.metrics
