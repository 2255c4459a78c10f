"""What people see of a sweep, on real terminals and through real pipes."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from forge.jobdir import jsonl
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State
from forge.launch.progress import display
from forge.launch.progress.display import Display
from forge.launch.progress.news import news
from forge.sweeps import status
from forge.sweeps.job import Metric, SweepJob


def job(number, state=State.running, **facts):
    facts = {
        "label": f"lr=0.001 seed={number}",
        "directory": Path("multirun", str(number)),
        "attempts": facts.pop("restarts", 0) + 1,
    } | facts
    return SweepJob(number=number, overrides=(), state=state, **facts)


def half_done(number, **facts):
    return job(number, **{"step": 500, "steps": 1000, "rate": 4.1, "left_s": 122.0} | facts)


class Terminal:
    """A pseudo-terminal, and what was written to it."""

    def __init__(self, columns, lines):
        self.reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self.columns = columns

    def raw(self):
        found = b""
        while select.select([self.reader], [], [], 0.05)[0]:
            found += os.read(self.reader, 65536)
        return found.decode()

    def screen(self):
        """The lines one would see, when none were scrolled away."""
        return screen_of(self.raw())


def screen_of(raw):
    lines, at = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if token == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            at -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[at] = ""
        elif token[0] not in "\x1b\r":
            lines[at] += token
    return lines


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    opened = []

    def make(columns=80, lines=24):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(lines))
        opened.append(Terminal(columns, lines))
        return opened[-1]

    yield make
    for one in opened:
        with contextlib.suppress(OSError):
            one.stream.close()
        with contextlib.suppress(OSError):
            os.close(one.reader)


OUT_OF_MEMORY = "exit code 1: CUDA out of memory"


def jobs():
    return [
        job(0, State.finished, step=1000, steps=1000),
        half_done(1, restarts=2, because="the node's GPU fell off the bus"),
        job(
            2, State.failed, step=10, steps=1000, because=OUT_OF_MEMORY, frame="train.py:23 in main"
        ),
        half_done(3, label="model=" + "x" * 300 + " seed=漢字"),
        job(4, State.queued),
    ]


def without_time(line):
    """A plain line without the time of day."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", line)


def test_a_terminal_shows_a_row_a_job_and_a_summary(terminal):
    """The sweep must be understood at a glance."""
    at = terminal(200)
    with Display(at.stream) as shown:
        shown.update(jobs())
    screen = at.screen()
    header = max(i for i, line in enumerate(screen) if re.match("job +state", line))
    rows = [line for line in screen[header + 1 :] if re.match(r" *\d +(runn|fail|queu|fini)", line)]
    notes = [line.strip() for line in screen[header + 1 :] if line.startswith("     ")]
    assert [row.split()[:2] for row in rows] == [
        ["0", "finished"],
        ["1", "running"],
        ["2", "failed"],
        ["3", "running"],
        ["4", "queued"],
    ]
    assert re.search(r" 500 \(50%\) +4.1/s +0:02:02 ", rows[1])
    assert "the node's GPU fell off the bus" in notes
    assert "exit code 1: CUDA out of memory, at train.py:23 in main" in notes
    assert "log: multirun/2/output.log" in notes
    assert screen[-2].startswith("1 of 5 finished, 1 failed · 2 running · 1 queued · 2 restarts")
    assert any(line.startswith("job 2: failed at step 10 of 1000 (1%): exit") for line in screen)


@pytest.mark.parametrize("columns", [44, 60, 79, 80, 100, 120, 200])
def test_no_row_is_wider_than_the_terminal(terminal, columns):
    """One wrapped line would tear every frame after it."""
    from rich.cells import cell_len

    at = terminal(columns)
    with Display(at.stream) as shown:
        shown.update(jobs())
    table = at.screen()
    table = table[max(i for i, line in enumerate(table) if line.startswith(("job ", "… "))) :]
    assert max(map(cell_len, table)) <= columns
    assert len([line for line in table if re.match(r" *\d +(runn|fail|queu|fini)", line)]) == 5
    assert any("1 failed" in line for line in table)


