"""DataLoader workers of a run, and what is left of them in the user's loader."""

import os
import select
import signal
import sys
import time
from contextlib import suppress

import pytest
import torch
import warm
from torch.utils.data import DataLoader

from forge.data.workers import iter_with_blocked_signals


def begin(worker_id):
    """The user's own `worker_init_fn`."""
    torch.utils.data.get_worker_info().dataset.offset = 10


class Numbers(torch.utils.data.Dataset):
    offset = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.offset + index


def test_the_loader_keeps_its_own_worker_init_fn():
    """Whoever iterates it without forge, or pickles it, must not find forge's in its place."""
    loader = DataLoader(Numbers(), num_workers=1, worker_init_fn=begin)
    for _ in range(2):
        assert [int(one) for one in iter_with_blocked_signals(loader)] == [10, 11, 12, 13]
        assert loader.worker_init_fn is begin


ORPHANED = """
import os, pathlib, sys, time

place, folder = sys.argv[1:]
main = os.getpid()


def hold(*_):
    pathlib.Path(folder, str(os.getpid())).touch()
    while os.getppid() == main:
        time.sleep(0.01)


if place == "fork":
    os.register_at_fork(after_in_child=hold)

import torch
from forge.data.workers import iter_with_blocked_signals

init = hold if place == "worker_init_fn" else None
loader = torch.utils.data.DataLoader(range(8), num_workers=2, worker_init_fn=init)
for _ in iter_with_blocked_signals(loader):
    pass
"""


@pytest.mark.parametrize("place", ["fork", "worker_init_fn"])
def test_workers_end_if_their_parent_is_killed_while_they_start(place, tmp_path):
    """PyTorch's own watch of the parent begins after `worker_init_fn`, and would see none."""
    with warm.Popen([sys.executable, "-c", ORPHANED, place, str(tmp_path)]) as job:
        while len(workers := list(tmp_path.iterdir())) < 2:
            assert job.poll() is None
            time.sleep(0.01)
        ends = [os.pidfd_open(int(one.name)) for one in workers]
        os.kill(job.pid, signal.SIGKILL)
    try:
        for end in ends:
            assert select.select([end], [], [], 60)[0]
    finally:
        for end in ends:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)
