"""A Lightning script as jobs on a cluster, preempted and killed, on one rank and on two."""

import contextlib

import pytest
import torch
import warm
from cluster import wait_for
from slurm_apps import SlurmApp, table, urgent

from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TRAIN = """
    import os, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    if "FORGE_JOB_TOKEN" in os.environ:
        import lightning.pytorch as pl
        import torch
        from forge.integrations.lightning import ForgeCallback
        from forge.shutdown import stopping
        from torch.utils.data import DataLoader, TensorDataset

        class Module(pl.LightningModule):
            def __init__(self, cfg):
                super().__init__()
                self.cfg, self.net = cfg, torch.nn.Linear(8, 1)

            def training_step(self, batch, batch_idx):
                if (self.current_epoch, batch_idx) == (1, 3):
                    self.hold()
                loss = (self.net(batch[0]) + 0.1 * torch.randn(1)).square().mean()
                self.log("loss", loss, on_epoch=True)
                return loss

            def hold(self):
                rank, kind = self.global_rank, self.cfg.kind
                number = len(list(Path(self.cfg.gates).glob(f"{kind} rank {rank} *")))
                Path(self.cfg.gates, f"{kind} rank {rank} {number}").touch()
                while number < self.cfg.holds.get(kind, 0) and not stopping.is_stopping():
                    time.sleep(0.02)

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"},
                }

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        torch.set_num_threads(1)
        pl.seed_everything(1)
        out = Path(HydraConfig.get().runtime.output_dir)
        loader = DataLoader(TensorDataset(torch.randn(80, 8)), 4, shuffle=True)
        module, resume = Module(cfg), ForgeCallback(cfg.resilience)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", devices=cfg.ranks.get(cfg.kind, 1),
            strategy="ddp" if cfg.kind in cfg.ranks else "auto", num_nodes=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[resume],
        )
        trainer.fit(module, resume.loader(loader))
        torch.save(
            [module.state_dict(), trainer.optimizers[0].state_dict(), torch.rand(3)],
            out / f"ended {trainer.global_rank}.pt",
        )

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    kind: ???
    gates: ???
    holds: {}
    ranks: {}
    resilience:
      shutdown: {timeout_s: 20}
      checkpoint: {every_steps: 10, every_s: null}
      health: {enabled: false}
      slurm:
        partition: low
        nodelist: n1
        tasks_per_node: ${oc.select:ranks.${kind},1}
"""
PAIRS = {"preempted": "plain", "killed": "plain", "preempted_ranks": "plain_ranks"}


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    """All jobs at once; the preemption comes last, since it ends every one on the node."""
    packages = warm.PACKAGES["lightning"]
    with contextlib.closing(
        SlurmApp(cluster, tmp_path_factory.mktemp("jobs") / "app", TRAIN, CONF)
    ) as app:
        sweep = app.start(
            f"kind={','.join([*PAIRS, *set(PAIRS.values())])}",
            f"++holds={table(killed=1, preempted=1, preempted_ranks=1)}",
            f"++ranks={table(preempted_ranks=2, plain_ranks=2)}",
            PYTHONPATH=packages,
        )
        for gate in ("killed rank 0 0", "preempted rank 0 0", "preempted_ranks rank 1 0"):
            app.wait_for_gate(gate, sweep)
        found = app.jobs()
        assert processes.send(found["killed"].task, 9)
        app.wait_for_gate("killed rank 0 1", sweep)
        done = [found[kind].directory / "ended 0.pt" for kind in ("killed", *PAIRS.values())]
        wait_for(lambda: all(path.exists() for path in done), "end of the others", 200)
        urgent(cluster, app.folder, "--nodelist=n1")
        assert sweep.wait(timeout_s=280) == 0, sweep.output
        yield found


@pytest.mark.parametrize("kind", PAIRS)
def test_it_ends_with_the_same_bits(kind, jobs):
    """Weights, optimizer, and the next random numbers, of every rank."""
    job, whole = jobs[kind], jobs[PAIRS[kind]]
    names = sorted(path.name for path in whole.directory.glob("ended *.pt"))
    assert len(names) == (2 if "ranks" in kind else 1)
    for name in names:
        one, other = (torch.load(each.directory / name) for each in (job, whole))
        assert str(one) == str(other)
        pairs = zip(one[0].values(), other[0].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("kind", ["preempted", "preempted_ranks"])
def test_a_preemption_is_requeued_once_by_forge_alone(kind, jobs):
    """Lightning's own requeue would be a second one."""
    job = jobs[kind]
    assert job.restarts == 1
    assert job.counts["preemptions"] == 1
    assert "Lightning's signal handlers and requeue of the Slurm job" in job.output


def test_a_kill_starts_it_again_from_its_last_checkpoint(jobs):
    job = jobs["killed"]
    assert job.counts["failures"] == 1
    assert job.state["state"] == "finished"
