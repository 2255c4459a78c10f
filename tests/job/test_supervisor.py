"""The supervisor as the parent process of real tasks that misbehave."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from harness import until, wait_for
from warm import Popen

from forge.job.deadline import Deadline
from forge.jobdir.rank_report import RankReport
from forge.process import processes

MARK = "FORGE_TEST_MARK"
STARTER = """
import json, os, sys
from pathlib import Path
from forge.job.supervisor import Supervisor

spec = json.loads(sys.argv[1])
out = os.open(spec["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

class Broken:
    tick_s, section = 0.01, ""

    def tick(self, passed_s, *, is_stopping):
        raise OSError(28, "no space")

parent = os.getpid()
supervisor = os.fork()
if supervisor == 0:
    code = Supervisor(
        [sys.executable, "-c", spec["task"]],
        dict(os.environ),
        out,
        spec["actions"],
        spec["timeout_s"],
        Path(spec["folder"], "report.json"),
        parent,
        hang_watch=Broken() if spec["is_watch_broken"] else None,
    ).run()
    os._exit(code)
print(supervisor, flush=True)
_, status = os.waitpid(supervisor, 0)
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


class Watched:
    """A task below a supervisor, whose parent process acts as the job's wrapper."""

    def __init__(self, folder: Path, task: str, timeout_s: float = 0.5, actions=None, **more):
        self.folder = folder
        self.mark = f"{folder.name}-{os.getpid()}"
        prolog = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\n"
        prolog += f"folder = Path({str(folder)!r})\n"
        spec = {
            "folder": str(folder),
            "task": prolog + textwrap.dedent(task),
            "actions": {"TERM": "stop", "USR2": "requeue"} if actions is None else actions,
            "timeout_s": timeout_s,
            "output": f"{folder}/out.txt",
            "is_watch_broken": False,
            **more,
        }
        self.parent = Popen(
            [sys.executable, "-c", STARTER, json.dumps(spec)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self.mark},
            start_new_session=True,
        )
        self.supervisor = int(self.parent.stdout.readline())
        self.parent.stdout.close()

    def wait_ready(self) -> None:
        wait_for((self.folder / "ready").exists, self.parent, "a task that is ready")

    @property
    def task(self) -> int:
        return processes.descendants(self.supervisor)[0]

    def end(self) -> dict:
        """Wait for the supervisor's end; return its report."""
        self.code = self.parent.wait(60)
        return json.loads((self.folder / "report.json").read_text())

    @property
    def live(self) -> list[int]:
        return processes.marked(MARK, self.mark)

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text()


@pytest.fixture
def watched(tmp_path):
    started = []

    def start(task, **options):
        started.append(Watched(tmp_path, task, **options))
        return started[-1]

    yield start
    for one in started:
        for pid in one.live:
            processes.send(pid, signal.SIGKILL)
        one.parent.wait()


@pytest.mark.parametrize(
    ("task", "code", "exit_code"),
    [
        ("sys.exit(0)", 0, 0),
        ("sys.exit(75)", 75, 75),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 137),
        ("os.abort()", -6, 134),
        ("import ctypes; ctypes.string_at(0)", -11, 139),
    ],
)
def test_it_reports_how_the_task_ended(task, code, exit_code, watched):
    """The exit code alone is the same for a kill and for `sys.exit(137)`."""
    one = watched(task)
    assert RankReport(**one.end() | {"time": 0.0}) == RankReport(code=code)
    assert one.code == exit_code


def test_daemons_of_the_task_do_not_survive_it(watched):
    """A logger's daemon that forks twice and leaves the session would hold the GPU forever."""
    one = watched(
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (folder / "ready").touch()
                time.sleep(600)
            os._exit(0)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        """
    )
    assert one.end()["code"] == 0
    assert one.live == []


@pytest.mark.slow
def test_what_the_gil_holds_hostage_is_shown_and_killed(watched):
    """A C call that never releases the GIL blocks every deadline inside the process."""
    one = watched(
        """
        import ctypes, faulthandler
        from forge.process.stacks import ALL_SIGNAL
        faulthandler.register(ALL_SIGNAL, file=2, all_threads=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        take, lock = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        take(lock)
        def stuck_here():
            (folder / "ready").touch()
            take(lock)  # whatever the signal, it never returns
        stuck_here()
        """,
        timeout_s=0.1,
    )
    one.wait_ready()
    os.kill(one.supervisor, signal.SIGTERM)
    report = one.end()
    assert (report["code"], report["is_held"]) == (-9, True)
    assert "in stuck_here" in one.output
    assert one.live == []


def test_signals_are_passed_on_and_a_prompt_end_is_no_hang(watched):
    """A user who signals the supervisor's pid means the task."""
    one = watched(
        """
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        (folder / "ready").touch()
        time.sleep(600)
        """
    )
    one.wait_ready()
    os.kill(one.supervisor, signal.SIGUSR2)
    assert one.end()["code"] == 75


def test_a_signal_before_the_task_has_handlers_waits_for_them(watched):
    """Imports take half a minute on a network disk; the default action would kill the job."""
    one = watched(
        """
        while not (folder / "go").exists():
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        time.sleep(600)
        """,
        timeout_s=30,
    )
    until(lambda: processes.descendants(one.supervisor), "start of the task")
    os.kill(one.supervisor, signal.SIGTERM)
    until(lambda: _is_pending(one.task, signal.SIGTERM), "pending signal")
    (one.folder / "go").touch()
    assert one.end()["code"] == 143


def _is_pending(pid: int, number: int) -> bool:
    status = Path("/proc", str(pid), "status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "traced"])
def test_a_task_that_cannot_run_is_no_hang(how, watched, monkeypatch):
    """Gang scheduling stops a job for minutes, a debugger for any length of time."""
    one = watched(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        (folder / "ready").touch()
        time.sleep(600)
        """,
        timeout_s=0.1,
    )
    one.wait_ready()
    task = one.task
    libc = ctypes.CDLL(None, use_errno=True)
    if how == "stopped":
        os.kill(task, signal.SIGSTOP)
    else:
        attach, detach = 16, 17
        if libc.ptrace(attach, task, 0, 0) != 0:
            pytest.skip("ptrace is not allowed here")
    until(lambda: processes.is_suspended(task), "suspended task")
    os.kill(one.supervisor, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # the task's deadline, of 5.1 s, passes
        one.parent.wait(7)
    if how == "stopped":
        os.kill(task, signal.SIGCONT)
    else:
        os.waitpid(task, 0x40000000)  # __WALL: the task has stopped for this tracer
        libc.ptrace(detach, task, 0, 0)
    report = one.end()
    assert (report["code"], report["is_held"]) == (143, False)


def test_the_task_dies_with_its_supervisor(watched):
    """Otherwise the next start of the job would run at the same time as this process."""
    one = watched("(folder / 'ready').touch(); time.sleep(600)")
    one.wait_ready()
    os.kill(one.supervisor, signal.SIGKILL)
    assert one.parent.wait(60) == 256 - 9
    until(lambda: one.live == [], "end of the task")
    assert not (one.folder / "report.json").exists()


def test_a_supervisor_whose_parent_is_gone_stops_the_task_in_order(watched):
    """If the wrapper was killed, the task still saves its steps since the last save."""
    one = watched(
        """
        def save(*_):
            (folder / "saved").touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        (folder / "ready").touch()
        time.sleep(600)
        """,
        timeout_s=10,
    )
    one.wait_ready()
    one.parent.kill()
    one.parent.wait()
    until((one.folder / "report.json").exists, "report of the supervisor")
    assert json.loads((one.folder / "report.json").read_text())["code"] == 143
    assert (one.folder / "saved").exists()
    until(lambda: one.live == [], "end of the supervisor")


@pytest.mark.slow
def test_an_ignored_signal_starts_no_deadline(watched):
    """A signal that `signal.actions` maps to `save` must not start the deadline of a stop."""
    one = watched(
        """
        signal.signal(signal.SIGUSR1, lambda *_: (folder / "heard").touch())
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        """,
        actions={"USR1": "save", "TERM": "stop"},
        timeout_s=0.1,
    )
    one.wait_ready()
    os.kill(one.supervisor, signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        one.parent.wait(6)
    (one.folder / "go").touch()
    assert one.end()["code"] == 0


def announced(folder, **environment):
    """A deadline that the announcement of the time limit has begun, 60 s early."""
    deadline = Deadline(5.0, environment, folder)
    deadline.begin(10.0, is_announced=True)
    return deadline


def test_a_task_that_is_told_early_is_not_held(tmp_path):
    """The task trains until its save just fits; a preemption before that stops it at once."""
    deadline = announced(tmp_path, FORGE_END_TIME=str(time.time() + 70))
    assert 70 < deadline.left_s <= 75
    deadline.begin(10.0)
    assert deadline.left_s == 15
    deadline.begin(10.0, is_announced=True)
    assert deadline.left_s == 15


def test_a_limit_that_was_extended_moves_the_deadline(tmp_path):
    """The supervisor reads the new time limit, as the task does."""
    deadline = announced(tmp_path, FORGE_END_TIME=str(time.time() + 70))
    (tmp_path / "end_time").write_text(str(time.time() + 500))
    assert not deadline.pass_by(80.0)
    assert 500 < deadline.left_s <= 505
    (tmp_path / "end_time").write_text(str(time.time() - 1))
    assert deadline.pass_by(600.0)


def test_a_full_disk_does_not_keep_a_task_from_being_killed(watched):
    """The supervisor cannot write its message into the task's output, and must not crash."""
    one = watched("(folder / 'ready').touch(); time.sleep(600)", timeout_s=0.1, output="/dev/full")
    one.wait_ready()
    os.kill(one.supervisor, signal.SIGTERM)
    report = one.end()
    assert (report["code"], report["is_held"]) == (-9, True)


def test_what_watches_a_task_never_ends_it(watched):
    """Errors of the hang detection, as on a full disk, are logged once; the task continues."""
    task = "(folder / 'ready').touch(); sys.stdin.read(); time.sleep(0.5)"
    one = watched(task, is_watch_broken=True)
    assert one.end()["code"] == 0
    text = "forge: hang detection failed; training continues, and forge tries again: "
    text += "OSError: [Errno 28] no space\n"
    assert one.output == text
