"""`forge collect`: the results of a sweep as a table."""

from __future__ import annotations

import argparse

from forge.cli import sweep_command
from forge.cli.sweep_command import output, width
from forge.messages import escape
from forge.sweeps import as_json, collect, words
from forge.sweeps.render import Line

_WHAT = """\
Print the results of a sweep: each job's overrides, what main returned, and the last and the best
value of each metric. It reads what is there, also while jobs run, and starts nothing."""
_EXAMPLES = """\
  forge collect                            the newest sweep here
  forge collect --csv > results.csv
  forge collect --metric val_acc:max --json
  python: forge.sweep("multirun/2026-01-31/12-00-00").frame()"""


def main(arguments: list[str]) -> int:
    """The command `forge collect`."""
    parser = sweep_command.parser("collect", _WHAT, _EXAMPLES)
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help=sweep_command.WHERE)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--csv", action="store_true", help="CSV; the default if the output is a file"
    )
    kinds.add_argument("--json", action="store_true", help="JSON")
    what = "only this metric (NAME, NAME:max or NAME:min); can be given several times"
    parser.add_argument("--metric", action="append", metavar="NAME", default=[], help=what)
    return sweep_command.run(lambda: _print(parser.parse_args(arguments)))


def _print(options: argparse.Namespace) -> int:
    whole, jobs = sweep_command.read(options.sweep)
    found = collect.rows(jobs, options.metric)
    if options.json:
        return output([as_json.dumps({"path": whole.path, "rows": found})])
    columns = width()
    if options.csv or columns is None:
        return output(collect.as_csv(found).splitlines())
    return output(_table(found, columns))


def _table(found: list[dict[str, object]], columns: int) -> list[Line]:
    """Aligned columns, as many as fit, without the directory."""
    names = [name for name in collect.columns(found) if name != "directory"]
    cells = [[_cell(row.get(name)) for name in names] for row in found]
    widths = [max(len(name), *(len(row[n]) for row in cells)) for n, name in enumerate(names)]
    kept, used = [], 0
    for number, size in enumerate(widths):
        if used + size > columns:
            break
        kept.append(number)
        used += size + 2
    lines = [
        Line("  ".join(f"{row[n]:>{widths[n]}}" for n in kept), style)
        for row, style in [(names, "dim"), *((row, "") for row in cells)]
    ]
    rest = [names[n] for n in range(len(names)) if n not in kept]
    if rest:
        lines.append(Line(f"and {', '.join(rest)}: `forge collect --csv` has all columns", "dim"))
    return lines


def _cell(value: object) -> str:
    if isinstance(value, float):
        return words.number(value)
    return "" if value is None else escape(str(value))
