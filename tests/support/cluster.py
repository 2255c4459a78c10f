"""A true Slurm of our own: munged, slurmctld and some slurmd, on loopback, in a folder that goes.

    python tests/support/cluster.py            a shell in which sbatch, squeue … talk to it
    python tests/support/cluster.py --serve FOLDER NODES [SETTING…]

The daemons are children of one keeper process, which adopts whatever they start and ends all of it
on request, or when its standard input closes: nothing survives a test process that is killed.
Partitions:

    low      preemptible, GraceTime=10 s        zero    preemptible, GraceTime=0
    cancel   as zero, but PreemptMode=CANCEL    urgent  preempts all of them
"""

from __future__ import annotations

import getpass
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from forge.process import children, processes

DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_S = 120.0
STOP = "stop\n"
"""The line that ends the keeper."""
CONF = """
ClusterName=forge
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MaxArraySize=1001
KillWait=5
MessageTimeout=100
BatchStartTimeout=100
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node_port}-{last_port}] \
CPUs={cpus} RealMemory=2000
PartitionName=low Nodes=n[1-{nodes}] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=zero Nodes=n[1-{nodes}] PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=cancel Nodes=n[1-{nodes}] PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=urgent Nodes=n[1-{nodes}] PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What to type before a cluster can be started; empty where nothing is missing."""
    absent = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SBIN) is None]
    if not absent:
        return ""
    return f"no {', '.join(absent)}: `make slurm-install` (root, Debian or Ubuntu) installs Slurm"


class Cluster:
    """A running cluster, for the process that started it and its children."""

    def __init__(self, folder: Path, *settings: str, nodes: int = 2) -> None:
        """`settings`: lines of slurm.conf, in place of those above."""
        self.folder = folder
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder), str(nodes), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl+C is not for the daemons
        )
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline().strip()
        if line != "up":
            self.stop()
            raise RuntimeError(f"Slurm did not start: {line or 'see the logs in ' + str(folder)}")

    @property
    def environment(self) -> dict[str, str]:
        """With it Slurm's commands talk to this cluster, and to no other."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SBIN}

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """One of Slurm's commands; its output."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        done = subprocess.run(
            command,
            env=inherited | self.environment,
            cwd=cwd,
            encoding="utf-8",
            errors="surrogateescape",  # it lists the jobs of other tests, with their odd names
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}"
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def clear(self) -> None:
        """End every job, and wait until the queue is empty."""
        self.run("scancel", f"--user={os.getuid()}", check=False)
        wait_for(lambda: not self.run("squeue", "--noheader").strip(), "empty queue")

    @contextmanager
    def controller_away(self) -> Iterator[None]:
        """Without slurmctld: nobody answers, and what runs keeps running."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        assert processes.send(pid, signal.SIGTERM)  # it keeps its state
        assert not processes.wait_gone([pid], START_S)
        try:
            yield
        finally:
            self._start("slurmctld -D")
            is_up = lambda: "is UP" in self.run("scontrol", "ping", check=False)  # noqa: E731
            wait_for(is_up, "controller", START_S)

    def lose(self, node: str) -> None:
        """As when its machine loses its power: its slurmd is gone, and all that runs there."""
        pids = processes.descendants(self._keeper.pid)
        (slurmd,) = [pid for pid in pids if stat_of(pid)[0] == "slurmd" and node in _words(pid)]
        tasks = [pid for pid in pids if processes.variable(pid, "SLURMD_NODENAME") == node]
        above = {stat_of(pid)[1] for pid in tasks}
        lost = [slurmd, *tasks, *(pid for pid in above if stat_of(pid)[0] == "slurmstepd")]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another one's end
            for pid in lost:
                processes.send(pid, number)
        assert not processes.wait_gone(lost, START_S)

    def bring_back(self, node: str) -> None:
        """Start its slurmd again; Slurm takes it back by itself."""
        self._start(f"slurmd -D -N {node}")

    def _start(self, command: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{command}\n")
        self._keeper.stdin.flush()

    def stop(self) -> None:
        """End everything; nothing is left of it but the folder."""
        self._keeper.communicate(STOP, 120)  # a forked process can keep the pipe open after us


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Ask again and again: Slurm tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        select.select([], [], [], 0.2)


def submit(cluster: Cluster, folder: Path, script: str, *options: str) -> str:
    """A batch script that runs in `folder`; the number of its job."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    return cluster.run("sbatch", "--parsable", *options, str(path), cwd=folder).strip()


