"""A job of the sweeps in tests/proofs/chaos_sweeps.py: trains a little and shows signs of life.

Every attempt keeps a file `<job dir>/lives/<pid>` with two times of CLOCK_MONOTONIC: when its
process began to run this module, and when it was last alive. Attempts of one job must not overlap.
"""

import time

BEGAN = time.monotonic()  # before the imports that take long

import os  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

import hydra  # noqa: E402
import torch  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from small import Points  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import forge  # noqa: E402


def show_signs_of_life(folder):
    """From now on a thread writes, a hundred times a second, that this process runs."""
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / f"{os.getpid()}-{BEGAN:.6f}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def beat():
        while True:
            os.pwrite(fd, f"{BEGAN:.6f} {time.monotonic():.6f}".encode(), 0)
            time.sleep(0.01)

    threading.Thread(target=beat, daemon=True).start()


@hydra.main(version_base=None, config_path=".", config_name="sweep")
def main(cfg):
    output = Path(HydraConfig.get().runtime.output_dir)
    show_signs_of_life(output / "lives")
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    # The workers' random draws are what is hardest to repeat.
    loader = DataLoader(Points(augment=True), batch_size=5, shuffle=True, num_workers=cfg.workers)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for _step, (x, y) in run.steps(cfg.steps, loader):
            loss = (model(x) - y).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
            time.sleep(cfg.step_s)
    torch.save(model.state_dict(), output / "weights.pt")


if __name__ == "__main__":
    main()
