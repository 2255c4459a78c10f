"""Python processes forked from a process that has imported torch: ten times faster to start.

They suit all tests that do not depend on Python's start-up or on unloaded modules. They are real
processes: children of the process that starts them, with their own session, environment and
signals. The sweeps and jobs that they start are forked, too: launcher, wrapper, supervisor, task.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import started

IS_QUICK = os.environ.get("FORGE_TESTS_QUICK") != "no"  # set by `make proofs`
QUICK = str(Path(__file__).with_name("quick"))
ROOM = "_" * 60000
"""Reserves space in the forking process's environment, which its children overwrite."""
_begun = subprocess.Popen  # the original, even if a test replaces it
_FLAGS = {"-u", "-B", "-I", "-S"}
_OF_ANY_SESSION = "submitit.core._submit"
"""A task of submitit, which stays in the session of the process that forks it."""


def arguments(command: list[str], environment: dict[str, str]) -> tuple[str, list[str]] | None:
    """(`-c`, `-m` or empty, the arguments after it) if a command can be forked, else None."""
    if command[0] != sys.executable or not all(isinstance(one, str) for one in command):
        return None
    rest = list(command[1:])
    while rest and rest[0] in _FLAGS:
        del rest[0]
    if not rest:
        return None
    kind = rest.pop(0) if rest[0] in ("-c", "-m") else ""
    if not rest or rest[0].startswith("-"):
        return None
    return kind, rest


