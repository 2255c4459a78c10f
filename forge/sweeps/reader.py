"""Reads a sweep, or a single run, from its directory; it writes nothing and locks nothing.

Files of an earlier version of forge, torn lines and missing files are read as far as possible, and
`Job.missing` says what is missing. Each job costs a few small reads, whatever its ledgers' size.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import Reason
from forge.filesystem.files import read_plain
from forge.jobdir import cancel_request, job_state, jsonl, ledger, ledger_writer, process_id
from forge.jobdir.job_files import PLAN, STATE, VERDICT, forge_dir, job_ledger, step_dirs, step_of
from forge.jobdir.job_state import JobState, State
from forge.jobdir.ledger import Progress
from forge.sweeps import attempts, ledger_tail
from forge.sweeps.job import SavedCheckpoint, SweepJob
from forge.sweeps.ledger_tail import LedgerTail
from forge.sweeps.liveness import HeldLocks

INDEX = "jobs.jsonl"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class JobPlace:
    """A job's number and directory, in the index of its sweep."""

    number: int
    subdir: str
    overrides: tuple[str, ...]
    """Sorted by the launcher, since their order makes no difference."""


@dataclass(frozen=True)
class Files:
    """The small files of a job, as they were read."""

    state: JobState | None
    plan: dict[str, Any]
    verdict: dict[str, Any]
    progress: Progress | None
    ledger: LedgerTail
    cancel: dict[str, Any]
    """The request to cancel the job; empty if there is none."""
    history: list[jsonl.Event]
    """The events of the job's wrapper, over all of its starts."""
    problems: list[str] = field(default_factory=list)


def places(index: str) -> tuple[list[JobPlace], int]:
    """The jobs in the text of a sweep's index, by their numbers, and the number of bad lines."""
    found: dict[int, JobPlace] = {}
    bad = 0
    for line in filter(str.strip, index.split("\n")):
        try:
            entry = json.loads(line)
            number = int(entry["number"])
            found[number] = JobPlace(number, str(entry["subdir"]), tuple(entry["overrides"]))
        except (ValueError, KeyError, TypeError):
            bad += 1  # torn by a crash: that job had not begun
    return [found[number] for number in sorted(found)], bad


def labels(jobs: Iterable[tuple[str, ...]]) -> tuple[list[str], list[str]]:
    """The overrides that differ between jobs, a text for each job; and those common to all."""
    known = [list(one) for one in jobs]
    common = set.intersection(*map(set, known)) if len(known) > 1 else set()
    shared = [one for one in known[0] if one in common] if known else []
    return [" ".join(one for one in own if one not in common) for own in known], shared


# -- a job -------------------------------------------------------------------------------------


def files_of(directory: Path) -> Files:
    """Read the small files of a job; what cannot be read is empty, and a problem."""
    problems: list[str] = []
    own = forge_dir(directory)
    names = (STATE, PLAN, VERDICT, cancel_request.FILE)
    content, plan, verdict, cancel = (read_json(own / name, problems) for name in names)
    state = job_state.decoded(content) if content else None
    if content and state is None:
        problems.append(f"{own / STATE} is of another version of forge")
    progress, found = None, LedgerTail()
    try:
        progress = ledger.read_progress(directory)
        found = ledger_tail.read(directory)
    except OSError as error:
        problems.append(_problem(own / "ledger", error))
    try:
        history = list(jsonl.events(job_ledger(directory)))
    except OSError as error:
        history = []
        problems.append(_problem(job_ledger(directory), error))
    return Files(state, plan, verdict, progress, found, cancel, history, problems)


def read_job(place: JobPlace, directory: Path, label: str, locks: HeldLocks) -> SweepJob:
    """The job in a directory, as it is now."""
    files = files_of(directory)
    now = _state(files, directory, locks)
    if now is State.lost:  # or it has begun since the locks were read, or has ended since
        locks = HeldLocks()
        files = files_of(directory)
        now = _state(files, directory, locks)
    state, problems = files.state, files.problems
    if not files.ledger.is_whole:
        problems.append("the ledger is long, so the best values cover only its end")
    checkpoint = lost_step = None
    if files.ledger.number:
        try:
            checkpoint = newest(Path(directory, files.ledger.checkpoints))
            if checkpoint is None:
                lost_step = ledger_writer.last_save(directory, files.ledger.checkpoints)
        except OSError as error:
            problems.append(_problem(Path(directory, files.ledger.checkpoints), error))
    starts = [one for one in files.history if one["kind"] == "attempt"]
    found = map(attempts.end_of, attempts.by_attempt(files.history))
    ends = Counter(str(one.get("reason", "")) for one in found if one is not None)
    reason, because, code = _why(files, now)
    progress = files.progress
    rate, left_s = _speed(files, now)
    steps = progress.planned if progress else None
    return SweepJob(
        number=place.number,
        directory=directory,
        overrides=place.overrides or tuple(files.plan.get("overrides") or ()),
        state=now,
        label=label,
        reason=reason,
        because=because,
        frame=str(files.verdict.get("frame") or "") if now is State.failed else "",
        code=code,
        rank=state.rank if state else 0,
        step=steps if now is State.finished and steps else progress and progress.step,
        steps=steps,
        attempts=len(starts) or files.ledger.number,
        ends=ends,
        checkpoint=checkpoint,
        lost_step=lost_step,
        start_problem=str((files.ledger.start or {}).get("problem", "")),
        save_every_s=(files.ledger.start or {}).get("every_s"),
        metrics=files.ledger.metrics,
        rate=rate,
        left_s=left_s,
        node=(state.nodes if state else "") or files.ledger.host,
        slurm_id=state.job if state else "",
        hang=state.hang if state else "",
        began=starts[0].get("t") if starts else files.ledger.began,
        since=state.time if state else None,
        pid=state.pid if state else (files.ledger.start or {}).get("pid"),
        has_wrapper=bool(files.plan) or not files.ledger.number,  # only launchers queue jobs
        is_cancelled=_is_cancelled(files, now, reason),
        is_command=files.plan.get("exec") is not None,
        missing=tuple(problems),
    )


