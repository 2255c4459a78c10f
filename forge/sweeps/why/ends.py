"""Why an attempt ended: a rule for each reason, in the words and with the keys that help."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable

from forge.errors import Reason
from forge.jobdir import code
from forge.sweeps import output, words
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.why.evidence import Cause, Evidence, Explanation

_SHOWN = 5


def of_attempt(known: Evidence, attempt: AttemptRecord) -> Explanation:
    """Why an attempt ended."""
    rule = _RULES.get(attempt.reason)
    answer = None if rule is None else rule(known, attempt)
    if answer is not None:
        return answer
    text = attempt.text or words.reason(attempt.reason) or "nothing recorded why it ended"
    return Explanation(Cause.unknown, f"The attempt ended: {text}.", (_ended(attempt),))


def _ended(attempt: AttemptRecord) -> str:
    """The line of the job's ledger about the end of an attempt."""
    code = "" if attempt.code is None else f", code {attempt.code}"
    return f".forge/ledger/job.jsonl: attempt {attempt.number} ended, {attempt.reason}{code}"


def _messages(known: Evidence) -> tuple[str, ...]:
    """The error with which forge ended the job, and the file that has all of it."""
    file = f"the message: {known.output_file()}"
    return tuple(filter(None, (output.last_error(known.output), file)))


def _repeats(attempt: AttemptRecord) -> str:
    """How much the next attempt repeats."""
    if attempt.end_step is None:
        return "no step had begun"
    if attempt.saved_step is None:
        saved = attempt.start_step or 0
        return f"it had saved nothing: {attempt.end_step - saved} steps are repeated"
    lost = attempt.end_step - attempt.saved_step
    return f"its last checkpoint is step_{attempt.saved_step}: {max(lost, 0)} steps are repeated"


# -- the user's code -----------------------------------------------------------------------------


def _failed(known: Evidence, attempt: AttemptRecord) -> Explanation:
    frame = str(known.files.verdict.get("frame") or output.last_frame(known.output))
    if not frame and attempt.code is not None:
        return Explanation(
            Cause.exit_code,
            f"Your program ended without an exception of main: {attempt.text}.",
            (_ended(attempt), f"its output: {known.output_file()}"),
            (
                "If this exit code means that another start can help, name it in"
                f" `resilience.requeue.rules=[{{exit_codes: [{attempt.code}], max_restarts: 2}}]`.",
            ),
        )
    at = f", at {frame}" if frame else ""
    return Explanation(
        Cause.exception,
        f"Your code raised an exception{at}: {attempt.text}.",
        (_ended(attempt), f"traceback: {known.output_file()}"),
        (
            "forge does not start a job again after an exception, since it would come back."
            f" Correct the code, then run `{known.resume()}`.",
        ),
    )


def _code_changed(known: Evidence, attempt: AttemptRecord) -> Explanation:
    files = code.changed_files(known.files.plan.get("code") or {})
    cwd = os.path.join(str(known.files.plan.get("cwd") or ""), "")
    shown = ", ".join(one.removeprefix(cwd) for one in files[:_SHOWN]) or "undone by now"
    return Explanation(
        Cause.code_changed,
        f"The job failed, and its code has changed since it was submitted: {shown}.",
        (_ended(attempt), attempt.text),
        (
            "Undo the edit, or make the code work with the config of the submission"
            f" ({known.directory}/.forge/config.yaml); then run `{known.resume()}`.",
        ),
    )


# -- memory, disk, kills ---------------------------------------------------------------------------


def _out_of_memory(known: Evidence, attempt: AttemptRecord) -> Explanation:
    more = "a smaller batch, fewer workers"
    if known.files.plan.get("slurm") is not None and not known.sweep.is_single:
        more = f"`{known.resume('hydra.launcher.mem_gb=…')}`"
    return Explanation(
        Cause.out_of_memory,
        f"The kernel killed the job for lack of memory; {_repeats(attempt)}.",
        (_ended(attempt), attempt.text),
        (f"Give the job more memory ({more}), or let it need less.",),
    )


def _disk_full(known: Evidence, attempt: AttemptRecord) -> Explanation:
    failed = [str(one.get("error")) for one in known.events("save_failed", attempt=attempt)]
    return Explanation(
        Cause.disk_full,
        "A checkpoint could not be written, since the disk or the quota is full.",
        (_ended(attempt), *failed[-1:]),
        (
            "Make room, or keep fewer checkpoints (`resilience.checkpoint.keep_last`). The job"
            " starts again by itself once there is room.",
        ),
    )


def _io_error(known: Evidence, attempt: AttemptRecord) -> Explanation:
    return Explanation(
        Cause.checkpoints,
        "The checkpoints cannot be written or read.",
        (_ended(attempt), *_messages(known)),
        (f"`forge verify {shlex.quote(str(known.directory))}` checks all of them.",),
    )


