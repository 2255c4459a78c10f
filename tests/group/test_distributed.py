"""`forge.distributed.init` in true processes, by what their environment says."""

import os
import subprocess
import sys

import pytest
import warm
from repository import ROOT

from forge.process import world

SCRIPT = """
import forge
import torch
import torch.distributed as dist

found = forge.distributed.init()
assert found == forge.distributed.init()
total = torch.ones(1)
dist.all_reduce(total)
print(found.rank, found.size, found.local_rank, found.device, int(total))
dist.destroy_process_group()
"""


def start(**variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FORGE"))}
    return warm.Popen(
        [sys.executable, "-c", SCRIPT],
        env=kept | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_process_by_itself_is_a_group_of_one():
    """So a script that wraps its model runs on one rank as on many."""
    assert start().communicate(timeout=120)[0] == "0 1 0 cpu 1\n"


@pytest.mark.parametrize("kind", ["torch", "slurm"])
def test_ranks_meet_by_what_torchrun_or_srun_tells_them(kind):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.free_port())}
    if kind == "slurm":
        common = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2"}
        common |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        if kind == "slurm":
            own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        ranks.append(start(**common, **own))
    said = [one.communicate(timeout=120)[0] for one in ranks]
    assert said == ["0 2 0 cpu 2\n", "1 2 1 cpu 2\n"]
