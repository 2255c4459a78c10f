"""Read this process's rank from the environment, whichever program started it."""

from __future__ import annotations

import random
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from forge.errors import ConfigError

_PORTS = range(10_000, 30_000)
"""Below Linux's ephemeral ports."""

UNSET = "If no launcher has started ranks: `unset RANK WORLD_SIZE`."
"""The remedy for variables that an earlier command left in the environment."""


@dataclass(frozen=True)
class RankInfo:
    """This process's rank, and the rendezvous address."""

    rank: int = 0
    """The global rank, from 0."""
    size: int = 1
    """The number of ranks."""
    local_rank: int = 0
    """The rank among those on this node."""
    local_size: int = 1
    """The number of ranks on this node."""
    address: str = ""
    """The host of rank 0, for the rendezvous."""
    port: int = 0

    def variables(self) -> dict[str, str]:
        """The environment variables from which torch and other libraries read the rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def of(environment: Mapping[str, str]) -> RankInfo:
    """The rank in this environment; a single rank if it names none.

    torch's variables come first (set by torchrun, forge's launchers and others), then those of a
    Slurm step, unless FORGE_RANKS=1 says that the tasks of the step are independent.

    Raises:
        ConfigError: If the variables are inconsistent or incomplete.
    """
    given = _given(environment)
    is_alone = environment.get("FORGE_RANKS") == "1"  # also in a task of srun
    step = None if is_alone else _of_slurm(environment)
    if given is None:
        return step or RankInfo()
    is_own = "TORCHELASTIC_RUN_ID" in environment or "FORGE_RANKS" in environment
    if step is not None and not is_own and (given.rank, given.size) != (step.rank, step.size):
        problem = (
            f"RANK={given.rank} and WORLD_SIZE={given.size} are set, but this is task {step.rank}"
            f" of {step.size} of a Slurm step (SLURM_PROCID, SLURM_STEP_NUM_TASKS). {UNSET} Else"
            " set them to each task's values."
        )
        raise ConfigError([problem], "The environment")
    if step is not None and not given.port:
        return step
    if given.size > 1 and not given.port:
        problem = (
            f"this is rank {given.rank} of {given.size} (RANK, WORLD_SIZE), but MASTER_ADDR and"
            f" MASTER_PORT, the address of the rendezvous, are not set. {UNSET} Else set both to"
            " the same values on every rank, or start the ranks with torchrun, srun or one of"
            " forge's launchers."
        )
        raise ConfigError([problem], "The environment")
    return given


def _given(environment: Mapping[str, str]) -> RankInfo | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = {name: environment.get(name, "") for name in names}
    bad = [f"{name}={value!r}" for name, value in values.items() if value and not value.isdecimal()]
    number = {name: int(value) for name, value in values.items() if value.isdecimal()}
    size = number.get("WORLD_SIZE", 0)
    if bad or not number.get("RANK", size) < size:
        shown = ", ".join(bad) or f"RANK={values['RANK']}, WORLD_SIZE={values['WORLD_SIZE']}"
        raise ConfigError(
            [f"{shown}: expected integers, and RANK below WORLD_SIZE"], "The environment"
        )
    address = environment.get("MASTER_ADDR", "")
    local = int(environment.get("SLURM_LOCALID") or 0)
    return RankInfo(
        number["RANK"],
        size,
        number.get("LOCAL_RANK", local),
        number.get("LOCAL_WORLD_SIZE", 1),
        address,
        number.get("MASTER_PORT", 0) if address else 0,
    )


def _of_slurm(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank of a task of srun; None if the step has only one task."""
    size = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if size == 1:
        return None
    of_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE") or str(size)
    node = int(environment.get("SLURM_NODEID") or 0)
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return RankInfo(
        int(environment.get("SLURM_PROCID") or 0),
        size,
        int(environment.get("SLURM_LOCALID") or 0),
        _expanded(of_nodes)[node],
        _first_host(environment),
        port_of(*(environment.get(name) or "0" for name in names)),
    )


def port_of(*names: str) -> int:
    """A port derived from these names: the same on all ranks, and different for each start."""
    return _PORTS[zlib.crc32(".".join(names).encode()) % len(_PORTS)]


def _expanded(counts: str) -> list[int]:
    """Expand Slurm's notation: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(count)] * int(times or 1)
    return found


def largest_count(counts: str | None, default: int) -> int:
    """The largest number in `4(x2),3`; `default` if there is none."""
    return max(_expanded(counts or ""), default=default)


def _first_host(environment: Mapping[str, str]) -> str:
    """The host of rank 0: the first of `n[08-11,20],m1`, or the host where srun was called."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    host = "".join(part or "" for part in found.groups()) if found else ""
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # Slurm's NodeName is not a host name
        return environment.get("SLURM_LAUNCH_NODE_IPADDR") or host
    return host or "127.0.0.1"


def free_port() -> int:
    """A free port of this machine."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(["found no free port between 10000 and 30000"], "This machine")
