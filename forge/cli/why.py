"""`forge why`: why a job stopped, waits, restarts or saved nothing, and what helps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from forge.cli import sweep_command
from forge.cli.sweep_command import output, width
from forge.messages import escape
from forge.sweeps import as_json
from forge.sweeps.job import SweepJob
from forge.sweeps.render import Line
from forge.sweeps.status import STYLES
from forge.sweeps.sweep import Sweep
from forge.sweeps.why import answers
from forge.sweeps.why.evidence import Evidence, Explanation

_WHAT = """\
Say why a job stopped, waits, restarts or saved nothing: the cause, the evidence for it, and the
change that helps. Without a job: every job of the sweep that needs attention."""
_EXAMPLES = """\
  forge why 3                    job 3 of the newest sweep here
  forge why lr=0.1,seed=2        a job by its overrides
  forge why 30410_4              a job by its Slurm id
  forge why multirun/2026-01-31/12-00-00 3"""
_COLUMNS = 80


def main(arguments: list[str]) -> int:
    """The command `forge why`."""
    parser = sweep_command.parser("why", _WHAT, _EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="[SWEEP] JOB", help=sweep_command.JOBS)
    parser.add_argument("--json", action="store_true", help="the answers as JSON")
    options = parser.parse_args(arguments)
    return sweep_command.run(lambda: _answer(options.words, is_json=options.json))


def _answer(words: list[str], *, is_json: bool) -> int:
    whole, jobs, are_named = sweep_command.pick(words)
    if not are_named and not whole.is_single:
        jobs = [job for job in jobs if job.needs_attention]
    found = [(job, answers.of_job(Evidence(whole, job))) for job in jobs]
    if is_json:
        rows = [
            {"number": job.number, "directory": job.directory, "state": job.state, "answers": some}
            for job, some in found
        ]
        return output([as_json.dumps({"path": whole.path, "jobs": rows})])
    if not found:
        return output([f"No job of {whole.path} needs attention."])
    return output(_lines(whole, found))


def _lines(whole: Sweep, found: list[tuple[SweepJob, list[Explanation]]]) -> Iterator[Line]:
    columns = width() or _COLUMNS
    for number, (job, some) in enumerate(found):
        if number:
            yield Line("")
        label = f" {escape(job.label)}" if job.label else ""
        name = "run" if whole.is_single else f"job {job.number}"
        yield Line(f"{name}{label}: {job.state.value}", STYLES[job.state])
        for answer in some:
            yield from _wrapped(escape(answer.text), columns, "  ", "")
            for line in answer.evidence:
                if line:
                    yield from _wrapped(escape(line), columns, "    ", "dim")
            for line in answer.remedy:
                yield from _wrapped(escape(line), columns, "  → ", "green")


def _wrapped(text: str, columns: int, lead: str, style: str) -> Iterator[Line]:
    rest = " " * len(lead)
    for line in textwrap.wrap(
        text,
        columns,
        initial_indent=lead,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    ):
        yield Line(line, style)
