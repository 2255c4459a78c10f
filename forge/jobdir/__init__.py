"""A job's own directory: its small files, identity, ledger and verdict."""

import contextlib
import os

START_DIR = os.sep
"""The directory in which this process was started, to which relative paths of its command refer.

`import forge` records it, before the script can change its directory.
"""

with contextlib.suppress(FileNotFoundError):  # the directory was removed
    START_DIR = os.getcwd()
