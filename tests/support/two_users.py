"""Two users of one machine, who share a group and a directory; only root can play both."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forge import messages

VICTIM, ATTACKER, GROUP = 65533, 65534, 4321
LIMIT_S = 60
PRECIOUS = "what took months\n"


@dataclass(frozen=True)
class Said:
    """How a user's process ended."""

    code: int
    text: str


@dataclass(frozen=True)
class Place:
    """A directory that both write to (setgid, as clusters have them), and one of the victim's."""

    shared: Path
    home: Path

    @property
    def precious(self) -> Path:
        """A file that nobody but the victim may change, and forge has no business with."""
        return self.home / "precious.txt"

    @property
    def trophy(self) -> Path:
        """There once the attacker's code has run; it belongs to whom it ran as."""
        return self.shared / "trophy"

    @property
    def job(self) -> Path:
        return self.shared / "sweep" / "0"

    def is_intact(self) -> bool:
        """Whether nothing of the victim's has changed, and no code has run as the victim."""
        theirs = {path.name for path in self.home.rglob("*")}
        expected = {"precious.txt", "other", "step_5", "kept.txt"}
        return (
            self.precious.read_text() == PRECIOUS
            and theirs == expected
            and not os.path.lexists(self.trophy)
        )


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Such directories; not below pytest's own, which are closed to others."""
    base = Path(tempfile.mkdtemp(prefix="forge-attacks-"))
    base.chmod(0o755)
    found = Place(base / "shared", base / "home")
    found.shared.mkdir()
    os.chown(found.shared, 0, GROUP)
    found.shared.chmod(0o2775)
    (found.home / "other" / "step_5").mkdir(parents=True)
    (found.home / "other" / "step_5" / "kept.txt").touch()
    found.precious.write_text(PRECIOUS)
    for path in (found.home, *found.home.rglob("*")):
        os.chown(path, VICTIM, GROUP)
    try:
        yield found
    finally:
        shutil.rmtree(base)


def as_user(uid: int, act: Callable[[], object]) -> Said:
    """Let `act` be done by this user, under umask 002; what the process printed, or raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            code = _act(uid, writer, act)
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return Said(os.waitstatus_to_exitcode(status), text)


def _act(uid: int, writer: int, act: Callable[[], object]) -> int:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)  # a pipe that nobody writes to, say
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(uid)
    os.umask(0o002)
    os.chdir("/")
    logging.root.handlers.clear()  # of the test runner: what forge says goes to stderr
    try:
        found = act()
        messages.wait(600)  # on a busy machine nobody waits for what is said
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - it is what the test looks at
        os.write(2, "".join(traceback.format_exception_only(error)).encode())
        return 1
    os.write(1, b"" if found is None else f"{found}\n".encode())
    return 0
