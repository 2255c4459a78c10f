"""A Python with torch, Hydra and forge imported, which forks one process after the other.

Reads JSON lines {"command": [script, …], "cwd": …, "env": …, "stdout": …, "stderr": …} and answers
with the pid, then the exit code (negative for a signal). `forked.py` is its other end.
"""

import atexit
import gc
import json
import os
import random
import runpy
import secrets  # noqa: F401 - imported once, for all processes, as are those below
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import hydra
import hydra.core.config_loader
import hydra.core.plugins  # noqa: F401
import numpy.random
import omegaconf._impl  # noqa: F401
import torch
import torch.utils.serialization
import torchdata.stateful_dataloader  # noqa: F401

import forge.cli.shown
import forge.hydra_app.callbacks
import forge.resilience.signal_handler
import forge.training.run
import forge.training.session
from forge.training.update import Updater


def serve():
    """Returns in a child only, with what it is to run."""
    torch.set_num_threads(1)
    # The first optimizer of a process makes torch import a thousand modules.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.freeze()  # else each one, at its end, looks at all of torch's objects, and so copies them
    while line := sys.stdin.readline():
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            return job
        print(pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def run():
    job = serve()
    if job is None:
        return
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(job["stdout"], flags, 0o644), 1)
    os.dup2(os.open(job["stderr"], flags, 0o644), 2)
    os.chdir(job["cwd"])
    forge.jobdir.job_dir.START_DIR = job["cwd"]
    os.environ.clear()
    os.environ.update(job["env"])
    random.seed()  # as in a Python that begins
    numpy.random.seed()
    with kills(job["kills"]):
        code = exit_code_of(job["command"])
    # As Python ends, but that torch is not taken apart, half a second of copied pages.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code_of(command):
    """Run what follows `python` on a command line; an exception shows itself as ever."""
    sys.orig_argv[:] = [sys.executable, *command]
    is_module = command[0] == "-m"
    sys.argv[:] = command[1 if is_module else 0 :]
    sys.path[0] = os.getcwd() if is_module else str(Path(command[0]).absolute().parent)
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return 0 if error.code is None else int(error.code) & 0xFF
    return 0


@contextmanager
def kills(at):
    """Signal this process in these steps, in whichever attempt."""
    begin = Updater.begin

    def begin_and_kill(self, step):
        begin(self, step)
        if str(step) in at:
            os.kill(os.getpid(), signal.Signals["SIG" + at[str(step)]])

    Updater.begin = begin_and_kill
    yield


if __name__ == "__main__":
    run()
