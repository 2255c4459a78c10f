"""What forge adds to each step of a tiny model with Lightning, in microseconds of CPU.

    python benchmarks/lightning_step.py [--steps N] [--rounds N]

As `step.py`: each loop is a process of its own, they take turns, and medians are printed. The
package is that of `make test`, or an installed one.

    Trainer               a step that logs its loss, without a logger, without checkpoints
    ForgeCallback         the same, with signals, saves, the NaN policy and the place in the data
    Trainer, stream       the same with an IterableDataset, of which a batch is fetched ahead
    ForgeCallback, stream
"""

from __future__ import annotations

from step import compare

_TRAINING = """
import logging, os, sys, time
sys.path.append(os.path.join(sys.prefix, "lightning", "site-packages"))
import torch
import lightning.pytorch as pl
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
torch.manual_seed(0)
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
calls = 0

def wait():
    # CPU seconds of the steps since the last turn, then until the next turn.
    global began
    print("CPU", time.process_time() - began, flush=True)
    sys.stdin.readline() or os._exit(0)
    began = time.process_time()

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        global calls
        if calls % count == 0:
            wait()
        calls += 1
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)

began = time.process_time()
data = torch.randn(64 * 500, 16)
loader = torch.utils.data.DataLoader(Stream() if "stream" in kind else data, 64)
callbacks = []
if kind.startswith("Forge"):
    from forge.integrations.lightning import ForgeCallback
    resume = ForgeCallback({"checkpoint": {"dir": folder + "/checkpoints"}})
    loader, callbacks = resume.loader(loader), [resume]
pl.Trainer(
    max_steps=10**8, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
).fit(Module(), loader)
"""

BESIDE = {
    "Trainer": None,
    "ForgeCallback": "Trainer",
    "Trainer, stream": None,
    "ForgeCallback, stream": "Trainer, stream",
}
"""Each loop, and the one that it is compared with."""


if __name__ == "__main__":
    compare(__doc__, _TRAINING, BESIDE, 200)
