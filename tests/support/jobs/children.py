"""A job with children of its own, forked and spawned: python children.py <dir> '{"kind": …}'"""

import hashlib
import json
import multiprocessing
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.shutdown import stopping
from forge.shutdown.forked_children import ForkedChildren

directory, kind = Path(sys.argv[1]), json.loads(sys.argv[2])["kind"]
FORK = multiprocessing.get_context("fork")


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(2)


def c_call(count):
    """No handler runs meanwhile."""
    (directory / "ready").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", count)


def pause(_):
    time.sleep(0.02)


def wait_for_ever(_):
    while True:
        time.sleep(60)


def loaded(loader):
    for _ in loader:
        (directory / "ready").touch()


def called(pool):
    list(pool.map(c_call, [600_000] * 2))


def stopped(pool):
    """Longer than the parent is stopped."""
    list(pool.map(c_call, [1_500_000] * 2))


def held(pool):
    both = pool.map(pause, range(40))
    (directory / "ready").touch()
    max(range(10_000_000))  # holds the GIL
    list(both)


def terminated(_):
    """Python's part of a handler never runs here; nor if a lock is waited for at that moment."""
    child = FORK.Process(target=c_call, args=(1_000_000_000,))
    child.start()
    while not (directory / "ready").exists():
        time.sleep(0.01)
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM


def forked(_):
    """A child that has just been forked as the signal comes, and is slower than its parent."""
    child = FORK.Process(target=time.sleep, args=(1,))
    child.start()
    child.join()
    assert child.exitcode == 0


def be_slow():
    """Runs in that child before forge adopts it, with all signals blocked."""
    (directory / "ready").touch()
    while not (directory / "heard").exists():
        time.sleep(0.01)


def tell_when_stopping():
    while not stopping.is_stopping():
        time.sleep(0.01)
    (directory / "heard").touch()


def daemon(_):
    with forge.block_signals():
        FORK.Process(target=wait_for_ever, args=(0,), daemon=True).start()


def persistent(loader):
    with forge.block_signals():
        iterator = iter(loader)
    list(iterator)


def main():
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(directory / "checkpoints")}}
    with forge.Run(policy, model=model) as run:
        global kept  # until the interpreter's end
        if kind == "loaded":
            kept = DataLoader(Slow(), batch_size=2, num_workers=2)
        elif kind == "persistent":
            data = TensorDataset(torch.ones(8, 2))
            kept = DataLoader(
                data, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
            )
        elif kind == "forked":
            kept, adopt = None, ForkedChildren.adopt
            ForkedChildren.adopt = lambda self: (be_slow(), adopt(self))
            threading.Thread(target=tell_when_stopping, daemon=True).start()
        else:
            kept = ProcessPoolExecutor(2, mp_context=FORK)
        for _ in run.steps(2 if kind in ("daemon", "persistent", "terminated") else 10_000):
            globals()[kind](kept)


if __name__ == "__main__":
    main()
