"""Where this process was started, wherever the script goes later; `import forge` records it."""

import contextlib
import os

START_DIR = os.sep
"""What relative paths of the command line are relative to."""

with contextlib.suppress(FileNotFoundError):  # the directory was removed
    START_DIR = os.getcwd()