def test_overrides_cannot_command_the_terminal_nor_rich(terminal):
    """A value from the command line is text, whatever it contains."""
    at = terminal(120)
    evil = "a=[red]x[/red] b=\x1b]0;owned\x07\x1b[2J\r\n c=\u202e"
    with Display(at.stream) as shown:
        shown.update([job(0, State.failed, label=evil, because="\x1b[31mbad\x07")])
        shown.say("[bold]said[/bold] \x1b[2J", "bold red")
    raw = at.raw()
    assert "\x1b]0" not in raw
    assert "\x1b[2J" not in raw
    assert "\x07" not in raw
    text = "\n".join(screen_of(raw))
    assert r"a=[red]x[/red] b=\x1b]0;owned\x07\x1b[2J\r\n c=\u202e" in text
    assert r"[bold]said[/bold] \x1b[2J" in text


def test_more_jobs_than_lines_shows_those_that_something_happens_to(terminal):
    """Sixty rows do not fit; the two that run matter, and a line says what has failed."""
    at = terminal(80, 12)
    views = [job(i, State.queued if i > 40 else State.finished) for i in range(60)]
    views[38], views[39] = half_done(38), half_done(39)
    views[7] = job(7, State.failed, because="exit code 1")
    with Display(at.stream) as shown:
        shown.update(views)
    screen = [line for line in at.screen() if line]
    assert len(screen) <= 12
    assert "job 7: failed: exit code 1 (multirun/7/output.log)" in screen
    assert [line.split()[0] for line in screen if re.match(r" +\d+ ", line)] == ["38", "39"]
    assert "… 58 more" in screen
    assert screen[-1].startswith("38 of 60 finished, 1 failed · 2 running · 19 queued")


def test_a_thousand_jobs_render_only_what_is_seen(terminal, monkeypatch):
    """Drawing must not take the launcher's time."""
    at, num_rows, draw = terminal(80, 24), [], status.cells
    monkeypatch.setattr(status, "cells", lambda *a: num_rows.append(1) or draw(*a))
    views = [half_done(i) if i % 2 else job(i, State.queued) for i in range(1000)]
    with Display(at.stream) as shown:
        for _ in range(50):
            shown.update(views)
        assert 0 < len(num_rows) <= 24
        at.raw()


def test_the_title_has_what_all_jobs_have_in_common(terminal):
    """A row has room for what differs."""
    at = terminal(100)
    title = display.title(Path("multirun/x"), [("lr=0.1", "seed=1"), ("lr=0.1", "seed=2")])
    with Display(at.stream, title=title) as shown:
        shown.update([half_done(0)])
    assert at.screen()[0] == "sweep multirun/x  (lr=0.1)"


def test_a_job_that_starts_shows_for_how_long(terminal):
    """An import of a minute looks like a hang."""
    at = terminal(100)
    with Display(at.stream) as shown:
        shown.update([job(0, State.starting, since=time.time() - 12.2)])
    (shown_s,) = re.findall(r"^ *0  starting (\d+) s", "\n".join(at.screen()), re.MULTILINE)
    assert 12 <= int(shown_s) < 60


def test_the_last_value_of_a_metric_is_in_the_table(terminal):
    """Whether a job still learns is the first question."""
    at = terminal(100)
    values = {"loss": Metric(0.52, 500, 0.5, 480, 2.0, 1)}
    with Display(at.stream) as shown:
        shown.update([half_done(0, metrics=values)])
    header, row = (line.split() for line in at.screen()[:2])
    assert dict(zip(header, row[:3] + row[4:], strict=False))["loss"] == "0.52"
    assert "best" in header


def test_restarts_between_two_looks_are_still_told(tmp_path):
    """On a busy machine an attempt can begin and end before the launcher looks again."""
    for number, why in ((1, "preempted"), (2, "exit code 0 without `done`")):
        jsonl.append(job_ledger(tmp_path), "requeue", because=why, restarts=number)
    before = job(0, directory=tmp_path)
    seen = [
        half_done(0, directory=tmp_path, restarts=2, because="of now"),
        job(0, State.finished, directory=tmp_path, restarts=2),
    ]
    told = []
    for after in seen:
        stream = io.StringIO()
        with Display(stream, "plain") as shown:
            shown.update([before])
            shown.update([after])
        told.append([without_time(line) for line in stream.getvalue().splitlines()[1:-1]])
    first, second = "job 0: restart 1: preempted", "job 0: restart 2: exit code 0 without `done`"
    assert told[0] == [first, "job 0: restart 2 after step 500 of 1000 (50%): of now"]
    assert told[1] == [first, second, "job 0: finished"]


