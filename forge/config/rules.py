"""The rules that the keys of a policy must keep, each and together."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from forge.config.conversion import COMMANDS, SIGNALS, signal_name
from forge.config.schema import STOP_SHARE, NanAction, Policy, SignalAction, WhenBusy
from forge.errors import is_disk_full

_INTERVAL = "an interval has to be above 0 and finite. To switch it off, set it to null."
_ABOVE_ZERO = {
    "checkpoint.every_steps": _INTERVAL,
    "checkpoint.every_s": _INTERVAL,
    "checkpoint.keep_every_steps": _INTERVAL,
    "health.every_s": _INTERVAL,
    "health.exclude_h": "has to be above 0 and finite.",
    "hang.timeout_s": "has to be above 0 and finite; null learns it.",
    "hang.start_s": "has to be above 0 and finite.",
    "nan.rollback.lr_scale": "has to be above 0 and finite; 1 keeps it.",
    "signal.lead_s": "has to be above 0 and finite: without a lead there is no time to save. Set it"
    " to the seconds that a save takes, with a margin.",
    "slurm.timeout_min": "has to be above 0 and finite.",
    "slurm.mem_gb": "has to be above 0 and finite.",
}
"""Keys that have to be above 0, or null where their type allows it -> what to say."""
_AT_LEAST = {
    "checkpoint.keep_last": (1, "The newest one is always kept."),
    "checkpoint.best.keep": (1, "For none set `best.metric` to null."),
    "hang.max_restarts": (0, "0 never starts it again, null has no limit."),
    "health.max_excluded_nodes": (0, "0 stays where it is."),
    **dict.fromkeys(
        ("slurm.nodes", "slurm.tasks_per_node", "slurm.cpus_per_task"),
        (1, "null is as `hydra.launcher` has it."),
    ),
    "nan.max_consecutive": (1, "1 acts on the first bad step."),
    "nan.rollback.steps_back": (0, "0 is the newest good checkpoint."),
    "nan.rollback.max_rollbacks": (0, "0 never rolls back."),
    **dict.fromkeys(
        ("requeue.max_preemptions", "requeue.max_timeouts", "requeue.max_failures"),
        (0, "0 never starts it again, null has no limit."),
    ),
    "requeue.no_progress_limit": (1, "1 gives up at once."),
    "shutdown.timeout_s": (0, "0 never forces an exit."),
}
"""Keys with the least that they may be, or null where their type allows it -> what to say."""
_NOT_EMPTY = {
    "checkpoint.dir": "Name a directory, or leave the default.",
    "checkpoint.best.metric": "Name a metric that run.log() is given, or null.",
    "checkpoint.init_from": "Name a file or a checkpoint, or set it to null.",
}
"""Keys of a text -> what to do where it is empty."""
_PATHS = ("checkpoint.dir", "checkpoint.init_from")


def cross_field_problems(
    p: Policy, time_limit_s: float | None, limit_key: str, *, is_command: bool = False
) -> list[str]:
    """Everything that is wrong with values that are each of the right type."""
    found = [
        *_range_problems(p),
        *_text_problems(p),
        *_rule_problems(p, is_command=is_command),
        *_command_problems(p),
        *_signal_problems(p, time_limit_s, limit_key),
    ]
    if os.path.isabs(p.checkpoint.dir) and (problem := directory_problem(Path(p.checkpoint.dir))):
        found.append(f"`resilience.checkpoint.dir={p.checkpoint.dir}`: {problem}")
    if p.checkpoint.init_from is not None and not p.enabled:
        found.append(
            f"`resilience.checkpoint.init_from={p.checkpoint.init_from}`: nothing is loaded with"
            " `resilience.enabled=false`. Load it in the script, or set this to null."
        )
    can_save = p.checkpoint.every_steps or p.checkpoint.every_s
    if p.nan.action is NanAction.rollback and not can_save:
        found.append(
            "`resilience.nan.action=rollback`: needs checkpoints to go back to, but"
            " `resilience.checkpoint.every_steps` and `resilience.checkpoint.every_s` are both"
            " null. Set one of them."
        )
    if p.nan.action is NanAction.rollback and p.checkpoint.when_busy is WhenBusy.skip:
        found.append(
            "`resilience.checkpoint.when_busy=skip`: with `resilience.nan.action=rollback` the"
            " place to go back to would depend on how fast the disk was. Set `when_busy` to wait."
        )
    return found


def _range_problems(p: Policy) -> Iterator[str]:
    for key, why in _ABOVE_ZERO.items():
        value = attrgetter(key)(p)
        if value is not None and not 0 < value < math.inf:
            yield f"`resilience.{key}={value:g}`: {why}"
    for key, (least, why) in _AT_LEAST.items():
        value = attrgetter(key)(p)
        if value is not None and not least <= value < math.inf:
            yield f"`resilience.{key}={value:g}`: has to be at least {least}. {why}"


def _text_problems(p: Policy) -> Iterator[str]:
    for key, remedy in _NOT_EMPTY.items():
        value = attrgetter(key)(p)
        if value is not None and not value.strip():
            yield f"`resilience.{key}={value}`: is empty. {remedy}"
    for key in _PATHS:
        value = attrgetter(key)(p)
        if value is not None and value.startswith("~"):
            yield (
                f"`resilience.{key}={value}`: `~` would be a directory of that name. Write the path"
                " in full, or as `${oc.env:HOME}/…`."
            )


def _command_problems(p: Policy) -> Iterator[str]:
    for name, one in p.health.commands.items():
        key = f"resilience.{COMMANDS}{name}"
        if not one.run or not one.run[0].strip():
            yield f"`{key}.run={one.run}`: names no command, as `[nhc, -a]` does."
        if not 0 < one.timeout_s < math.inf:
            yield f"`{key}.timeout_s={one.timeout_s:g}`: has to be above 0 and finite."
        if name in p.health.checks:
            yield f"`{key}`: `{name}` is the name of a built-in check. Choose another."


def _rule_problems(p: Policy, *, is_command: bool) -> list[str]:
    found: list[str] = []
    decided = {
        0: "finished",
        70: "a forced exit, see `requeue.max_failures`",
        71: "a full disk, see `requeue.max_failures`",
        75: "asks to be run again",
        129: "a hangup",
        130: "a Ctrl+C",
        143: "a stop",
    }
    if is_command:  # the others are its own
        decided = {code: decided[code] for code in (0, 75)}
    for number, rule in enumerate(p.requeue.rules):
        key = f"resilience.requeue.rules[{number}]"
        for code in rule.exit_codes:
            if code in decided:
                found.append(
                    f"`{key}.exit_codes`: {code} already has a meaning ({decided[code]}). Leave"
                    " it out."
                )
            elif not 1 <= code <= 255:
                found.append(f"`{key}.exit_codes`: {code} is not an exit code; they are 1 to 255.")
        if not rule.exit_codes:
            found.append(f"`{key}.exit_codes=[]`: names no exit code, so the rule does nothing.")
        if rule.max_restarts < 1:
            found.append(f"`{key}.max_restarts={rule.max_restarts}`: has to be at least 1.")
    return found


def _signal_problems(p: Policy, time_limit_s: float | None, limit_key: str) -> list[str]:
    found: list[str] = []
    lead_s, timeout_s = p.signal.lead_s, p.shutdown.timeout_s
    timeout_s = 0.0 if timeout_s is None else timeout_s  # what follows the lead is below it
    lead = f"`resilience.signal.lead_s={lead_s:g}`"
    for key, given in (("signal.name", p.signal.name), ("exec.signal", p.exec.signal)):
        if signal_name(given) not in SIGNALS:
            found.append(
                f"`resilience.{key}={given}`: unknown signal. It can be {', '.join(SIGNALS)}."
            )
    name = signal_name(p.signal.name)
    action = p.signal.actions.get(name, SignalAction.ignore)
    if name in SIGNALS and action is SignalAction.ignore:
        found.append(
            f"`resilience.signal.name={p.signal.name}`: this signal announces the time limit, but"
            f" `resilience.signal.actions.{name}` is ignore. Set it to requeue."
        )
    if math.inf > timeout_s >= lead_s > 0:
        found.append(
            f"`resilience.shutdown.timeout_s={timeout_s:g}`: the forced exit is not shorter than"
            f" {lead}: the job would be killed before its own exit. Raise the lead, or set"
            f" `resilience.shutdown.timeout_s` to at most {lead_s * STOP_SHARE:g}."
        )
    if time_limit_s is not None and lead_s >= time_limit_s:
        found.append(
            f"{lead}: is not below the time limit of {time_limit_s:g} s"
            f"{f' (`{limit_key}`)' if limit_key else ''}: the job would be signalled as it starts."
            f" Raise the limit, or set `resilience.signal.lead_s` to at most {time_limit_s / 2:g}."
        )
    return found


def directory_problem(path: Path) -> str | None:
    """Why nothing can be written below `path`, or None; leaves nothing behind."""
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a directory. Remove it, or choose another directory."
    try:
        # Tried out, because to root and on special file systems permissions say nothing.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        if is_disk_full(error):
            return None  # the configuration is right; whoever writes there will say so
        return (
            f"{existing} cannot be written ({error.strerror}). Change its permissions, or choose"
            " another directory."
        )