def _crashed(known: Evidence, attempt: AttemptRecord) -> Explanation:
    section = _section(known, attempt)
    doing = f" while it was in `{section}`" if section else ""
    rank = f" (rank {known.job.rank})" if known.job.rank else ""
    return Explanation(
        Cause.killed,
        f"The job's process{rank} was {attempt.text}{doing}; {_repeats(attempt)}.",
        (_ended(attempt), f"its output: {known.output_file()}"),
        (
            "If no person killed it, look for a crash of a library in the output. If memory ran out"
            " without a cgroup, `dmesg` on the node says so.",
        ),
    )


# -- stops -------------------------------------------------------------------------------------


def _section(known: Evidence, attempt: AttemptRecord) -> str:
    """The section in which the task ended, by its last heartbeat; empty if it is unknown."""
    ends = list(known.events("end", attempt=attempt))
    return str(ends[-1].get("section") or "") if ends else ""


def _forced(known: Evidence, attempt: AttemptRecord) -> Explanation:
    timeout_s = known.files.plan.get("timeout_s") or 0
    section = _section(known, attempt)
    if section == "save":
        return _save_too_long(known, attempt)
    remedy = (
        "Put a long evaluation into a function of `run.every`, which a stop can interrupt; or give"
        " the stop more time (`resilience.shutdown.timeout_s`, with a larger"
        " `resilience.signal.warning_s`)."
    )
    where = {
        "step": "the step that was running took longer",
        "outside": "the code outside of the loop did not return",
        "start_up": "the start-up was not done",
        "evaluation": "the evaluation did not return",
        "collective": "it waited for other ranks",
    }.get(section, "no step boundary was reached")
    return Explanation(
        Cause.stopped_late,
        f"The job was asked to stop, and had not exited {timeout_s:g} s later: {where};"
        f" {_repeats(attempt)}.",
        (_ended(attempt), f"stacks of its threads: {known.output_file()}"),
        (remedy,),
    )


def _save_too_long(known: Evidence, attempt: AttemptRecord) -> Explanation:
    took = [float(one["seconds"]) for one in known.events("save") if "seconds" in one]
    longest = f" (the longest save so far took {max(took):.1f} s)" if took else ""
    warning_s = known.files.plan.get("warning_s") or 0.0
    return Explanation(
        Cause.save_too_long,
        f"The job was killed while it saved{longest}: the warning of {warning_s:g} s before the end"
        f" is too short; {_repeats(attempt)}.",
        (_ended(attempt),),
        (f"Set `resilience.signal.warning_s` to at least {_enough(took, warning_s):.0f}.",),
    )


def _enough(took: list[float], warning_s: float) -> float:
    return max(2 * max(took, default=0.0) + 30, 2 * warning_s)


def _time_limit(known: Evidence, attempt: AttemptRecord) -> Explanation:
    limit_s = known.files.plan.get("time_limit_s")
    limit = f" of {words.clock(limit_s)}" if limit_s else ""
    stops = list(known.events("stop", attempt=attempt))
    if stops:
        saved = f"saved at step {stops[-1].get('step')}"
        return Explanation(
            Cause.time_limit,
            f"The time limit{limit} was near; the job {saved}.",
            (_ended(attempt),),
        )
    if _section(known, attempt) == "save":
        return _save_too_long(known, attempt)
    is_run = any(known.events("run", attempt=attempt))
    if not is_run and not known.job.is_command:
        return Explanation(
            Cause.no_run,
            f"The time limit{limit} came, and the job has no `forge.Run` that could have saved.",
            (_ended(attempt),),
            ("Use `forge.Run` in main (docs/how-to/convert-a-loop.md), or raise the time limit.",),
        )
    if known.job.is_command and (attempt.code or 0) >= 0:
        return Explanation(
            Cause.time_limit,
            f"The time limit{limit} came; the command was asked to save and exit.",
            (_ended(attempt), attempt.text),
        )
    plan = known.files.plan
    if known.job.is_command:
        text = (
            f"and the command had not exited {plan.get('timeout_s') or 0:g} s after"
            f" SIG{plan.get('signal', '')}"
        )
    else:
        text = (
            f"and the training did not save before it: the signal {plan.get('signal', '')} did not"
            f" reach it, or its step took longer than the warning of {plan.get('warning_s', 0):g} s"
        )
    return Explanation(
        Cause.signal_missed,
        f"The time limit{limit} came, {text}; {_repeats(attempt)}.",
        (_ended(attempt), f"its output: {known.output_file()}"),
        (
            "A container, a shell or torchrun above the training can swallow signals: start it with"
            " `exec`, or with forge's launcher. If steps are long, set"
            " `resilience.signal.warning_s` to more than two of them.",
        ),
    )


def _by_cluster(known: Evidence, attempt: AttemptRecord) -> Explanation:
    stops = list(known.events("stop", attempt=attempt))
    saved = f"it saved at step {stops[-1].get('step')}" if stops else _repeats(attempt)
    text = {
        "preempted": "Slurm preempted the job",
        "node_failed": "A node of the job failed",
        "requested": "A requeue was requested",
        "signalled": "Somebody sent SIGTERM to the job",
    }[attempt.reason]
    node = f" on {attempt.node}" if attempt.node else ""
    return Explanation(
        Cause[attempt.reason], f"{text}{node}; {saved}.", (_ended(attempt), attempt.text)
    )