def test_a_job_that_stops_just_before_its_end_is_not_at_100_percent(tmp_path):
    """The line of the launcher and `forge status` say the same, and 100 % is the end."""
    before = job(0, State.running, directory=tmp_path, step=3, steps=1000)
    stopped = job(0, State.stopped, directory=tmp_path, step=999, steps=1000)
    (line,) = news(stopped, before)
    assert line.startswith("stopped at step 999 of 1000 (99%)")


def test_the_last_summary_has_the_totals_of_the_sweep(tmp_path):
    """What did the interruptions cost?"""
    directory = tmp_path / "0"
    ledger = directory / ".forge" / "ledger"
    ledger.mkdir(parents=True)
    events = [
        ("attempt", 100, {}),
        ("end", 160, {"reason": "preempted"}),
        ("attempt", 170, {}),
        ("end", 200, {"reason": "finished"}),
    ]
    lines = [json.dumps({"kind": kind, "t": t, **more}) for kind, t, more in events]
    (ledger / "job.jsonl").write_text("\n".join(lines) + "\n")
    run = [
        {"kind": "run", "t": 101, "checkpoints": "checkpoints"},
        {"kind": "start", "t": 102, "step": 0},
        {"kind": "save", "t": 130, "step": 20},
        {"kind": "metrics", "t": 150, "step": 35, "values": {}},
        {"kind": "rollback", "t": 151, "step": 35},
    ]
    (ledger / "attempt_0001.jsonl").write_text("\n".join(map(json.dumps, run)) + "\n")
    stream = io.StringIO()
    with Display(stream) as shown:
        shown.update([job(0, State.finished, directory=directory, restarts=1)])
    last = without_time(stream.getvalue().splitlines()[-1])
    assert last == "1 of 1 finished · 1 restart · 15 steps repeated (0:00:30) · 0:00:00"


def test_prints_appear_above_the_table(terminal, monkeypatch):
    """A callback of the user's prints; its line must not tear the table."""
    at = terminal(80)
    monkeypatch.setattr(sys, "stdout", at.stream)
    with Display(at.stream) as shown:
        shown.update([half_done(0)])
        print("printed")
        shown.update([half_done(0)])
    assert sys.stdout is at.stream
    screen = [line for line in at.screen() if line]
    assert screen[0] == "printed"
    assert [line.split()[0] for line in screen[1:]] == ["job", "0", "0"]


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_hang_that_is_only_logged_is_a_line_of_its_own_once(terminal, mode):
    """The table does not show it, and nobody reads the output of a job that runs."""
    at = terminal(200)
    with Display(at.stream, mode) as shown:
        shown.update([half_done(0)])
        for _ in range(3):
            shown.update([half_done(0, hang="rank 3 hangs: no progress")])
        shown.update([half_done(0, hang="rank 1 hangs: no progress")])
        shown.update([half_done(0)])
    lines = [without_time(line) for line in at.screen() if "hangs" in line]
    assert lines == [f"job 0: rank {n} hangs: no progress (multirun/0)" for n in (3, 1)]


