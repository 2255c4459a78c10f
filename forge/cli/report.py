"""`forge report`: a sweep as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge import messages
from forge.cli import sweep_command
from forge.filesystem.files import write_atomically

_WHAT = """\
Write a report of a sweep into one HTML file that opens without a network: a timeline of all
attempts, what the time went into, work lost, metrics over restarts, overrides against the best
value, stops by reason and node, hangs and NaNs, and saves. Nothing else is changed."""
_EXAMPLES = """\
  forge report                     the newest sweep here, into report.html
  forge report 30410 -o sweep.html --metric val_acc:max"""
_EXTRA = "forge report needs plotly: `pip install 'hydra-forge[report]'`, or `pip install plotly`"


def main(arguments: list[str]) -> int:
    """The command `forge report`."""
    parser = sweep_command.parser("report", _WHAT, _EXAMPLES)
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help=sweep_command.WHERE)
    file = "the file to write (default: report.html in the current directory)"
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", default=Path("report.html"), help=file
    )
    what = "the metric to compare; NAME:max or NAME:min says which value is the best one"
    parser.add_argument("--metric", metavar="NAME", default="", help=what)
    return sweep_command.run(lambda: _write(parser.parse_args(arguments)))


def _write(options: argparse.Namespace) -> int:
    from forge.sweeps.report import data

    try:
        from forge.sweeps.report import page
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        sys.stderr.write(f"forge: {_EXTRA}.\n")
        return sweep_command.USAGE
    whole, _ = sweep_command.read(options.sweep)
    report = data.collect(whole, options.metric)
    try:
        write_atomically(options.output, "\n".join(page.lines(report)))
    except OSError as error:
        text = f"forge: `--output {options.output}` cannot be written: {error.strerror}.\n"
        sys.stderr.write(messages.escape(text, "\n"))
        return sweep_command.USAGE
    return sweep_command.output([str(options.output)])
