"""Several ranks of torch.distributed over gloo on this machine, for the other benchmarks.

They are forked from a process that has imported everything and has run no operation of torch, so
that a group of them is there within a tenth of a second. The stores of torch look up the names of
addresses, which may take long on a machine that has none: they are given a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo  # else each rank imports it, with the first step of its optimizer
import torch.distributed as dist

PATIENCE_S = 1800.0


def silent(text: str, level: int = 0) -> None:
    """Takes the place of `messages.say` and `messages.warn`."""


def on_ranks(size: int, do: Callable[..., Any], *args: Any) -> list[Any]:
    """What `do(rank, *args)` returns on each of `size` ranks, by rank.

    Raises:
        SystemExit: With what a rank has raised, or that one has died.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_run, args=(rank, size, folder, pipes[rank][1], do, args))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()  # so that a rank that dies is noticed
        try:
            found = [_received(receiver) for receiver, _ in pipes]
        finally:
            for rank in ranks:
                rank.kill() if any(one.exitcode for one in ranks) else rank.join(PATIENCE_S)
    return found


def _received(receiver: Any) -> Any:
    try:
        is_good, value = receiver.recv() if receiver.poll(PATIENCE_S) else (False, "it hangs")
    except EOFError:
        is_good, value = False, "it has died"
    if not is_good:
        raise SystemExit(f"a rank failed: {value}")
    return value


def _run(rank: int, size: int, folder: str, sender: Any, do: Any, args: Any) -> None:
    torch.set_num_threads(1)
    try:
        meeting = f"file://{Path(folder, 'meeting')}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        sender.send((True, do(rank, *args)))
    except BaseException:  # noqa: BLE001 - the parent prints it
        sender.send((False, traceback.format_exc()))
        os._exit(1)
    os._exit(0)