def newest(checkpoints: Path) -> SavedCheckpoint | None:
    """The newest committed checkpoint in a directory; a directory without a manifest is none."""
    try:
        found = step_dirs(checkpoints)
    except FileNotFoundError:
        return None
    for path in found:
        try:
            saved = (path / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            continue  # it is being written, or removed
        return SavedCheckpoint(path, step_of(path) or 0, saved)
    return None


def refusal(history: list[jsonl.Event]) -> str:
    """The message with which sbatch refused the job; empty if sbatch has accepted it since."""
    last = history[-1] if history else {}
    return str(last["text"]) if last.get("kind") == "refused" else ""


def _state(files: Files, directory: Path, locks: HeldLocks) -> State:
    if refusal(files.history):
        return State.failed
    is_waiting = files.state is None or files.state.state in (State.queued, State.starting)
    if files.cancel and is_waiting and locks.is_held(directory) is not True:
        return State.stopped  # before it has run, or again
    if files.state is None:
        return _without_state(files, directory, locks)
    state = files.state.state
    if state is State.starting and files.state.job:
        state = State.queued  # requeued: it waits for an allocation
    if state is State.running and not _has_stepped(files):
        state = State.starting
    is_here = state.is_active or (state is State.queued and not files.state.job)
    return _alive(state, files, directory, locks) if is_here else state


def _without_state(files: Files, directory: Path, locks: HeldLocks) -> State:
    """The state of a job without a state file: it has not begun, or nothing watches over it."""
    if files.ledger.number == 0:
        return State.queued
    end = files.ledger.end
    if end is None:
        state = State.running if _has_stepped(files) else State.starting
        return _alive(state, files, directory, locks)
    if end["kind"] == "finish":
        return State.finished
    return State.stopped if end["kind"] == "stop" else State.failed


def _alive(state: State, files: Files, directory: Path, locks: HeldLocks) -> State:
    """The state, or `lost` if it is certain that the job's processes have ended."""
    recorded, start = files.state, files.ledger.start or {}
    host = recorded.host if recorded else files.ledger.host
    if host and host != locks.host:
        return state  # its processes are on another machine
    if recorded is not None and files.plan:  # its wrapper has the lock as long as a process lives
        return State.lost if locks.is_held(directory, recorded.pid) is False else state
    pid, ticks = (recorded.pid, "") if recorded else (start.get("pid"), start.get("ticks", ""))
    return state if pid is None or _is_process(int(pid), ticks) else State.lost


def _is_process(pid: int, ticks: str) -> bool:
    """Whether the process lives; if `ticks` are known, no later process with its pid counts."""
    now = process_id.ticks(pid)
    if now and ticks:
        return now == ticks
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _has_stepped(files: Files) -> bool:
    """Whether the running attempt has begun a step, or is a command without steps."""
    if files.state is not None and not files.state.has_steps:
        return True
    since = files.state.began if files.state else 0.0
    return files.progress is not None and files.progress.began >= since


def _why(files: Files, now: State) -> tuple[str, str, int | None]:
    """Reason, text and exit code of the end of the job, or of its last attempt."""
    if now is State.finished:
        return Reason.finished.name, "", 0
    if files.cancel and now is State.stopped:
        return Reason.cancelled.name, f"cancelled by {files.cancel.get('by', 'a person')}", None
    if now is State.lost:
        return "", "its processes have ended without recording why", None
    if text := refusal(files.history):
        return "", f"sbatch refused it: {text}", None
    state, end = files.state, files.ledger.end or {}
    last = next((one for one in reversed(files.history) if one["kind"] == "end"), {})
    if state is not None and state.state.is_final:
        return state.reason.name if state.reason else "", state.because, state.code
    if state is not None:
        return str(last.get("reason") or ""), state.because, last.get("code")
    return str(end.get("reason") or ""), str(end.get("text") or ""), end.get("code")


def _is_cancelled(files: Files, now: State, reason: str) -> bool:
    """Whether a person has cancelled the job; not if it was stopped with its launcher."""
    if now is not State.stopped:
        return False
    is_by_slurm = files.state is not None and bool(files.state.job)
    return bool(files.cancel) or (reason == Reason.cancelled.name and is_by_slurm)


def _speed(files: Files, state: State) -> tuple[float | None, float | None]:
    """Steps per second since the last start, and seconds left."""
    progress, start = files.progress, files.ledger.start
    if state not in (State.running, State.stopping) or progress is None or start is None:
        return None, None
    done, took_s = progress.step - int(start.get("step", 0)), progress.began - float(start["t"])
    if progress.attempt != files.ledger.number or done <= 0 or took_s <= 0:
        return None, None
    rate = done / took_s
    planned = progress.planned
    return rate, None if planned is None else max(planned - progress.step, 0) / rate


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a file; empty if it is missing. If it cannot be read, that is a problem."""
    try:
        content = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(_problem(path, error))
        return {}
    return content if isinstance(content, dict) else {}


def _problem(path: Path, error: Exception) -> str:
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path} cannot be read: {what}"
