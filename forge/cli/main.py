"""The command `forge`: finds the command of that name and runs it.

Every command ends with 2 if its arguments are wrong, as most commands of Unix do; the page
docs/reference/cli.md has the other exit codes.
"""

from __future__ import annotations

import platform
import sys

from forge import messages
from forge._version import __version__
from forge.cli import commands
from forge.errors import ExitCode

USAGE = 2
"""Exit code if the arguments of a command are wrong; argparse's, too."""


def main() -> int:
    """Run the command line `forge …`.

    Returns:
        The exit code.
    """
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(commands.help_text())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"forge {__version__} (Python {platform.python_version()})\n")
        return 0
    if not name:
        sys.stderr.write(commands.help_text())
        return USAGE
    command = commands.COMMANDS.get(name)
    if command is None:
        sys.stderr.write(messages.escape(f"forge: {commands.unknown(name)}\n", "\n"))
        return USAGE
    try:
        return command.main(arguments)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