def _by_a_person(known: Evidence, attempt: AttemptRecord) -> Explanation:
    text = {
        "cancelled": "The job was cancelled or terminated",
        "interrupted": "The job was stopped by Ctrl+C",
        "orphaned": "The launcher of the job exited, so the job saved and stopped",
    }[attempt.reason]
    names = [known.job.number] if attempt.reason == "cancelled" else []
    what = f"`{known.resume(*names)}` continues it."
    return Explanation(
        Cause[attempt.reason], f"{text}; {_repeats(attempt)}.", (_ended(attempt),), (what,)
    )


# -- hangs, ranks, nodes, numbers -----------------------------------------------------------------


def _hung(known: Evidence, attempt: AttemptRecord) -> Explanation:
    hangs = list(known.events("hang", attempt=attempt))
    if not hangs:
        return Explanation(
            Cause.hung, f"The job made no progress: {attempt.text}.", (_ended(attempt),)
        )
    last = hangs[-1]
    line = f", at {last['line']}" if last.get("line") else ""
    return Explanation(
        Cause.hung,
        f"Rank {last.get('rank')} made no progress in `{last.get('section')}` at step"
        f" {last.get('step')} for {float(last.get('waited_s') or 0):.0f} s{line}"
        f" ({last.get('because')}).",
        (f"stacks of all ranks: {known.directory / str(last.get('folder'))}/summary.txt",),
        (
            "If it was slow and not hanging, raise `resilience.hang.timeout_s`; else correct the"
            " line that the summary names.",
        ),
    )


def _rank_lost(known: Evidence, attempt: AttemptRecord) -> Explanation:
    return Explanation(
        Cause.rank_lost,
        f"A rank of the job died, and the other ranks ended: {attempt.text}; {_repeats(attempt)}.",
        (_ended(attempt), f"the outputs of all ranks: {known.directory}/output.log*"),
    )


def _unhealthy(known: Evidence, attempt: AttemptRecord) -> Explanation:
    return Explanation(
        Cause.unhealthy,
        f"A health check failed: {attempt.text}.",
        (_ended(attempt),),
        ("`srun -w NODE forge doctor` repeats the checks on a node.",),
    )


def _halted(known: Evidence, attempt: AttemptRecord) -> Explanation:
    if any(known.events("health", attempt=attempt)):
        return _unhealthy(known, attempt)
    halts = list(known.events("halt", attempt=attempt))
    text = str(halts[-1].get("text")) if halts else attempt.text
    starts = list(known.events("start", attempt=attempt))
    is_set = str(starts[-1].get("nan_action")) if starts else ""
    actions = [f"`{one}`" for one in ("skip", "rollback") if one != is_set]
    return Explanation(
        Cause.halted,
        f"The policy halted the job: {text}.",
        (_ended(attempt),),
        (
            f"A NaN: lower the learning rate, or set `resilience.nan.action` to"
            f" {' or '.join(actions)} (docs/how-to/handle-nans.md), then `{known.resume()}`.",
        ),
    )


def _bad_config(known: Evidence, attempt: AttemptRecord) -> Explanation:
    logs = known.sweep.command("logs", known.job.number)
    return Explanation(
        Cause.config,
        "The config of the job, its code or the objects of forge.Run do not fit.",
        (_ended(attempt), *_messages(known)),
        (f"`{logs}` prints the message, which says what to do.",),
    )


def _in_use(known: Evidence, attempt: AttemptRecord) -> Explanation:
    return Explanation(
        Cause.directory_in_use,
        "Another process uses the job's directory.",
        (_ended(attempt), *_messages(known)),
        ("Wait for it, or stop it; its pid and host are in the message.",),
    )


def _unanswered(known: Evidence, attempt: AttemptRecord) -> Explanation:
    return Explanation(
        Cause.not_requeued,
        f"Slurm did not requeue the job: {attempt.text}.",
        (_ended(attempt),),
        (f"`{known.resume()}` submits it again.",),
    )


_RULES: dict[str, Callable[[Evidence, AttemptRecord], Explanation | None]] = {
    Reason.failed.name: _failed,
    Reason.code_changed.name: _code_changed,
    Reason.out_of_memory.name: _out_of_memory,
    Reason.disk_full.name: _disk_full,
    Reason.io_error.name: _io_error,
    Reason.crashed.name: _crashed,
    Reason.forced.name: _forced,
    Reason.time_limit.name: _time_limit,
    **dict.fromkeys(("preempted", "node_failed", "requested", "signalled"), _by_cluster),
    **dict.fromkeys(("cancelled", "interrupted", "orphaned"), _by_a_person),
    Reason.hung.name: _hung,
    Reason.rank_lost.name: _rank_lost,
    Reason.unhealthy.name: _unhealthy,
    Reason.halted.name: _halted,
    Reason.bad_config.name: _bad_config,
    Reason.in_use.name: _in_use,
    Reason.unanswered.name: _unanswered,
}
