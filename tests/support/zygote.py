"""A Python process with torch, Hydra and forge imported, from which test processes are forked.

`warm.py` starts it and sends it requests. A forked process is a child of this process's parent, so
that the requester can wait for it as for any child.
Source: clone(2), CLONE_PARENT; proc(5), stat.
"""

import atexit
import ctypes
import encodings.idna  # noqa: F401 - for the name of a host
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import random
import runpy
import secrets  # noqa: F401 - imported once, for all processes, as are those below
import signal
import socket
import sys
import sysconfig
import threading
import weakref
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import antlr4.LL1Analyzer  # noqa: F401
import hydra._internal.core_plugins
import hydra._internal.logging_config
import hydra.core.config_loader
import hydra.core.utils
import hydra_once
import numpy.random
import omegaconf._impl  # noqa: F401
import torch
import torch.profiler._cupti_monitor
import torch.utils.serialization
import torchdata.stateful_dataloader  # noqa: F401
import warm
from hydra.core.global_hydra import GlobalHydra
from hydra_once import TREE

# The forge of this tree, since a copy with a planted defect is not the installed one.
sys.path.insert(1, TREE)
for plugin in pkgutil.iter_modules(hydra._internal.core_plugins.__path__):
    importlib.import_module(f"hydra._internal.core_plugins.{plugin.name}")
for name in ("popen_fork", "queues", "synchronize"):  # as loaders with workers do
    importlib.import_module(f"multiprocessing.{name}")
for name in (
    "checkpoint.inspection",
    "cli.commands",
    "cli.doctor",
    "cli.main",
    "cli.resume",
    "cli.shown",
    "config.loading",
    "config.unknown",
    "data.pushed",
    "data.skipping",
    "group.liveness",
    "group.ranks",
    "health.devices",
    "health.peers",
    "hydra_app.callbacks",
    "job.local",
    "launch.again.choose",
    "launch.again.local",
    "launch.exec",
    "launch.local.launcher",
    "launch.slurm.launcher",
    "launch.task",
    "loggers",
    "rehearse.command",
    "shutdown.signal_handler",
    "slurm.step",
    "slurm.wrapper",
    "state.ddp_buckets",
    "state.putting_back",
    "state.restoring",
    "state.variables",
    "submitit.checkpointable",
    "sweeps.queue",
    "training.attempt",
    "training.loop.epochs",
    "training.loop.fault_injection",
    "training.loop.loop_lengths",
    "training.loop.pushed",
    "training.loop.snapshot_holder",
    "training.loop.trace_recorder",
    "training.nan.scaling",
    "training.rollback",
    "training.run",
    "training.start.agreement",
):
    importlib.import_module(f"forge.{name}")
Updater = sys.modules["forge.training.nan.update"].Updater
loading = sys.modules["forge.config.loading"]
Policy = sys.modules["forge.config.schema"].Policy
sys.path.remove(TREE)
BASE = sys.path[1:]
JOBS = str(Path(__file__).with_name("jobs")) + os.sep
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}
NEW_NAMESPACE = 0x20000  # unshare(2), of mounts
PRIVATE = 0x44000  # mount(2): MS_REC | MS_PRIVATE
GET_TID_ADDRESS = 40  # prctl(2)
SET_PDEATHSIG = 1
SET_MM, SET_MM_ENV_END = 35, 11
MADV_COLLAPSE = 25  # since Linux 6.1
HUGE = 2 << 20
LIBC = ctypes.PyDLL(None)  # keeps the GIL, which a fork needs


def hide(forking):
    """What a user's process would not have as a child is none that it has to end or wait for."""
    processes = sys.modules["forge.process.processes"]
    really = processes.descendants
    processes.descendants = lambda *of: [pid for pid in really(*of) if pid != forking]


class Imported:
    """The modules imported since a fork: the fingerprint of a job's code touches no page of others.

    Those others are installed, or of the tests.
    """

    last = ModuleType("last before the fork")

    @classmethod
    def values(cls):
        new = takewhile(lambda one: one is not cls.last, reversed(sys.modules.values()))
        return [sys.modules["__main__"], *new]


def use_huge_pages():
    """Use huge pages, since copying and freeing page tables dominates the time of a fork."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        begin, end = (int(one, 16) for one in addresses.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if begin < end and "w" in access and name in ([], ["[heap]"]):
            # An older kernel refuses, without an effect.
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def clone():
    """As os.fork, but the new process has the same parent as this one."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = LIBC.syscall(CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        python.PyOS_AfterFork_Parent()
        return pid
    python.PyOS_AfterFork_Child()
    address = ctypes.c_void_p()  # the C library's copy of the thread id, which fork would update
    if LIBC.prctl(GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0 and address.value:
        ctypes.c_int.from_address(address.value).value = os.getpid()
    return 0


def mount(folder, size):
    """A file system in memory, for this process and those that it starts."""
    path, options = os.fsencode(folder), f"size={size}".encode()
    assert LIBC.unshare(NEW_NAMESPACE) == 0
    assert LIBC.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None) == 0
    assert LIBC.mount(b"tmpfs", path, b"tmpfs", ctypes.c_ulong(0), options) == 0


def serve(asked):
    """Fork on request; returns only in a new process: its request and streams.

    The last two values are the socket of the process that forks for it, and its pid; or None and 0.
    """
    while True:
        try:
            text, fds, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        except OSError:
            text = b""
        if not text:  # the requester has ended
            os._exit(0)
        request = json.loads(text)
        if pid := clone():
            for fd in fds:
                os.close(fd)
            asked.send(str(pid).encode())
            continue
        asked.close()
        if request["cgroup"]:
            Path(request["cgroup"], "cgroup.procs").write_text("0")  # itself
        if request["disk"]:
            mount(*request["disk"])
        if not (request["is_parent"] or request["is_worker"]):
            return request, fds, None, 0
        own, asked_next = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if forking := os.fork():
            asked_next.close()
            return request, fds, own, forking
        # Leave the process's session, since tests signal it as a whole.
        os.setsid()
        LIBC.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        own.close()
        for fd in fds:
            os.close(fd)
        asked = asked_next


