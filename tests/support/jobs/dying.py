"""Ranks, without forge.Run, one of which ends early: `dying.py <directory> <spec as JSON>`.

Rank `who` ends in the way `how`; the others wait for it in the call `where`, and print the error
that they get. With `then` rank `who` suspends itself instead, until rank 0 has made a proposal that
it cannot answer, and has sent it the signal `then`.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from forge.errors import RankLost, Reason
from forge.group.ranks import StoreCoordinator
from forge.group.requests import StopRequest

LONG_S = 1000.0
THREADS = ("forge-agree", "forge-propose")
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
group = StoreCoordinator()


def end():
    if spec.get("has_child"):
        reader, writer = os.pipe()
        if os.fork() == 0:
            (directory / "child").write_text(str(os.getpid()))
            os.write(writer, b"!")
            while True:
                signal.pause()  # until the test is over
        os.read(reader, 1)
    match spec["how"]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(0)
        case "leaves":
            group.close(0)
            # Such a thread in the store, when the interpreter ends, aborts the process.
            left = [one.name for one in threading.enumerate() if one.name in THREADS]
            os._exit(99 if left else 1)


def wait():
    if spec["where"] == "gather":
        group.gather("a value", b"", LONG_S)
    boundary = 0
    while group.agreed(boundary).stop is None:
        boundary += 1


try:
    pids = [int(one) for one in group.gather("pids", str(os.getpid()).encode(), 60)]
    if "then" not in spec and rank == spec["who"]:
        end()
    elif "then" in spec and rank == spec["who"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif "then" in spec and rank == 0:
        state = Path("/proc", str(pids[spec["who"]]), "stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            pass
        group.propose(StopRequest(75, Reason.requested))
        os.kill(pids[spec["who"]], getattr(signal, spec["then"]))
    wait()
except RankLost as error:
    print(error, flush=True)
    group.close(0)
    os._exit(70)
group.close(30)
