"""Plants faults in a machine and asks `forge doctor` for each: `python sick_machine.py`.

Each fault is real where it can be, in a mount namespace of its own (root): a full disk, one without
inodes, a tiny /dev/shm; a site's command that fails or hangs, a rank that does not come. A GPU is
played: it multiplies wrong.
Prints fault, failed checks and exit code; its own exit code is 1 if one was not found.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import warm
from started import Popen

PATIENCE_S = 200
DOCTOR = [sys.executable, "-m", "forge", "doctor", "-v", "--dir"]
WRONG_PRODUCT = """
import sys, torch
from forge.cli import main
from forge.health import attempt
from forge.health import devices

class Cuda:  # the check's own product, on a CPU that adds one to a sum in bfloat16
    is_available = staticmethod(lambda: True)
    get_device_properties = staticmethod(lambda device: None)
    get_device_capability = staticmethod(lambda device: (9, 0))

class Torch:
    cuda = Cuda
    device = staticmethod(lambda kind, index: torch.device("cpu"))
    def __getattr__(self, name):
        return getattr(torch, name)

right = torch.Tensor.__matmul__

def wrong(one, other):
    found = right(one, other)
    if found.dtype is torch.bfloat16:
        found[0, 0] += 1
    return found

attempt.devices = lambda: (0,)
torch.cuda.is_available = lambda: True
torch.Tensor.__matmul__ = wrong
devices.torch = Torch()
sys.argv = ["forge", *sys.argv[1:]]
sys.exit(main.main())
"""
IMPATIENT = """
import sys
from forge.cli import doctor, main

doctor.TIMEOUT_S = 1.0
sys.argv = ["forge", *sys.argv[1:]]
sys.exit(main.main())
"""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a machine."""

    name: str
    check: str
    """What is to fail, alone; empty: nothing."""
    overrides: tuple[str, ...] = ()
    mount: str = ""
    """Shell commands in a mount namespace of their own; `$1` is the checkpoint directory."""
    before: tuple[str, ...] = ()
    """In front of the command."""
    ranks: int = 1
    only: int | None = None
    """The only rank that comes."""
    shown: str = ""
    """Text that the table shows for this fault."""


def nhc(script: str, timeout_s: float = 60.0) -> tuple[str, ...]:
    """A site's own check, by a shell."""
    key = "resilience.health.commands.nhc"
    return (f'{key}.run=[sh, -c, "{script}"]', f"{key}.timeout_s={timeout_s}")


NO_SHM = "resilience.health.checks.shm=ignore"
"""A container's small /dev/shm is no fault planted here."""
FAULTS = [
    Fault("none", ""),
    Fault("none, two ranks", "", ranks=2),
    Fault(
        "full disk",
        "disk",
        (),
        'mount -t tmpfs -o size=1m tmpfs "$1"; head -c 2m /dev/zero > "$1/ballast" 2> /dev/null',
        shown="No space left on device",
    ),
    Fault(
        "no room for two checkpoints",
        "",
        (),
        'mount -t tmpfs -o size=4m tmpfs "$1"; mkdir "$1/step_5";'
        ' head -c 2m /dev/zero > "$1/step_5/tensors_rank00000.safetensors"',
        shown="space for 1.0 more checkpoints",
    ),
    Fault(
        "few inodes",
        "",
        (),
        'mount -t tmpfs -o size=4g,nr_inodes=50 tmpfs "$1"',
        shown="free inodes in",
    ),
    Fault(
        "tiny /dev/shm",
        "shm",
        (),
        "mount -t tmpfs -o size=64m tmpfs /dev/shm",
        shown="0.06 GiB free in /dev/shm",
    ),
    Fault(
        "wrong product",
        "gpu",
        before=(sys.executable, "-c", WRONG_PRODUCT),
        shown="wrong matrix product in bfloat16",
    ),
    Fault("a site's command fails", "nhc", nhc("echo fine; echo no fan; exit 3"), shown="no fan"),
    Fault("a site's command hangs", "nhc", nhc("sleep 600 & sleep 600", 1.0), shown="within 1 s"),
    Fault(
        "a peer that does not come",
        "ranks",
        before=(sys.executable, "-c", IMPATIENT),
        ranks=2,
        only=0,
        shown="rank 1",
    ),
]  # fmt: skip


ENTER = """
import ctypes, os, runpy, sys
assert not ctypes.CDLL(None).setns(os.open(sys.argv.pop(1), os.O_RDONLY), 0)
runpy.run_module("forge", run_name="__main__", alter_sys=True)
"""
"""The doctor in a mount namespace that a shell keeps."""


def examined(fault: Fault, folder: Path) -> tuple[int, str]:
    """What the doctor ends with and prints; of several ranks the first that comes."""
    arguments = [str(folder), *([NO_SHM] if fault.check != "shm" else []), *fault.overrides]
    command = [*DOCTOR, *arguments]
    if fault.before:
        command = [*fault.before, *command[3:]]  # a script that plays the doctor's machine
    if fault.mount:
        shell = f"{fault.mount}; echo mounted; exec sleep 600"
        holder = Popen(["unshare", "-m", "sh", "-c", shell, "sh", str(folder)], stdout=-1)
        assert holder.stdout.readline() == b"mounted\n"
        command = [sys.executable, "-c", ENTER, f"/proc/{holder.pid}/ns/mnt", *command[3:]]
    port = str(free_port())
    ranks = range(fault.ranks) if fault.only is None else [fault.only]
    started = []
    for rank in ranks:
        env = dict(os.environ)
        if fault.ranks > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(fault.ranks), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(warm.Popen(command, env=env, **pipes))
    found = [one.communicate(timeout=PATIENCE_S)[0].decode() for one in started]
    codes = {one.returncode for one in started}
    if fault.mount:
        holder.kill()
        holder.communicate()
    assert len(codes) == 1, f"{codes}\n{found}"
    return codes.pop(), found[0]


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def failed_in(output: str) -> list[str]:
    """The checks that fail, by the table."""
    return [line.split()[0] for line in output.splitlines() if "  FAILS  " in line]


def is_found(fault: Fault, code: int, output: str) -> bool:
    """Whether this check alone failed, and the table says why."""
    expected = [fault.check] if fault.check else []
    is_shown = fault.shown in " ".join(output.split())  # long lines are wrapped
    return failed_in(output) == expected and code == (69 if expected else 0) and is_shown


def is_possible(fault: Fault) -> bool:
    """Whether this machine can play it."""
    if fault.mount:
        probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
        return subprocess.run(probe, capture_output=True).returncode == 0
    return True


def main() -> int:
    """Print the table."""
    is_all_found = True
    print(f"{'fault':30} {'fails':20} {'code':>4}  found")
    for fault in FAULTS:
        if not is_possible(fault):
            print(f"{fault.name:30} not possible on this machine")
            continue
        with tempfile.TemporaryDirectory() as folder:
            code, output = examined(fault, Path(folder))
        is_good = is_found(fault, code, output)
        is_all_found &= is_good
        lines = [line for line in output.splitlines() if "  FAILS  " in line]
        said = lines[0].partition("FAILS")[2].strip() if lines else ""
        print(f"{fault.name:30} {', '.join(failed_in(output)) or '-':20} {code:4}  {said[:90]}")
        if not is_good:
            print(f"{fault.name}: expected {fault.check or 'nothing'}:\n{output}")
    return 0 if is_all_found else 1


if __name__ == "__main__":
    sys.exit(main())
