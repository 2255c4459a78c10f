"""Attacks by another user of the machine on the ports that a training of several ranks opens.

    sudo python tests/proofs/store_attack.py [attack ...]

acts as the trainer and as a second user (so it needs root), and prints the result of each attack.
The second user finds the ports in /proc/net/tcp, and reads the keys of the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch.distributed as dist
from harness import until

from forge.process import world

_FINISH = {"kind": "FinishRequest", "loop": 0, "rollbacks": 0, "step": 4, "text": "enough"}
_FAILED = {"error": "a disk that nobody has", "code": 0, "weight": 3}


def listeners(owns: Callable[[int, str], bool]) -> list[tuple[str, int]]:
    """(address in hex, port) of listening sockets.

    Args:
        owns: Whether to include a socket, given its user and inode.
    """
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state, *rest = line.split()[1:]
            if state == "0A" and owns(int(rest[3]), rest[5]):
                address, _, port = local.partition(":")
                found.append((address, int(port, 16)))
    return found


def listeners_of(pids: Iterable[int]) -> list[tuple[str, int]]:
    """(address in hex, port) of the listening sockets of these processes."""
    links = [os.readlink(one) for pid in pids for one in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {one[8:-1] for one in links if one.startswith("socket:[")}
    return listeners(lambda uid, inode: inode in inodes)


_PING = struct.Struct("<BIBI")
"""The first message of a client to torch's store, which replies with the message's last number."""


def is_store(port: int) -> bool:
    """Whether torch's store listens on a port; with another server its client would hang."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as found:
        found.sendall(_PING.pack(0, 0x3C85F7CE, 13, 7))
        return found.recv(4) == struct.pack("<I", 7)
    return False


def store_at(ports: Iterable[int]) -> Any:
    """The store that the ranks use to agree."""
    for port in filter(is_store, ports):
        found = vars(dist)["TCPStore"](
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
        if any("given/" in key for key in found.list_keys()):
            return found
    raise LookupError("nobody hosts a store")


def finish(store: Any) -> None:
    """Fake the proposal of a call of `run.finish`."""
    store.compare_set("round/0", "", json.dumps(_FINISH, sort_keys=True))


def garbage(store: Any) -> None:
    """Write a value that is not a valid message."""
    store.set("round/0", "garbage")


def limit(store: Any) -> None:
    """Fake rank 1's answer, with a boundary that is never reached."""
    store.set("limit/0/1", "1000000000 -1")


def given(store: Any) -> None:
    """Fake rank 1's value once rank 0 waits for it: a failure with exit code 0."""

    def slots() -> set[str]:
        keys = set(store.list_keys())
        own = {key for key in keys if re.fullmatch(r"\+?given/.*/0", key)}
        return {key[:-1] + "1" for key in own} - keys

    until(slots, "value of rank 0")
    for slot in slots():
        store.set(slot, "=" + json.dumps(_FAILED))


ATTACKS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "finish": (finish, False),
    "garbage": (garbage, False),
    "limit": (limit, True),
    "given": (given, True),
}
"""Name -> the attack, and whether rank 1 is suspended, since it would overwrite the faked key."""


# -- two users ---------------------------------------------------------------------------------

VICTIM, ATTACKER = 65533, 65534
JOB = Path(__file__).parents[1] / "support" / "jobs" / "attacked.py"
CODE = "import sys; sys.path[:0] = sys.argv[1].split(':'); import store_attack as s; s.play(*{!r})"


def play(name: str) -> None:
    """Act as the attacker, once a line arrives on stdin."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    found = listeners(lambda uid, inode: uid == VICTIM)
    ATTACKS[name][0](store_at([port for _, port in found]))


def run(name: str, folder: Path) -> None:
    """Start the victim's ranks, run the attack, and print the exit codes and messages."""
    port = str(world.free_port())
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "HOME": str(folder)}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(2):
        with open(folder / f"output_{rank}", "w") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, JOB, folder, "{}"],
                    user=VICTIM,
                    group=VICTIM,
                    extra_groups=[],
                    cwd=folder,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    until(lambda: all((folder / f"here_{rank}").exists() for rank in range(2)), "both in the step")
    if name in ATTACKS:
        attack(name, ranks, folder, environment)
    else:
        for address, number in listeners_of([one.pid for one in ranks]):
            what = "torch's own" if str(number) == port else "store" if is_store(number) else ""
            print(f"    listens: {address:32} {number:5} {what}")
        (folder / "go").touch()
    codes = [one.wait(200) for one in ranks]
    print(f"{name}: exit codes {codes}")
    for line in sorted({line for one in (0, 1) for line in said(folder / f"output_{one}")}):
        print(f"    {line[:250]}")


def attack(name: str, ranks: list[Any], folder: Path, environment: dict[str, str]) -> None:
    """Run the attack while both ranks are in a step; then let them continue."""
    act = [sys.executable, "-c", CODE.format((name,)), ":".join(sys.path)]
    as_attacker: dict[str, Any] = {"user": ATTACKER, "group": ATTACKER, "extra_groups": []}
    is_suspended = ATTACKS[name][1]
    attacker = subprocess.Popen(
        act,
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **as_attacker,
    )
    assert attacker.stdout is not None
    attacker.stdout.readline()
    if is_suspended:
        ranks[1].send_signal(signal.SIGSTOP)
    if name == "limit":
        ranks[0].send_signal(signal.SIGUSR1)
    if name == "given":
        (folder / "go").touch()
    attacker.communicate("go\n")
    print(f"{name}: the attacker {'failed' if attacker.returncode else 'has written'}")
    (folder / "go").touch()
    if is_suspended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[0].wait(20)
        ranks[1].send_signal(signal.SIGCONT)


def said(output: Path) -> list[str]:
    """The messages of forge in an output file."""
    return [line for line in output.read_text().splitlines() if "forge: " in line]


def main() -> None:
    """Print the result of each attack."""
    if os.geteuid() != 0:
        sys.exit("needs root, to play two users")
    for name in sys.argv[1:] or ("no attack", *ATTACKS):
        with tempfile.TemporaryDirectory(prefix="forge-store-") as place:
            os.chown(place, VICTIM, VICTIM)
            run(name, Path(place))


if __name__ == "__main__":
    main()
