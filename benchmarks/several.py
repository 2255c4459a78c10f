"""Several ranks of torch.distributed over gloo on this machine, for the other benchmarks.

They are forked from a process that has imported everything and has run no operation of torch, so
that a group of them is there within a tenth of a second. The stores of torch look up the names of
addresses, which may take long on a machine that has none: they are given a second.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(rank, size, folder, do, args) for rank in range(size)]
        try:
            return [rank.received() for rank in ranks]
        except BaseException:
            for rank in ranks:
                os.kill(rank.pid, signal.SIGKILL)
            raise
        finally:
            for rank in ranks:
                os.waitpid(rank.pid, 0)


class _Rank:
    """A forked process, and the end of the pipe into which it writes its result."""

    def __init__(self, rank: int, size: int, folder: str, do: Any, args: Any) -> None:
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _run(rank, size, folder, writer, do, args)
        os.close(writer)  # so that a rank that dies is noticed

    def received(self) -> Any:
        if not select.select([self.reader], [], [], PATIENCE_S)[0]:
            raise SystemExit("a rank failed: it hangs")
        with os.fdopen(self.reader, "rb") as file:
            content = file.read()
        is_good, value = pickle.loads(content) if content else (False, "it has died")
        if not is_good:
            raise SystemExit(f"a rank failed: {value}")
        return value


def _run(rank: int, size: int, folder: str, writer: int, do: Any, args: Any) -> NoReturn:
    torch.set_num_threads(1)
    try:
        meeting = f"file://{Path(folder, 'meeting')}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        result = True, do(rank, *args)
    except BaseException:  # noqa: BLE001 - the parent prints it
        result = False, traceback.format_exc()
    with os.fdopen(writer, "wb") as file:
        file.write(pickle.dumps(result))
    os._exit(0)
