"""The directory in which this process was started; `import forge` records it before a chdir."""

import contextlib
import os

START_DIR = os.sep
"""The directory to which relative paths on the command line refer."""

with contextlib.suppress(FileNotFoundError):  # the directory was removed
    START_DIR = os.getcwd()
