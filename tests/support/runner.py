"""A process that has torch imported and forks one job after the other, which saves its import.

Reads JSON lines {"script": …, "directory": …, "spec": …} and answers with the pid, then the exit
code (negative for a signal).
"""

import atexit
import gc
import json
import os
import secrets  # noqa: F401 - imported once, for all jobs, as are those below
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import evaluates
import generators
import loops
import numpy.random  # noqa: F401
import omegaconf._impl  # noqa: F401
import small
import torch
import torch.utils.serialization
import torchdata.stateful_dataloader  # noqa: F401

import forge.resilience.signal_handler
import forge.training.run
import forge.training.session  # noqa: F401
from forge.training.update import Updater

SCRIPTS = {f"{one.__name__}.py": one.main for one in (small, loops, generators, evaluates)}


def serve():
    """Returns in a child only, with the job it is to run."""
    torch.set_num_threads(1)
    # The first optimizer of a process makes torch import a thousand modules.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.freeze()  # else each job, at its end, looks at all of torch's objects, and so copies them
    while line := sys.stdin.readline():
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            return SCRIPTS[job["script"]], Path(job["directory"]), job["spec"]
        print(pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def run():
    job = serve()
    if job is None:
        return
    os.setsid()
    main, directory, spec = job
    output = os.open(directory / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with kills(spec.pop("kill_in_attempt", {})):
        main(directory, spec)
    # Finished: as Python ends, but that torch is not taken apart, half a second of copied pages.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