def stat_of(pid: int) -> tuple[str, int]:
    """(name, parent) of a process; ("", 0) where it is gone."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", 0
    return head.partition("(")[2], int(tail.split()[1])


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


# -- the keeper --------------------------------------------------------------------------------


def _reserved_ports(count: int) -> list[socket.socket]:
    """Sockets at ports of loopback that follow one another; nobody else is given these ports.

    They never listen, and Slurm reuses addresses as they do, so its daemons can.
    """
    while True:
        sockets: list[socket.socket] = []
        try:
            for number in range(count):
                sockets.append(socket.socket())
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sockets[-1].bind(("127.0.0.1", number and _port(sockets[0]) + number))
        except (OSError, OverflowError):  # taken, or beyond the last one
            for one in sockets:
                one.close()
        else:
            return sockets


def _port(one: socket.socket) -> int:
    return int(one.getsockname()[1])


def _write(folder: Path, settings: list[str], ports: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    controller_port, node_port, *_, last_port = ports
    text = CONF.format(
        user=getpass.getuser(),
        folder=folder,
        controller_port=controller_port,
        node_port=node_port,
        last_port=last_port,
        nodes=len(ports) - 1,
        cpus=max(os.cpu_count() or 1, 16),
    )
    names = tuple(f"{one.partition('=')[0]}=" for one in settings)
    kept = [line for line in text.splitlines() if not names or not line.startswith(names)]
    (folder / "slurm.conf").write_text("\n".join([*kept, *settings, ""]))


def _environment(folder: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return environment | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}


def _start_daemon(folder: Path, command: list[str]) -> None:
    none, environment = subprocess.DEVNULL, _environment(folder)
    with (folder / "daemons.log").open("ab") as log:
        subprocess.Popen(command, env=environment, stdin=none, stdout=log, stderr=log)


def _start(folder: Path, nodes: int) -> None:
    environment = _environment(folder)
    munge = [f"--{name}={folder}/munge.{end}" for name, end in MUNGE_FILES]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-c"]]
    commands += [["slurmd", "-D", "-c", "-N", f"n{number}"] for number in range(1, nodes + 1)]
    for command in commands:
        _start_daemon(folder, command)
        if command[0] == "munged":
            _until(lambda: (folder / "munge.sock").exists(), "munge")
    sinfo = ["sinfo", "--noheader", "--partition=urgent", "--format=%T %D"]

    def is_up() -> bool:
        done = subprocess.run(sinfo, env=environment, capture_output=True, text=True)
        return done.stdout.split() == ["idle", str(nodes)]

    _until(is_up, f"{nodes} idle nodes")


MUNGE_FILES = [
    ("socket", "sock"),
    ("key-file", "key"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
]


def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        wait_for(condition, what, START_S)
    except AssertionError as error:
        raise RuntimeError(str(error)) from None


def _serve(folder: Path, nodes: int, settings: list[str]) -> int:
    """Run the daemons until `STOP` or the end of standard input; other lines start a daemon."""
    children.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reserved = _reserved_ports(1 + nodes)
    try:
        _write(folder, settings, [_port(one) for one in reserved])
        _start(folder, nodes)
        print("up", flush=True)
        for line in sys.stdin:
            if line == STOP:
                break
            _start_daemon(folder, line.split())
    except RuntimeError as error:
        print(f"{error}; the logs are in {folder}", flush=True)
        return 1
    finally:
        processes.kill_descendants()
    return 0


def _shell() -> int:
    problem = missing()
    if problem:
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="forge-slurm-") as folder:
        cluster = Cluster(Path(folder) / "slurm")
        try:
            print("Two nodes, partitions low, zero, cancel, urgent. `exit` ends the cluster.")
            shell = os.environ.get("SHELL", "/bin/sh")
            return subprocess.run([shell], env=os.environ | cluster.environment).returncode
        finally:
            cluster.stop()


if __name__ == "__main__":
    is_keeper = sys.argv[1:2] == ["--serve"]
    sys.exit(_serve(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]) if is_keeper else _shell())
