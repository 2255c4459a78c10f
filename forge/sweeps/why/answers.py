"""All answers about a job: its state first, then its restarts, its budget and its saves."""

from __future__ import annotations

import time
from collections.abc import Iterator

from forge.errors import Reason
from forge.job.requeue import BUDGETS
from forge.jobdir.job_state import State
from forge.slurm import pending
from forge.slurm.job_info import is_held
from forge.sweeps import reader, words
from forge.sweeps.why import ends
from forge.sweeps.why.evidence import Cause, Evidence, Explanation


def of_job(known: Evidence) -> list[Explanation]:
    """Why a job is in its state, the most important answer first."""
    job = known.job
    if job.state is State.finished:
        at = "" if job.step is None else f" at step {job.step}"
        return [Explanation(Cause.finished, f"The job has finished{at}.")]
    found = list(_hang(known))
    if job.is_cancelled or (job.state is State.stopping and known.files.cancel):
        found.append(_cancelled(known))
        return found
    if job.state is State.queued:
        found += _queued(known)
    elif job.state is State.lost:
        found.append(_lost(known))
    last = known.last_ended
    if text := reader.refusal(known.files.history):
        found.append(_refused(known, text))
    elif last is not None:
        found.append(ends.of_attempt(known, last))
        found += _budget(known, last.reason)
    is_said = last is not None and last.reason in (Reason.disk_full.name, Reason.io_error.name)
    if job.state.is_active or not is_said:
        found += _saves(known)
    if not found:
        found.append(_as_usual(known))
    return found


def _hang(known: Evidence) -> Iterator[Explanation]:
    """A hang of the running attempt that was only logged."""
    if known.job.state.is_active and known.job.hang:
        yield Explanation(
            Cause.hung,
            known.job.hang,
            (f"stacks of all ranks: {known.directory}/hangs/*/summary.txt",),
            ("`resilience.hang.action=restart` restarts a job that hangs.",),
        )


def _cancelled(known: Evidence) -> Explanation:
    job = known.job
    by = f" by {known.files.cancel['by']}" if known.files.cancel.get("by") else ""
    begun = "" if job.attempts else " before it had run"
    step = f" Its checkpoint is {job.checkpoint.path.name}." if job.checkpoint else ""
    what = "saves and stops: it was" if job.state is State.stopping else "was"
    return Explanation(
        Cause.cancelled,
        f"The job {what} cancelled{by}{begun}.{step}",
        (f"{known.directory}/.forge/cancel.json",) if known.files.cancel else ("Slurm",),
        (f"`{known.resume(job.number)}` starts it again.",),
    )


def _queued(known: Evidence) -> Iterator[Explanation]:
    job = known.job
    if job.waits_for:
        is_stuck = pending.is_stuck(job.waits_for)
        what = ", which does not end by itself" if is_stuck else ""
        cancel, resume = known.sweep.command("cancel", job.number), known.resume()
        remedy = f"`{cancel}`, and `{resume}` with other options."
        if is_held(job.waits_for):
            remedy = f"`scontrol release {job.slurm_id}` lets Slurm start it."
        yield Explanation(
            Cause.pending,
            f"Slurm has the job in its queue: {job.waits_for}{what}.",
            (f"squeue, job {job.slurm_id}",),
            (remedy,) if is_stuck else (),
        )
    elif job.slurm_id:
        yield Explanation(Cause.pending, f"The job waits in Slurm's queue as {job.slurm_id}.")
    elif known.sweep.launcher is None:
        yield Explanation(
            Cause.not_started,
            "The job was not started, and no launcher of this sweep runs on this machine.",
            (f"{known.sweep.path}/.forge/lock is not locked",),
            (f"`{known.resume()}` starts it.",),
        )
    else:
        yield Explanation(
            Cause.not_started, "The launcher starts the job when another job has ended."
        )


def _refused(known: Evidence, text: str) -> Explanation:
    return Explanation(
        Cause.refused,
        f"sbatch refused the batch script: {text}",
        (".forge/ledger/job.jsonl: an event `refused`",),
        (
            "Correct the option that sbatch names, or wait until its limit allows the job, and run"
            " the sweep's command again.",
        ),
    )


def _lost(known: Evidence) -> Explanation:
    recorded = known.files.state
    section = recorded.state.value if recorded is not None else "running"
    return Explanation(
        Cause.lost,
        f"The job's processes have ended without recording why (state `{section}`): they were"
        " killed together with their launcher, or the machine went down.",
        (f"nothing holds {known.directory}/.forge/lock, and its last state is `{section}`",),
        (f"`{known.resume()}` continues it from its last checkpoint.",),
    )


def _budget(known: Evidence, reason: str) -> Iterator[Explanation]:
    """The limit of the policy for which the job is not started again, if one was reached."""
    if not known.job.state.is_final or reason in ("finished", "cancelled", "interrupted"):
        return
    limits, counts = known.limits, known.counts
    most = limits.get("max_no_progress")
    if most and counts.get("no_progress", 0) >= most:
        yield Explanation(
            Cause.no_progress,
            f"The job is not started again: {counts['no_progress']} attempts in a row saved nothing"
            " new.",
            (f"`resilience.requeue.max_no_progress={most}`",),
            (
                "Save earlier (`resilience.checkpoint.every_s`), or find out why each attempt ends"
                " before its first save.",
            ),
        )
    budget = BUDGETS.get(Reason[reason]) if reason in Reason.__members__ else None
    counter, limit, key = budget or ("", "", "")
    most = limits.get(limit)
    if counter and most is not None and counts.get(counter, 0) >= most:
        yield Explanation(
            Cause.budget,
            f"The job is not started again: {words.count(counts[counter], 'restart')} for this"
            f" reason, and the limit is {most}.",
            (f"`resilience.{key}={most}`",),
            (f"Find out why it ends; then `{known.resume()}`, or raise `resilience.{key}`.",),
        )
    if counter and limits.get("enabled") is False:
        yield Explanation(
            Cause.requeue_disabled,
            f"The job is not started again: {limits.get('why_not')}.",
            (),
            ("Set `resilience.requeue.enabled=true`.",),
        )


def _saves(known: Evidence) -> Iterator[Explanation]:
    """Why the running attempt, or the last one, saved nothing."""
    job = known.job
    if known.files.ledger.problem is not None:
        error = known.files.ledger.problem
        yield Explanation(
            Cause.save_failed,
            f"The last save, at step {error.get('step')}, failed: {error.get('error')}.",
            (".forge/ledger: an event `save_failed`",),
            ("The next save tries again; after five failures in a row the job ends.",),
        )
        return
    if not job.state.is_active or job.is_command or job.checkpoint is not None:
        return
    if job.state is State.starting:
        took = "" if job.since is None else f" {words.ago(time.time() - job.since)} ago"
        yield Explanation(
            Cause.starting,
            f"The job's process was started{took}, and has not begun its first step.",
        )
    elif known.files.ledger.number:
        yield Explanation(
            Cause.nothing_saved_yet,
            "No checkpoint is saved yet: the first is due after `resilience.checkpoint.every_s` or"
            " `every_steps`.",
        )


def _as_usual(known: Evidence) -> Explanation:
    job = known.job
    at = "" if job.step is None else f" at step {job.step}"
    return Explanation(Cause.running, f"Nothing is wrong: the job is {job.state.value}{at}.")
