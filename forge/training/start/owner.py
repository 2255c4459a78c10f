"""Whose checkpoints a directory holds: `job.json` beside the `step_*`.

It names the job (`forge/jobdir/identity.py`) and what the script had built
(`forge/state/built.py`), under an id that every manifest repeats. A job that was taken on with
another config has an id for each; so a checkpoint says what it was built
with, whichever of them a resume begins with. Only whoever has claimed the directory writes it,
before the first step, and again where something changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.checkpoint.format import manifest
from forge.errors import CheckpointError, ConfigError, DamagedCheckpoint
from forge.filesystem.files import read_plain, write_atomically
from forge.filesystem.steps import step_dirs
from forge.jobdir import identity, job_dir
from forge.jobdir.identity import Change, Identity
from forge.jobdir.job_files import RESUME
from forge.jobdir.ledger import Ledger
from forge.state.built import Built

FILE = "job.json"
_BY_CONFIG = (
    "\n    If some of these options do not change the results (workers, a logger's id), pass those"
    " that do: forge.Run(policy, config=…)."
)
_DAMAGE = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True)
class _Entry:
    """A job under one config."""

    id: str
    program: str
    name: str
    config: dict[str, Any] | None
    built: dict[str, Any]
    job_dir: str
    """Where it was last started."""
    words: list[str] | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.program, self.name, self.config, self.words)


class Owner:
    """Decides, once the directory is claimed, whether this job may train on from what is there.

    Raises:
        ConfigError: Where it is another job's, and nobody asked to take it on; or where somebody
            did, and something cannot be decided.
        CheckpointError: Where `job.json` cannot be read, and no checkpoint tells.
    """

    def __init__(
        self,
        directory: Path,
        job: Path,
        name: str,
        built: Built,
        *,
        is_change_wanted: bool,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._path = directory / FILE
        self._job = job
        self._built = built
        mine = _entry(identity.current(job, name, config), built, job)
        self._changed: list[Change] = []
        steps = step_dirs(directory)
        newest = _newest_id(steps)
        known = self._read(steps, newest, mine)
        self._before = known[-1] if known else None
        if self._before is None or not steps:  # nothing was trained: nothing to be true to
            known = [mine]
        elif not self._is_mine(known[-1], mine, is_change_wanted=is_change_wanted):
            known = [*(one for one in known if one.id != mine.id), mine]
            os.environ.pop(RESUME, None)  # for this claim alone
        else:
            known = [*known[:-1], self._resumed(known[-1], mine)]
        self._known = known
        if newest is not None:
            built.check(self._recorded(newest))

    @property
    def id(self) -> str:
        """For the manifests."""
        return self._known[-1].id

    def _read(self, steps: list[Path], newest: str | None, mine: _Entry) -> list[_Entry]:
        """The entries, the current one last; none where this is the first start."""
        try:
            return _read(self._path)
        except FileNotFoundError:
            problem = "is missing"
        except _DAMAGE as error:
            problem = f"is damaged ({error})"
        if not steps:
            return []
        if newest != mine.id:
            raise CheckpointError(
                f"{self._path} {problem}, so it is not known whose checkpoints these are, only that"
                " the newest was not saved by this job with its current config. Restore a copy of"
                " the file, or start the job as before. To start a new job with these weights:"
                " another `resilience.checkpoint.dir`, and"
                f" `resilience.checkpoint.init_from={steps[0]}`."
            )
        messages.warn(f"{self._path} {problem}; the newest checkpoint is this job's: rewritten.")
        return [mine]

    def _is_mine(self, known: _Entry, mine: _Entry, *, is_change_wanted: bool) -> bool:
        """Whether the job resumes under the entry that is there; else under its own.

        Raises:
            ConfigError: Where it must not.
        """
        self._changed = identity.differences(known.identity, mine.identity)
        if is_change_wanted:
            return _id(known.identity, known.built) == mine.id
        if self._changed:
            raise ConfigError(
                [
                    f"{self._path.parent} holds the checkpoints of another job (started in"
                    f" {known.job_dir}). What differs:{identity.listed(self._changed, 6)}\n    To"
                    f" resume that one as this:\n      {_taking_command(self._job)}\n    To train"
                    " both, give each a directory of its own (`resilience.checkpoint.dir`)."
                    + (_BY_CONFIG if mine.words is not None else "")
                ],
                "The checkpoint directory",
            )
        kept = self._built.kept(known.built)
        if kept:
            messages.warn(
                "The script builds other values now than at the first start, and the checkpoint"
                " brings those of then back (`resilience.resume=changed` takes the new ones):"
                f"{identity.listed(kept)}"
            )
        return True

    def _resumed(self, known: _Entry, mine: _Entry) -> _Entry:
        """The entry that is there, for this start; it learns what it did not know."""
        if not known.identity.is_known and mine.identity.is_known:
            messages.say(
                f"{self._path} did not say which config this job has. It does from now on, as of"
                " this start, and a start with another one is rejected."
            )
            known = replace(known, config=mine.config, words=mine.words)
        return replace(known, job_dir=mine.job_dir)

    def _recorded(self, saved_by: str) -> dict[str, Any]:
        """What was built where a checkpoint with this id was saved, if that is not as now.

        Raises:
            CheckpointError: Where that is not known.
        """
        if saved_by in ("", self.id):
            return {}
        for one in self._known:
            if one.id == saved_by:
                return one.built
        raise CheckpointError(
            f"A checkpoint in {self._path.parent} was saved by another job ({saved_by[:12]}), which"
            f" {FILE} does not know. Move it away."
        )

    def adapt(self, states: dict[str, Any], saved_by: str, ledger: Ledger) -> None:
        """Put into saved states, which are then loaded, what the script builds otherwise now."""
        changed = self._built.adapt(states, self._recorded(saved_by))
        if changed:
            _record(ledger, changed)
            text = "Changed in the state of the checkpoint, since the config has changed"
            messages.say(f"{text}:{identity.listed(changed)}")

    def keep(self, ledger: Ledger) -> None:
        """Write down whose the directory is now, and say so where that is news.

        Raises:
            OSError: Where the disk does not take it.
        """
        before, now = self._before, self._known[-1]
        if not self._is_written():
            content: dict[str, Any] = {"jobs": [asdict(one) for one in self._known]}
            content["checksum"] = _checksum(content)
            write_atomically(self._path, json.dumps(content, indent=1), is_synced=True)
        identity.take_asked(self._job)
        if before is None:
            return
        if self._changed and len(self._known) > 1:
            _record(ledger, self._changed)
            text = f"Resumes the job that was started in {before.job_dir}, with another config"
            messages.say(f"{text}:{identity.listed(self._changed)}")
        elif before.job_dir != now.job_dir and before.id == now.id:
            messages.say(f"Resumes the job that was started in {before.job_dir}: it is the same.")

    def _is_written(self) -> bool:
        try:
            return _read(self._path) == self._known
        except (OSError, *_DAMAGE):
            return False


def _record(ledger: Ledger, changed: list[Change]) -> None:
    ledger.write(
        "changed",
        keys=[one.key for one in changed],
        before={one.key: one.before for one in changed},
        after={one.key: one.now for one in changed},
    )


def _taking_command(job: Path) -> str:
    """The line that takes the job on; submitit's jobs have none that could be typed."""
    by_policy = "`resume: changed` in the policy that is given to forge.Run"
    return job_dir.taking_command(job) or by_policy


def _entry(who: Identity, built: Built, job: Path) -> _Entry:
    id_ = _id(who, built.record)
    return _Entry(id_, who.program, who.name, who.config, built.record, str(job), who.words)


def _id(who: Identity, built: dict[str, Any]) -> str:
    text = json.dumps([asdict(who), built], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps({**content, "checksum": 0}, sort_keys=True).encode())


def _read(path: Path) -> list[_Entry]:
    """The entries of a file; raises FileNotFoundError, or what `_DAMAGE` lists."""
    content = json.loads(read_plain(path))
    if content["checksum"] != _checksum(content):
        raise ValueError("it does not match its own checksum")
    found = [_Entry(**one) for one in content["jobs"]]
    if not found:
        raise ValueError("it names no job")
    return found


def _newest_id(steps: list[Path]) -> str | None:
    """The id in the newest manifest that can be read; None without one."""
    for path in steps:
        try:
            return manifest.read(path).job
        except DamagedCheckpoint:
            continue
    return None