class _Zygote:
    """The connection to a process that forks (zygote.py).

    Args:
        modules: Additional modules for that process to import.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.is_inherited = False

    def use(self, sock: socket.socket, *, is_inherited: bool) -> None:
        """Use a forking process that was started for this process."""
        self._socket, self._pid, self.is_inherited = sock, os.getpid(), is_inherited

    @property
    def is_own(self) -> bool:
        """Whether forked processes are children of this process."""
        return self._pid == os.getpid()

    def start(self, request: dict[str, object], fds: list[int]) -> int:
        with self._lock:
            if self._socket is None and not self.is_inherited:
                self._begin()
            assert self._socket is not None
            answer = b""
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
                answer = self._socket.recv(64)
            finally:
                if not answer:  # it has died, or the test has timed out: the next starts another
                    self._socket.close()
                    self._socket = None
        assert answer, "what forks the processes of the tests has died"
        return int(answer)

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._popen = _begun(
            # Newer Pythons warn of forks with threads; torch has some idle threads.
            [
                *(sys.executable, "-W", "ignore::DeprecationWarning"),
                *(
                    str(Path(__file__).with_name("zygote.py")),
                    str(theirs.fileno()),
                    ",".join(self._modules),
                ),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Not the paths and threads of the first test that needs it: a clone has no threads of
            # OpenBLAS, and would wait for them forever.
            env={
                **os.environ,
                "ROOM": ROOM,
                "PYTHONPATH": os.pathsep.join(_paths(self._modules)),
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()
        self._pid = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        if self.is_own and self._socket is not None:
            self._socket.close()
            self._popen.wait(60)


def _paths(modules: tuple[str, ...]) -> list[str]:
    """Not `QUICK` with packages that use the parts of torch that it puts off."""
    names = [one.partition(".")[0] for one in modules]
    return [PACKAGES[one] for one in names if one in PACKAGES] or ([QUICK] if IS_QUICK else [])


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


SHARDING = ("torch.distributed.fsdp", "torch._dynamo.utils")
"""Modules that ranks with sharding import, which takes seconds and many pages."""
TRAINERS = (
    *("accelerate", "transformers.trainer", "transformers.models.bert.modeling_bert"),
    *("transformers.models.gpt2.modeling_gpt2", "peft", "forge.integrations.transformers"),
)
"""Modules of trainers, which the Makefile installs in a folder of their own."""
FRAMEWORKS = str(
    Path(sys.prefix, os.environ.get("FORGE_TESTS_FRAMEWORKS", "frameworks"), "site-packages")
)
TRL = str(Path(sys.prefix, "trl", "site-packages"))
LIGHTNING = ("lightning.pytorch", "forge.integrations.lightning")
PACKAGES = {
    "accelerate": FRAMEWORKS,
    "trl": TRL,
    "lightning": str(
        Path(sys.prefix, os.environ.get("FORGE_TESTS_LIGHTNING", "lightning"), "site-packages")
    ),
}
"""Package -> folder in which the Makefile installs it."""

_zygote = _Zygote()
_others: dict[tuple[str, ...], _Zygote] = {}
"""Forking processes that have imported further modules."""


MOUNTED = ["unshare", "-m", "sh", "-c"]
MOUNTED += ['mount -t tmpfs -o "size=$2" tmpfs "$1" && shift 2 && exec "$@"', "sh"]
"""What `disk` is, where nothing is forked."""
LIMITED = ["sh", "-c", 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"', "sh"]
"""What `cgroup` is, where nothing is forked."""


class Popen(started.Popen):
    """As started.Popen, but forks a Python command line if no special option is set.

    Args:
        disk: (folder, size) of a file system in memory that it and what it starts have there; see
            `own_disk`.
        cgroup: The folder of a cgroup in which it runs, and what it starts.
    """

    def __init__(
        self, args, *, kills=None, is_parent=False, is_worker=False, imports=(), disk=None,
        cgroup=None, **options,
    ):  # fmt: skip
        is_other = imports and not _zygote.is_inherited
        self._zygote = _others.setdefault(imports, _Zygote(*imports)) if is_other else _zygote
        self._kills, self._is_parent, self._is_worker = kills or {}, is_parent, is_worker
        self._disk = disk and [str(one) for one in disk]
        self._cgroup = cgroup and str(cgroup)
        special = ("preexec_fn", "pass_fds", "shell", "executable")
        self._is_plain = not any(options.get(one) for one in special)
        super().__init__(args, **options)

    def _execute_child(self, args, *given):
        cwd, env = given[4:6]
        environment = dict(os.environ if env is None else env)
        read, write, error = given[9], given[12], given[14]
        has_session = given[20]
        if (
            not self._is_plain
            or not self._zygote.is_own
            or not isinstance(args, list)
            or (_zygote.is_inherited and not has_session and _OF_ANY_SESSION not in args)
            or (self._is_parent and not IS_QUICK)
            or arguments(args, environment) is None
        ):
            started_so = [*MOUNTED, *self._disk, *args] if self._disk else args
            started_so = [*LIMITED, self._cgroup, *started_so] if self._cgroup else started_so
            return super()._execute_child(started_so, *given)
        fds = [own if own != -1 else number for number, own in enumerate((read, write, error))]
        request = {
            "command": args,
            "cwd": os.path.abspath(cwd or "."),
            "env": environment,
            "has_session": has_session,
            "is_parent": self._is_parent,
            "is_worker": self._is_worker,
            "kills": self._kills,
            "disk": self._disk,
            "cgroup": self._cgroup,
            "umask": _umask(),
        }
        try:
            self.pid = self._zygote.start(request, fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*given[9:15])


def own_disk(process: Popen, folder: Path, mark: str) -> Path:
    """The file system of a process that was started with `disk`, as a path of this process.

    It stays until this process ends. `mark` is a file that says that it is there.
    """
    place = Path("/proc", str(process.pid), "root", *folder.parts[1:])
    while not (place / mark).exists():
        assert process.poll() is None, "ended before it used its disk"
        select.select([], [], [], 0.01)
    return Path(f"/proc/self/fd/{os.open(place, os.O_DIRECTORY)}")


def inherit(sock: socket.socket) -> None:
    """Let a forked process fork, too: its wrappers and all children with their own session."""
    _zygote.use(sock, is_inherited=True)
    subprocess.Popen = Popen


def adopt(sock: socket.socket) -> None:
    """Let a forked process of pytest-xdist use an existing forking process."""
    _zygote.use(sock, is_inherited=False)
    _others.clear()  # these belong to the parent process


def run(args: list[str], *, timeout: float, **options: object) -> subprocess.CompletedProcess:
    """As subprocess.run."""
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


PRINT_START = (
    "import json, os, sys; json.dump([sys.argv, os.getcwd(), dict(os.environ)], sys.stdout)"
)


def _asking(text: str) -> str:
    """A command or script that starts Python; it prints how it would start it, instead."""
    python = f" {shlex.quote(sys.executable)} "
    assert text.count(python) == 1, text
    return text.replace(python, f"{python}-ISc {shlex.quote(PRINT_START)} ")


def _started(printed: bytes) -> tuple[list[str], str, dict[str, str]]:
    args, folder, env = json.loads(printed)
    return [sys.executable, *args[1:]], folder, env


def run_script(path: Path) -> subprocess.CompletedProcess:
    """Run a shell's script, from another folder; what it would start is forked."""
    text = path.read_text()
    path.write_text(_asking(text))
    try:
        args, folder, env = _started(subprocess.check_output(["sh", path], cwd="/"))
    finally:
        path.write_text(text)
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return run(args, timeout=200, start_new_session=True, cwd=folder, env=env, **options)


def run_printed(
    output: str, *, in_shell: bool = False, is_forked: bool = True
) -> subprocess.CompletedProcess:
    """Run the last printed command, `cd <folder> && [env A=1] python …`, from another folder.

    Args:
        in_shell: Let a shell read the command, as for a person who pastes it.
        is_forked: Fork what the shell would start; false: let the shell start it.
    """
    lines = [line.strip() for line in output.splitlines()]
    command = next(line for line in reversed(lines) if line.startswith("cd "))
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if in_shell and not is_forked:
        return subprocess.run(command, shell=True, cwd="/", timeout=200, **options)
    if in_shell:
        asked = _asking(command)
        args, folder, env = _started(subprocess.check_output(asked, shell=True, cwd="/"))
    else:
        _, folder, then, *args = shlex.split(command)
        assert then == "&&", command
        env = dict(os.environ)
        if args[0] == "env":
            while "=" in args[1]:
                env.update([args.pop(1).split("=", 1)])
            del args[0]
    options |= {"cwd": folder, "env": env, "is_parent": "-m" in args}
    return run(args, timeout=200, start_new_session=True, **options)
