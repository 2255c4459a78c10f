"""Conversion of a policy, and the rules that its keys must keep together."""

from __future__ import annotations

import copy
import difflib
import functools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from forge.compat import of_omegaconf
from forge.config.schema import STOP_SHARE, NanAction, Policy, RequeueRule, SignalAction, WhenBusy
from forge.errors import is_disk_full

SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals a policy may name: those that can be caught and that people send to jobs."""


def signal_name(name: str) -> str:
    """`SIGUSR2`, `usr2` and `USR2` are one signal."""
    return str(name).upper().removeprefix("SIG")


def convert(policy: Any) -> tuple[Policy, list[str]]:
    """Bring `policy` into typed form; what does not fit keeps its default and is reported."""
    typed = copy.deepcopy(_defaults())
    problems: list[str] = []
    if isinstance(policy, Policy):
        policy = asdict(policy)  # a dataclass takes every value: check it like any other
    if policy is None or (isinstance(policy, DictConfig) and of_omegaconf.value_of(policy) is None):
        policy = {}
    if not isinstance(policy, Mapping):
        problems.append(
            f"`resilience` is {policy!r}: expected a group of keys. Choose a preset, for example"
            " `resilience=default`, in the defaults list of your config."
        )
        policy = {}
    for key, value in _leaves(_resolved(policy, "", problems), ""):
        problem = _set(typed, key, value)
        if problem:
            problems.append(problem)
    result = OmegaConf.to_object(typed)
    assert isinstance(result, Policy)
    if signal_name(result.signal.name) in SIGNALS:
        result.signal.name = signal_name(result.signal.name)
    if signal_name(result.exec.signal) in SIGNALS:
        result.exec.signal = signal_name(result.exec.signal)
    return result, problems


@functools.cache
def _defaults() -> Any:
    """To be copied: OmegaConf takes 20 ms to read the schema."""
    return OmegaConf.structured(Policy)


def _resolved(tree: Mapping[Any, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The tree as plain values; an interpolation that fails is reported and left out."""
    found: dict[str, Any] = {}
    for name in tree:
        try:
            value = tree[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except MissingMandatoryValue:
            value = "???"
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"`resilience.{prefix}{name}`: cannot be resolved: {reason}")
            continue
        is_group = isinstance(value, Mapping)
        found[str(name)] = _resolved(value, f"{prefix}{name}.", problems) if is_group else value
    return found


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key of a policy, dotted, without the leading `resilience.`."""
    return tuple(key for key, _ in _leaves(asdict(Policy()), ""))


def nearest_key(key: str) -> str | None:
    """The known key that a mistyped one most likely stands for."""
    known = known_keys()
    groups = {k.rsplit(".", n)[0] for k in known for n in range(1, k.count(".") + 1)}
    last = key.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    if len(same_name) == 1:
        return same_name[0]
    close = difflib.get_close_matches(key, [*known, *groups], n=1, cutoff=0.6)
    return close[0] if close else None


def _set(typed: DictConfig, key: str, value: Any) -> str | None:
    """Set one key with OmegaConf's own conversion; return what is wrong with it, or None."""
    shown = f"`resilience.{key}={value}`"
    path = key
    if key.startswith("signal.actions."):
        name = signal_name(key.rsplit(".", 1)[-1])
        if name not in SIGNALS:
            return f"{shown}: unknown signal. A policy can name {', '.join(SIGNALS)}."
        path = f"signal.actions.{name}"
    elif key not in known_keys():
        if any(k.startswith(key + ".") for k in known_keys()):
            if value == {}:
                return None  # a group of which nothing is set
            members = ", ".join(f"resilience.{k}" for k in known_keys() if k.startswith(key + "."))
            return f"{shown}: is a group of keys, not a value. Set one of {members}."
        near = nearest_key(key)
        hint = f"Did you mean `resilience.{near}`?" if near else "See conf/resilience/default.yaml."
        return f"{shown}: there is no such key. {hint}"
    if isinstance(value, bool) and not isinstance(OmegaConf.select(typed, path), bool):
        # YAML 1.1 reads on, off, yes and no as booleans; OmegaConf would take True for 1.
        return f"{shown}: {_expected(typed, path)}, found a boolean."
    if isinstance(value, float) and _is_int(typed, path):
        if not value.is_integer():
            return f"{shown}: {_expected(typed, path)}, found a fraction."
        value = int(value)  # 1e3
    before = OmegaConf.select(typed, path, default=SignalAction.ignore)
    if isinstance(before, ListConfig):
        before = list(before)  # an update changes the list in its place
    try:
        OmegaConf.update(typed, path, value)
        # Resolves what is an interpolation, and refuses `???`.
        _resolve(OmegaConf.select(typed, path, throw_on_missing=True))
    except OmegaConfBaseException:
        OmegaConf.update(typed, path, before)
        if isinstance(value, str) and "${" in value:
            return f"{shown}: this interpolation does not give {_expected(typed, path, '')}."
        return f"{shown}: {_expected(typed, path)}, found {value!r}."
    return None


def _resolve(value: Any) -> None:
    if isinstance(value, ListConfig):
        OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def _node(typed: DictConfig, key: str) -> Any:
    parent, _, name = key.rpartition(".")
    return of_omegaconf.child_of(OmegaConf.select(typed, parent) if parent else typed, name)


def _is_int(typed: DictConfig, key: str) -> bool:
    node = _node(typed, key)
    return node is not None and of_omegaconf.declared_type(node) is int


def _expected(typed: DictConfig, key: str, verb: str = "expected ") -> str:
    kind: Any = SignalAction
    if not key.startswith("signal.actions."):
        node = _node(typed, key)
        kind = of_omegaconf.element_type(node) or of_omegaconf.declared_type(node)
    if hasattr(kind, "__members__"):
        return verb + " | ".join(kind.__members__)
    if kind is RequeueRule:
        return verb + "a list of {exit_codes: [1, …], max_restarts: 2}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return verb + names.get(kind, getattr(kind, "__name__", str(kind)))


_INTERVAL = "an interval has to be above 0 and finite. To switch it off, set it to null."
_ABOVE_ZERO = {
    "checkpoint.every_steps": _INTERVAL,
    "checkpoint.every_s": _INTERVAL,
    "checkpoint.keep_every_steps": _INTERVAL,
    "health.timeout_s": "a check needs seconds above 0 and finite.",
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
    "health.min_free_gib": (0, "0 asks for no free space."),
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
    "requeue.max_unfair": (0, "0 gives up at once."),
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