def test_a_stdout_that_leads_elsewhere_is_left_alone(terminal, monkeypatch, tmp_path):
    """`python train.py -m > log` keeps its lines in the log."""
    at = terminal()
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with Display(at.stream) as shown:
            shown.update([half_done(0)])
            assert sys.stdout is log
    assert "0 of 1 finished" in at.screen()[-2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_the_terminal_in_order(terminal, error):
    """A hidden cursor outlives the process."""
    at = terminal()
    out, err = sys.stdout, sys.stderr
    with contextlib.suppress(error), Display(at.stream) as shown:
        shown.update([half_done(0)])
        raise error
    raw = at.raw()
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert (sys.stdout, sys.stderr) == (out, err)
    assert screen_of(raw)[-2].startswith("0 of 1 finished · 1 running")


def test_an_interrupted_drawing_still_shows_the_cursor(terminal, monkeypatch):
    """The second Ctrl+C comes at the worst time."""
    at = terminal()
    shown = Display(at.stream)
    shown.update([half_done(0)])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Display, "_draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shown.close()
    assert at.raw().endswith("\x1b[?25h")


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_ci_and_dumb_terminals_get_plain_lines(terminal, monkeypatch, variables):
    at = terminal()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Display(at.stream) as shown:
        shown.update([half_done(0)])
    assert "\x1b" not in at.raw()


def test_no_color_leaves_words(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    at = terminal()
    with Display(at.stream) as shown:
        shown.update([job(0, State.failed)])
    raw = at.raw()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", raw)
    assert "failed" in raw


def test_plain_lines_tell_each_change_once():
    """A log of the sweep is read later, with grep."""
    stream = io.StringIO()
    with Display(stream) as shown:
        shown.update([job(0, State.queued), job(1, State.queued), job(2, State.finished)])
        for _ in range(3):
            shown.update([job(0, State.starting), job(1, State.queued)])
        shown.update([half_done(0), job(1, State.starting)])
        shown.update([job(0, State.queued, restarts=1, because="exit code 69\x1b[2J")])
        shown.update([half_done(0, restarts=1)])
        shown.update(
            [job(0, State.finished, step=1000, steps=1000), job(1, State.failed, because="exit 1")]
        )
        shown.update([job(0, State.finished), job(1, State.failed), job(2, State.finished)])
        shown.say("the end", "bold")
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in stream.getvalue().splitlines())
    *lines, last = map(without_time, stream.getvalue().splitlines())
    assert lines == [
        "job 0: started lr=0.001 seed=0",
        "job 1: started lr=0.001 seed=1",
        r"job 0: restart 1: exit code 69\x1b[2J",
        "job 0: finished at step 1000 of 1000 (100%)",
        "job 1: failed: exit 1 (multirun/1/output.log)",
        "the end",
    ]
    assert last == "2 of 3 finished, 1 failed · 0:00:00"


def test_plain_summaries_are_rare(monkeypatch):
    """A sweep of a day must not fill a log, nor fall silent."""
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    shown = Display(stream)
    for second in range(2000):
        now = float(second)
        shown.update([half_done(0, step=second), job(1, State.queued)])
    assert [without_time(line) for line in stream.getvalue().splitlines()[1:]] == [
        f"0 of 2 finished · 1 running · 1 queued · 0:{minutes}:00" for minutes in (10, 20, 30)
    ]


def test_a_sweep_that_is_to_show_nothing_shows_nothing():
    stream = io.StringIO()
    with Display(stream, mode="none") as shown:
        shown.update([half_done(0), job(1, State.failed)])
        shown.say("nobody asked")
    assert stream.getvalue() == ""


def test_a_reader_that_left_costs_nothing():
    """`| head` must not end the sweep."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with Display(stream) as shown:
        shown.update([half_done(0)])
        shown.say("nobody hears this")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_terminal_that_hung_up_or_was_closed_costs_nothing(terminal):
    for hang_up in (lambda at: os.close(at.reader), lambda at: at.stream.close()):
        at = terminal()
        out = sys.stdout
        with Display(at.stream) as shown:
            shown.update([half_done(0)])
            at.raw()
            hang_up(at)
            shown.say("is written at once, unlike a frame")
            shown.update([half_done(0, step=501)])
        assert sys.stdout is out


def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch):
    """A pager that waits for a key must not stop the restarts."""
    monkeypatch.setattr(display, "PATIENCE_S", 0.05)
    reader, writer = os.pipe()
    with open(writer, "w") as stream, Display(stream) as shown:
        for _ in range(500):
            shown.say("x" * 1000)
    with open(reader, "rb") as unread:
        assert len(unread.read()) < 500 * 1000  # what did not fit into the pipe was dropped


def test_importing_it_does_not_import_rich():
    code = "import sys, forge.launch.progress.display; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
