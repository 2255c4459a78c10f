"""Small files that can be written again on a full disk: they are longer than they need to be.

Such a disk has no room for another file, but for new content in the place of the one that is there.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge.errors import is_disk_full
from forge.filesystem.files import open_file, write_atomically


def write_padded(path: Path, text: str, num_bytes: int) -> None:
    """Replace a file; on a full disk in the place of the one that is there.

    Args:
        path: The file, in `.forge`.
        text: Its content; spaces are added at its end.
        num_bytes: How long it is made, at least.
    Raises:
        OSError: Where it cannot be written; the one before stays.
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
