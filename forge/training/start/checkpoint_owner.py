"""The job to which the checkpoints in a directory belong, stored in `job.json` next to them.

The file identifies the job (`forge/jobdir/identity.py`) and the values that the script had built
(`forge/state/initial_hyperparameters.py`), under an id that every manifest repeats. A job that was
continued with another config has one id for each config; the values are recorded to list those that
a later start builds differently. Only the process that has claimed the directory writes the file,
before the first step, and again if something changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge import messages
from forge.checkpoint.format import manifest
from forge.errors import CheckpointError, ConfigError, DamagedCheckpoint
from forge.filesystem.files import read_plain, write_atomically
from forge.jobdir import identity, job_dir
from forge.jobdir.identity import Identity
from forge.jobdir.job_files import RESUME, step_dirs
from forge.jobdir.ledger_writer import Ledger
from forge.state.initial_hyperparameters import InitialHyperparameters

if TYPE_CHECKING:  # most jobs keep their config
    from forge.jobdir.config_changes import Change

FILE = "job.json"
_BY_CONFIG = (
    "\n    If some of these options do not change the results (workers, a logger's id), pass only"
    " the others: forge.Run(policy, config={'lr': args.lr, …})."
)
_DAMAGE = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True)
class _Entry:
    """A job with one config."""

    id: str
    program: str
    name: str
    config: dict[str, Any] | None
    built: dict[str, Any]
    job_dir: str
    """The directory in which it was last started."""
    words: list[str] | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.program, self.name, self.config, self.words)


class CheckpointOwner:
    """Decides, after the directory was claimed, whether this job can resume from it.

    Raises:
        ConfigError: If the checkpoints belong to another job, and `resume=changed` is not set.
        CheckpointError: If `job.json` cannot be read, and no checkpoint identifies the job.
    """

    def __init__(
        self,
        directory: Path,
        job: Path,
        name: str,
        built: InitialHyperparameters,
        *,
        is_change_wanted: bool,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._path = directory / FILE
        self._job = job
        self._built = built
        who = identity.current(job, name, config)
        record, id_ = built.record, _id(who, built.record)
        mine = _Entry(id_, who.program, who.name, who.config, record, str(job), who.words)
        self._changed: list[Change] = []
        steps = step_dirs(directory)
        newest = _newest_id(steps)
        known = self._read(steps, newest, mine)
        self._before = known[-1] if known else None
        if self._before is None or not steps:  # nothing is trained yet, so any config is fine
            known = [mine]
        elif not self._is_mine(known[-1], mine, is_change_wanted=is_change_wanted):
            known = [*(one for one in known if one.id != mine.id), mine]
            os.environ.pop(RESUME, None)  # only for this claim
        else:
            known = [*known[:-1], self._resumed(known[-1], mine)]
        self._known = known
        if newest is not None:
            self.check_known(newest)

    @property
    def id(self) -> str:
        """The id that manifests repeat."""
        return self._known[-1].id

    def _read(self, steps: list[Path], newest: str | None, mine: _Entry) -> list[_Entry]:
        """The entries, the current one last; empty at the first start."""
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
                f"{self._path} {problem}, and the newest checkpoint there was saved by another job,"
                " or by this job with another config: forge cannot tell which. Restore a copy of"
                " the file, or start the job with the config of that checkpoint. To start a new"
                " job, set another `resilience.checkpoint.dir`."
            )
        messages.warn(
            f"{self._path} {problem}. forge writes it again, since the newest checkpoint was saved"
            " by this job."
        )
        return [mine]

    def _is_mine(self, known: _Entry, mine: _Entry, *, is_change_wanted: bool) -> bool:
        """Whether the job resumes under the existing entry; else under a new one.

        Raises:
            ConfigError: If the job must not resume.
        """
        from forge.jobdir.config_changes import differences, listed  # no first start needs it

        self._changed = differences(known.identity, mine.identity)
        if self._changed and not is_change_wanted:
            is_same = Path(known.job_dir) == self._path.parent
            started_in = "" if is_same else f" (started in {known.job_dir})"
            by_policy = "`resume: changed` in the policy that is given to forge.Run"
            command = job_dir.taking_command(self._job) or by_policy  # jobs of submitit have none
            raise ConfigError(
                [
                    f"{self._path.parent} has the checkpoints of another job{started_in}."
                    f" Differences:{listed(self._changed, 6)}\n    To"
                    f" resume that job with this config:\n      {command}\n   "
                    " To train both, give each its own directory (`resilience.checkpoint.dir`)."
                    + (_BY_CONFIG if mine.words is not None else "")
                ],
                "The checkpoint directory",
            )
        if kept := self._built.kept(known.built):
            messages.warn(
                "The script now builds other values than at the last start. The values in the"
                " checkpoint replace them; to change them, set them after forge.Run is entered:"
                f"{listed(kept)}"
            )
        return not is_change_wanted or _id(known.identity, known.built) == mine.id

    def _resumed(self, known: _Entry, mine: _Entry) -> _Entry:
        """The existing entry, updated for this start."""
        if not known.identity.is_known and mine.identity.is_known:
            messages.say(
                f"{self._path} did not contain the job's config. It now has the config of this"
                " start; a start with another config will be refused."
            )
            known = replace(known, config=mine.config, words=mine.words)
        return replace(known, job_dir=mine.job_dir)

    def check_known(self, saved_by: str) -> None:
        """Refuse a checkpoint of a job that this directory does not list.

        Args:
            saved_by: The id in its manifest.
        Raises:
            CheckpointError: If the id is unknown.
        """
        if saved_by in ("", *(one.id for one in self._known)):
            return
        steps = [one for one in step_dirs(self._path.parent) if _newest_id([one]) == saved_by]
        names = messages.truncate_list([one.name for one in steps], 3)
        raise CheckpointError(
            f"{names} in {self._path.parent} was saved by another job ({saved_by[:12]}): by none of"
            f" the jobs of this directory, which {FILE} lists. Move {names} to another directory,"
            " or set another `resilience.checkpoint.dir`."
        )

    def keep(self, ledger: Ledger) -> None:
        """Write `job.json`, and log a change of the directory's job.

        Raises:
            OSError: If the file cannot be written.
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
            text = f"Resumes the job that was started in {before.job_dir}, with the new config of"
            _record(ledger, f"{text} this start", self._changed)
        elif before.job_dir != now.job_dir and before.id == now.id:
            messages.say(
                f"Resumes the job that was started in {before.job_dir}: the program and the config"
                " are the same."
            )

    def _is_written(self) -> bool:
        try:
            return _read(self._path) == self._known
        except (OSError, *_DAMAGE):
            return False


def _record(ledger: Ledger, text: str, changed: list[Change]) -> None:
    """Record the changes, and log them after the text."""
    from forge.jobdir.config_changes import listed

    ledger.write(
        "changed",
        keys=[one.key for one in changed],
        before={one.key: one.before for one in changed},
        after={one.key: one.now for one in changed},
    )
    messages.say(f"{text}:{listed(changed)}")


def _id(who: Identity, built: dict[str, Any]) -> str:
    text = json.dumps([asdict(who), built], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps({**content, "checksum": 0}, sort_keys=True).encode())


def _read(path: Path) -> list[_Entry]:
    """The entries of a file; raises FileNotFoundError, or an error in `_DAMAGE`."""
    content = json.loads(read_plain(path))
    if content["checksum"] != _checksum(content):
        raise ValueError("its checksum does not match")
    found = [_Entry(**one) for one in content["jobs"]]
    if not found:
        raise ValueError("it names no job")
    return found


def _newest_id(steps: list[Path]) -> str | None:
    """The id in the newest readable manifest; None without one."""
    for path in steps:
        try:
            return manifest.read(path).job
        except DamagedCheckpoint:
            continue
    return None
