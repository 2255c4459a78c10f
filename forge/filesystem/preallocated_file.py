"""Small files that can be rewritten on a full disk: they are padded with spaces.

A full disk has no room for a new file, but an existing file can be overwritten in place.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge.errors import is_disk_full
from forge.filesystem.files import open_file, write_atomically


def write_padded(path: Path, text: str, num_bytes: int) -> None:
    """Replace a file atomically; on a full disk, overwrite it in place.

    Args:
        path: The file, in `.forge`.
        text: Its content; spaces are added at its end.
        num_bytes: Its minimum length.
    Raises:
        OSError: If it cannot be written; the old content stays.
    """
    try:
        write_atomically(path, text.ljust(num_bytes))
    except OSError as error:
        if not (is_disk_full(error) and _overwrite(path, text)):
            raise


def _overwrite(path: Path, text: str) -> bool:
    try:
        fd = open_file(path, os.O_WRONLY)
        try:
            size = os.fstat(fd).st_size
            return len(text) <= size and os.pwrite(fd, text.ljust(size).encode(), 0) == size
        finally:
            os.close(fd)
    except OSError:
        return False
