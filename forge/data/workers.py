"""DataLoader workers that ignore the signals Slurm sends to every process of a step.

A worker killed by a signal would prevent the save ('DataLoader worker exited unexpectedly'). The
signals are blocked while workers are started (fork and exec inherit that). Then each worker ignores
them, except a SIGTERM from its parent, by which a DataLoader ends its workers.

A worker ends when its parent has ended. PyTorch's `ManagerWatchdog` alone is not enough: it begins
after `worker_init_fn`, and if the parent was killed before, it watches the process that has adopted
the worker, so the worker never ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from forge.compat import of_torch

_LOOK_S = 1.0
"""Seconds after which a worker looks again whether its parent lives."""
_shielded = 0
"""The pid of this process, once it is shielded."""


class Shield:
    """A `worker_init_fn` that shields the worker and then calls the user's own."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker."""
        shield_this_process()
        if self.inner is not None:
            self.inner(worker_id)


def shield_forked(is_in_run: Callable[[], bool]) -> None:
    """From now on shield each worker that is forked, whoever iterates its loader.

    Args:
        is_in_run: Called in the worker; False: it is left as torch made it.
    """
    of_torch.on_worker_start(lambda: shield_this_process() if is_in_run() else None)


def shield_this_process() -> None:
    """Ignore stop signals in a child process that its parent ends; again changes nothing."""
    global _shielded
    if _shielded == os.getpid():
        return
    _shielded = os.getpid()
    ignored = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    # Ignoring a signal also drops a pending one, so unblock afterwards.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    parent = multiprocessing.parent_process()
    if sys.platform.startswith("linux") and parent is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(
            target=_end_with_parent, args=(parent,), name="forge-worker", daemon=True
        ).start()
    else:  # no sigtimedwait: the sender of a SIGTERM is unknown
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_parent(parent: BaseProcess) -> None:
    # Not the pid of `parent`: it has ended before, or a fork server is between. Then a pipe says
    # whether it lives, which a worker that was forked later holds, too, until it ends itself.
    ppid = os.getppid()
    while os.getppid() == ppid and (ppid == parent.pid or parent.is_alive()):
        signalled = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
        if signalled is not None and signalled.si_pid == parent.pid:
            break
    os._exit(0)


def iter_with_blocked_signals(
    loader: Iterable[Any], make: Callable[[Any], Iterator[Any]] = iter
) -> Iterator[Any]:
    """`make(loader)`, with its workers shielded if it makes any."""
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return make(loader)
    from forge.shutdown.stopping import block_signals

    own = loader.worker_init_fn
    loader.worker_init_fn = Shield(own)
    try:
        with block_signals():
            return make(loader)  # the iterator keeps the Shield
    finally:
        loader.worker_init_fn = own
