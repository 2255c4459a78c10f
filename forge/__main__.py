"""`python -m forge` is the command `forge`."""

import sys

from forge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
