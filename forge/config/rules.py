"""The rules for the values of a policy's keys, each alone and together."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forge.config import keys
from forge.config.conversion import COMMANDS, signal_name
from forge.config.schema import SIGNALS, STOP_SHARE, NanAction, OnPendingSave, Policy, SignalAction
from forge.errors import is_disk_full


def cross_field_problems(
    p: Policy, time_limit_s: float | None, limit_key: str, *, is_command: bool = False
) -> dict[str, str]:
    """All problems of a policy whose values have the right types, and the key with the problem.

    A problem of several keys has no key.
    """
    found = [
        *_rule_problems(p, is_command=is_command),
        *_command_problems(p),
        *_exec_problems(p),
        *_signal_problems(p, time_limit_s, limit_key),
    ]
    if os.path.isabs(p.checkpoint.dir) and (problem := directory_problem(Path(p.checkpoint.dir))):
        found.append(f"`resilience.checkpoint.dir={p.checkpoint.dir}`: {problem}")
    can_save = p.checkpoint.every_steps or p.checkpoint.every_s
    if p.nan.action is NanAction.rollback and not can_save:
        found.append(
            "`resilience.nan.action=rollback`: needs checkpoints to go back to, but"
            " `resilience.checkpoint.every_steps` and `resilience.checkpoint.every_s` are both"
            " null. Set one of them."
        )
    if p.nan.action is NanAction.rollback and p.checkpoint.on_pending_save is OnPendingSave.skip:
        found.append(
            "`resilience.checkpoint.on_pending_save=skip`: with `resilience.nan.action=rollback`"
            " the checkpoint to go back to would depend on how fast the disk is. Set"
            " `on_pending_save` to wait."
        )
    return {**_key_problems(p), **dict.fromkeys(found, "")}


def _key_problems(p: Policy) -> dict[str, str]:
    """Values that the key's own bounds in `schema.py` forbid, as problem and key."""
    found: dict[str, str] = {}
    for name, value, known in keys.walk(p):
        if value is None:
            continue
        key, remedy = f"resilience.{name}", known.remedy and f" {known.remedy}"
        if known.gt is not None and not known.gt < value < math.inf:
            found[f"`{key}={value:g}`: has to be above {known.gt:g} and finite.{remedy}"] = name
        if known.ge is not None and not known.ge <= value < math.inf:
            found[f"`{key}={value:g}`: has to be at least {known.ge:g}.{remedy}"] = name
        if known.choices and value not in known.choices:
            choices = " | ".join(known.choices)
            found[f"`{key}={value}`: expected {choices}, found {value!r}."] = name
        if known.is_filled and not value.strip():
            found[f"`{key}={value}`: is empty.{remedy}"] = name
        if known.is_path and value.startswith("~"):
            found[
                f"`{key}={value}`: forge does not expand `~`, so it would be a directory named `~`."
                " Write the path in full, or as `${oc.env:HOME}/…`."
            ] = name
    return found


def _command_problems(p: Policy) -> Iterator[str]:
    for name, command in p.health.commands.items():
        key = f"resilience.{COMMANDS}{name}"
        if not command.run or not command.run[0].strip():
            yield f"`{key}.run={command.run}`: is empty; expected a command such as `[nhc, -a]`."
        if name in p.health.checks:
            yield f"`{key}`: `{name}` is the name of a built-in check. Choose another name."


def _exec_problems(p: Policy) -> Iterator[str]:
    if p.exec.done_file is not None and not p.exec.done_file.strip("/ "):
        yield (
            f"`resilience.exec.done_file={p.exec.done_file}`: expected the name of a file. Set it"
            " to null if the command writes none."
        )


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
    if is_command:  # the command can use all other codes itself
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
        if not rule.exit_codes and rule.reason is None:
            found.append(
                f"`{key}.exit_codes=[]`: names no exit code, so the rule does nothing. List the"
                " codes after which the job is restarted, for example [1], or remove the rule."
            )
        if is_command and rule.reason is not None:
            found.append(
                f"`{key}.reason={rule.reason}`: forge does not know the source files of a command."
                " Leave the reason out, and list exit codes."
            )
    return found


def _signal_problems(p: Policy, time_limit_s: float | None, limit_key: str) -> list[str]:
    found: list[str] = []
    warning_s, timeout_s = p.signal.warning_s, p.shutdown.timeout_s
    timeout_s = 0.0 if timeout_s is None else timeout_s  # the default is shorter than warning_s
    lead = f"`resilience.signal.warning_s={warning_s:g}`"
    name = signal_name(p.signal.name)
    action = p.signal.actions.get(name, SignalAction.ignore)
    if name in SIGNALS and action is SignalAction.ignore:
        found.append(
            f"`resilience.signal.name={p.signal.name}`: this signal announces the time limit, but"
            f" `resilience.signal.actions.{name}` is ignore. Set that action to requeue."
        )
    if math.inf > timeout_s >= warning_s > 0:
        found.append(
            f"`resilience.shutdown.timeout_s={timeout_s:g}` is not below {lead}: Slurm would kill"
            f" the job at its time limit, {warning_s:g} s after the signal, before forge can end"
            " it. Raise `resilience.signal.warning_s`, or set `resilience.shutdown.timeout_s` to at"
            f" most {warning_s * STOP_SHARE:g}."
        )
    if time_limit_s is not None and warning_s >= time_limit_s:
        found.append(
            f"{lead} is not below the time limit of {time_limit_s:g} s"
            f"{f' (`{limit_key}`)' if limit_key else ''}: the job would be signalled as it starts."
            " Raise the limit, or set `resilience.signal.warning_s` to at most"
            f" {time_limit_s / 2:g}."
        )
    return found


def directory_problem(path: Path) -> str | None:
    """The reason why `path` is not writable, or None; leaves no file behind."""
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a directory. Remove it, or choose another directory."
    try:
        # Tried, because for root and on special file systems permissions mean nothing.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        if is_disk_full(error):
            return None  # the config is right; the first write reports the problem
        return (
            f"{existing} cannot be written ({error.strerror}). Change its permissions, or choose"
            " another directory."
        )
