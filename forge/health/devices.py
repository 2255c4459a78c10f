"""A task's CUDA devices, and whether they compute correctly, alone and with the other ranks."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge import messages
from forge.group.collectives import backends
from forge.process.world import largest_count

_HAS_BFLOAT16 = (8, 0)
"""The lowest compute capability that multiplies bfloat16."""


def check_gpu_health(device: int = 0) -> dict[str, Any]:
    """Check whether a CUDA device answers, computes and allocates.

    Args:
        device: Its number, as CUDA counts.
    Returns:
        cuda_available, device_accessible, compute_ok, memory_ok (bool) and error (str, empty if
        nothing failed).
    """
    result: dict[str, Any] = {
        "cuda_available": torch.cuda.is_available(),
        "device_accessible": False,
        "compute_ok": False,
        "memory_ok": False,
        "error": "",
    }
    if not result["cuda_available"]:
        result["error"] = "CUDA is not available"
        return result
    try:
        where = torch.device("cuda", device)
        torch.cuda.get_device_properties(where)
        result["device_accessible"] = True
        a = torch.arange(64 * 64, dtype=torch.float32, device=where).reshape(64, 64) % 7
        # Small integers: exact in float32 in any order of summation. bfloat16 is exact up to 256,
        # and ones and zeros add up to 64 at most.
        products = [a]
        if torch.cuda.get_device_capability(where) >= _HAS_BFLOAT16:
            products.append((a % 2).bfloat16())
        wrong = [one.dtype for one in products if not _is_product_right(one)]
        result["compute_ok"] = not wrong
        if wrong:
            named = " and ".join(str(one).removeprefix("torch.") for one in wrong)
            result["error"] = f"cuda:{device} computed a wrong matrix product in {named}"
        block = torch.full((16 << 20,), 0xA5, dtype=torch.uint8, device=where)
        result["memory_ok"] = bool((block == 0xA5).all().item())
        if not result["memory_ok"]:
            result["error"] = f"cuda:{device} did not keep what was written to its memory"
    except (RuntimeError, AssertionError, ValueError) as error:
        result["error"] = f"cuda:{device}: {error}"
    return result


def _is_product_right(matrix: torch.Tensor) -> bool:
    """Whether the device's product with the transpose equals the CPU's, which is exact."""
    host = matrix.cpu().float()
    return torch.equal((matrix @ matrix.T).cpu().float(), host @ host.T)


def own_devices() -> list[int]:
    """The visible CUDA devices of this task; the query does not open a CUDA context.

    If all tasks of a node see the same devices, each task gets its share by its local rank
    (torchrun's, or Slurm's in a step): the devices of other tasks must not be touched.
    """
    count, env = torch.cuda.device_count(), os.environ
    rank = largest_count(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID"), 0)
    tasks = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_STEP_TASKS_PER_NODE")
    share = max(count // max(largest_count(tasks, 1), 1), 1)
    first = rank * share % max(count, 1)
    return list(range(first, min(first + share, count)))


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Check an all-reduce over all ranks, on any backend (nccl, gloo).

    Args:
        timeout_sec: Timeout in seconds.
    Returns:
        Whether the sum was correct and in time; True if torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    is_cuda = backends().get("cuda") == "nccl"
    device = torch.device("cuda", _own_device()) if is_cuda else torch.device("cpu")

    answers = []

    def reduce() -> None:
        try:
            ones = torch.ones(1, device=device)
            work = dist.all_reduce(ones, async_op=True)
            work.wait(timedelta(seconds=timeout_sec))
            answers.append(int(ones.item()) == dist.get_world_size())
        except Exception as error:  # noqa: BLE001 - logged, and the check fails
            messages.warn(f"The all-reduce of the health check failed: {error}")

    thread = threading.Thread(target=reduce, name="forge-health", daemon=True)
    thread.start()
    thread.join(timeout_sec)  # NCCL's own wait ends only when the GPU has the sum
    return answers == [True]


def _own_device() -> int:
    """The current device, if it belongs to this task: the default is 0 in every task."""
    own, current = own_devices(), torch.cuda.current_device()
    return current if current in own or not own else own[0]
