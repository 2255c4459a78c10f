"""Opening forge's own files safely, even if other users can write to the job's directory.

Another user can put a link to one of our files there, a pipe that blocks, or code to be executed.
So links are not followed, only regular files are opened, and a file that decides what forge
executes is read only if no other user could have written it or put it there; the check uses the
open descriptor.

Files in `.forge` are opened relative to the open directory, which a group can only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from forge.errors import ConfigError, Untrusted
from forge.filesystem import durable, foreign
from forge.filesystem.foreign import foreign_file

FORGE = ".forge"
"""Name of forge's own directory in the directory of a job or sweep."""
DIRECTORY_MODE = 0o755
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def open_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file; the descriptor is never 0, 1 or 2.

    Args:
        mode: The permissions of a file that it creates.
    Raises:
        OSError: Also if it is a link, a pipe or another kind of file.
    """
    with _reached(path) as (folder, name):
        return _open_plain(path, name, flags, folder, mode)


def read_plain(path: Path) -> bytes:
    """The bytes of a regular file, whoever wrote it."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def open_trusted(path: Path) -> int:
    """Open a file that is executed, or that decides what is executed, for reading.

    Raises:
        Untrusted: If another user could have written it or put it there.
    """
    with _reached(path, is_trusted=True) as (folder, name):
        fd = _open_plain(path, name, os.O_RDONLY, folder)
    try:
        _check(fd, path, path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_trusted(path: Path) -> bytes:
    """The bytes of such a file; raises as `open_trusted` does."""
    with os.fdopen(open_trusted(path), "rb") as file:
        return file.read()


def read_if_there(path: Path) -> str:
    """The text of such a file; empty if it does not exist."""
    try:
        return read_trusted(path).decode(errors="replace")
    except FileNotFoundError:
        return ""


def append(path: Path, lines: str) -> None:
    """Append lines and sync; a line that a crash tore before stays separate."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as file:
        file.write(b"\n" + lines.encode())
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str | bytes, *, is_synced: bool = False) -> None:
    """Replace a small file in one step; `is_synced` also makes it survive a power cut."""
    with _reached(path) as (folder, name):
        temporary = os.path.join(
            os.path.dirname(name), f".{path.name.lstrip('.')}.tmp-{secrets.token_hex(8)}"
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = _open_plain(path, temporary, flags, folder)
            try:
                write_all(fd, text.encode() if isinstance(text, str) else text)
                if is_synced:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if is_synced and folder is not None:
            os.fsync(folder)  # the name as well
        elif is_synced:
            durable.sync_directory(path.parent)


def write_all(fd: int, content: bytes) -> None:
    """Write all bytes, in as many writes as the system needs."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def make_directory(path: Path) -> None:
    """Create `.forge`, or a directory in it, and its parents.

    The permissions ignore the umask: a group that could write there could replace executed files.
    """
    _check_claimed(path)
    own = [one for one in (path, path.parent) if FORGE in (one.name, one.parent.name)]
    (own[-1].parent if own else path).mkdir(parents=True, exist_ok=True)
    for one in reversed(own):
        try:
            one.mkdir(DIRECTORY_MODE)
        except FileExistsError:
            with _reached(one / "any"):
                pass


def make_trusted_directory(path: Path) -> None:
    """Like `make_directory`, for files that are executed.

    Raises:
        Untrusted: If another user can write there, or created it.
    """
    make_directory(path)
    check_trusted(path)


def check_trusted(path: Path) -> None:
    """Check a directory whose files decide what forge executes, or which processes it ends.

    Raises:
        Untrusted: If another user can write there, or created it.
    """
    with _reached(path / "any", is_trusted=True):
        pass


@contextlib.contextmanager
def _reached(path: Path, *, is_trusted: bool = False) -> Iterator[tuple[int | None, str]]:
    """(open directory, name in it) of a file in `.forge`; for other files (None, path).

    Raises:
        Untrusted: With `is_trusted`, if another user can write to one of forge's directories.
    """
    names = path.parts
    if FORGE not in names[-3:-1]:
        yield None, str(path)
        return
    _check_claimed(path)
    begin = len(names) - 1 - names[::-1].index(FORGE)
    folder = None
    try:
        for end in range(begin + 1, len(names)):
            name = os.path.join(*names[:end]) if folder is None else names[end - 1]
            inner = _open_folder(path, name, folder)
            if folder is not None:
                os.close(folder)
            folder = inner
            if is_trusted:
                place = Path(*names[:end])
                _check(folder, place, place)
        yield folder, path.name
    finally:
        if folder is not None:
            os.close(folder)


def _check_claimed(path: Path) -> None:
    if problem := foreign.replaced(path):
        raise OSError(errno.ESTALE, problem, str(path))


def _open_folder(path: Path, name: str, folder: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        problem = error.strerror
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            problem = f"{name} is a link or a file, not a directory: remove it"
        raise OSError(error.errno, problem, str(path)) from error


def _open_plain(path: Path, name: str, flags: int, folder: int | None, mode: int = 0o644) -> int:
    reserve_standard()
    try:
        fd = os.open(name, flags | _PLAIN, mode, dir_fd=folder)
    except OSError as error:
        problem = error.strerror
        if error.errno == errno.ELOOP:
            problem = "is a link, and forge does not follow links here: remove it"
        if error.errno == errno.ENXIO:
            problem = "is a pipe or a socket, not a file: remove it"
        raise OSError(error.errno, problem, str(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file: remove it", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, path: Path, folder: Path) -> None:
    problem = foreign_file(fd, folder)
    if problem is None:
        return
    own = next((one for one in (path, *path.parents) if one.name == FORGE), path)
    raise Untrusted(
        f"{path} {problem}. forge executes its content, so anyone who can write it could run code"
        " as you. Expected: owned by you or root, and writable only by the owner. If you trust the"
        f" content: first `chown -R` {own} to you, if it is not yours; then `chmod -R go-w {own}`."
        " Otherwise choose a directory of your own (`hydra.run.dir`, `hydra.sweep.dir`)."
    )


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End a process of a job with the error's message and exit code."""
    try:
        yield
    except (ConfigError, Untrusted) as error:
        os.write(2, f"forge: {error}\n".encode(errors="replace"))
        raise SystemExit(int(error.exit_code)) from error


def reserve_standard() -> None:
    """Open /dev/null for stdin, stdout and stderr if they are closed.

    Otherwise another file would get such a descriptor, and printed text would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno == errno.EBADF:  # `open` returns the lowest free number: this one
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 - positional there