def main():
    torch.set_num_threads(1)
    # The first optimizer of a process makes torch import a thousand modules.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for name in filter(None, sys.argv[2].split(",")):
        importlib.import_module(name)
    sys.modules["forge.jobdir.code"].sys = ModuleType("sys")
    sys.modules["forge.jobdir.code"].sys.modules = Imported
    loading.load(None)  # the schema is loaded once for all forks
    hydra_once.use(Policy)
    sysconfig.get_paths()
    sys.modules[Imported.last.__name__] = Imported.last
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # torch's libraries of operators need not be undone in each fork
    gc.collect()
    gc.freeze()  # otherwise each fork's last collection would visit, and so copy, torch's objects
    use_huge_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl+C it ends with pytest
    request, fds, own, forking = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["has_session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, own.fileno() if own else 1 << 16)
    if own:
        os.closerange(own.fileno() + 1, 1 << 16)
    if request["is_worker"]:
        warm.adopt(own)
    else:
        # forge looks for open files at exit: to thaw torch's objects would copy all of them.
        gc.freeze = gc.unfreeze = lambda: None
        if own:
            warm.inherit(own)
            hydra_once.compose_once()
            hide(forking)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    if is_wrapper(request["command"]):
        os.execve = execve  # the supervisor starts the task by execve
    if request["command"][3:4] in (["plan"], ["exec"]):
        os.execv = functools.partial(execv, own)
    with kills(request["kills"]):
        leave(lambda: run(request["command"], request["env"]))


def is_wrapper(command):
    return "forge.job.local" in " ".join(command[:5])


def execv(own, program, command):
    """Emulate execv of a Hydra app, which goes on with the process that forks for it."""
    if own:
        own.set_inheritable(True)
    GlobalHydra.instance().clear()
    execve(program, command, os.environ)


def execve(program, command, environment):
    """Emulate execve for another Python command line, keeping the imported modules."""
    os.execve = real_execve
    if warm.arguments(command, environment) is None:
        os.execve(program, command, environment)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                inherits = os.get_inheritable(int(name))
            except OSError:
                continue
            if not inherits:
                os.close(int(name))
    atexit._clear()
    leave(lambda: run(list(command), dict(environment)))


real_execve = os.execve


def run(command, environment):
    """Run a command line as Python would."""
    replace_environment(environment)
    sys.modules["forge.jobdir.job_dir"].START_DIR = os.getcwd()
    random.seed()  # as in a new interpreter
    numpy.random.seed()
    kind, rest = warm.arguments(command, environment)
    flags = command[1 : len(command) - len(rest)]
    is_unbuffered = "-u" in flags or ("-I" not in flags and environment.get("PYTHONUNBUFFERED"))
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = stream_of(fd, is_unbuffered=bool(is_unbuffered))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.orig_argv[:] = command
    sys.warnoptions.clear()  # remove the filter for warnings of forks
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    base = [one for one in BASE if one not in given]
    sys.path[:] = [*filter(None, given), *base]
    sys.modules.pop("__mp_main__", None)  # multiprocessing's name for this file
    if kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = ModuleType("__main__")
    module.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        if "-I" not in flags:
            sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:] = rest
        module.__file__ = os.path.abspath(rest[0])
        module.__cached__ = None
        sys.path.insert(0, os.path.dirname(os.path.realpath(rest[0])))
        code = code_of(module.__file__)
    exec(code, module.__dict__)


def code_of(script):
    """What a script compiles to; that of one of ours is read, as that of a module."""
    if script.startswith(JOBS):
        return importlib.machinery.SourceFileLoader("__main__", script).get_code("__main__")
    return compile(Path(script).read_bytes(), script, "exec")


def stream_of(fd, *, is_unbuffered):
    raw = io.FileIO(fd, "w" if fd else "r", closefd=False)
    if not fd:
        return io.TextIOWrapper(io.BufferedReader(raw))
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        errors="backslashreplace" if fd == 2 else "strict",
        line_buffering=fd == 2 or raw.isatty(),
        write_through=is_unbuffered,
    )


def replace_environment(environment):
    """Replace the environment, for this process and in /proc/<pid>/environ."""
    for name in list(os.environ):
        del os.environ[name]  # from now on C code has no pointer into the initial environment
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    lines = (f"{name}={value}\0" for name, value in environment.items())
    text = "".join(lines).encode(errors="surrogateescape")
    assert len(text) <= end - start, "ROOM in warm.py is too small"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    # Otherwise readers would find thousands of empty variables after the last one (root only).
    LIBC.prctl(SET_MM, SET_MM_ENV_END, ctypes.c_ulong(start + len(text)), 0, 0)
    os.environ.update(environment)


def leave(begin):
    """Exit like Python, but skip the teardown of torch, half a second of copied pages."""
    code = 0
    try:
        begin()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001 - it ends the process
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError) as error:
            code = code or 120
            if stream is sys.stdout:
                with suppress(OSError, ValueError, AttributeError):
                    text = f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}"
                    print(text, file=sys.stderr)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


@contextmanager
def kills(at):
    """Signal this process in these steps, in any attempt."""
    on_step = Updater.on_step

    def begin_and_kill(self, step):
        on_step(self, step)
        if str(step) in at:
            os.kill(os.getpid(), signal.Signals["SIG" + at[str(step)]])

    if at:
        Updater.on_step = begin_and_kill
    yield


if __name__ == "__main__":
    main()
