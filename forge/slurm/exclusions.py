"""Nodes on which a health check has failed, and which of them a job stays off.

<job dir>/.forge/excluded/<node>.json     by this job, with the action `refuse`
<sweep dir>/.forge/excluded/<node>.json   by any job of the sweep, with `exclude_node`

A file for each node, written in one step: what two jobs find at once is not lost, and of a job
that is killed meanwhile either all of it is there or nothing. Nobody removes one, since somebody
else may just have renewed it: it says until when it holds. Standard library only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import SlurmRefused, Untrusted
from forge.filesystem.files import make_directory
from forge.jobdir.job_files import forge_dir, read_json, write_json
from forge.jobdir.sick import Sick
from forge.slurm import client
from forge.slurm.client import JobInfo

FOLDER = "excluded"
_NODE = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Exclusion:
    """A node that a check has failed on, and until when jobs stay off it."""

    node: str
    check: str
    """Name of the check; empty where nobody has said."""
    text: str
    """What was found, for people."""
    job: str
    """Directory of the job that found it."""
    found: float
    """Unix time."""
    until: float
    """Unix time."""

    def __str__(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        what = f"`{self.check}` failed there" if self.check else "a check failed there"
        return f"{self.node} ({what} for the job in {self.job}; excluded until {when})"


@dataclass(frozen=True)
class Choice:
    """What becomes of the exclusions that hold."""

    kept: list[Exclusion] = field(default_factory=list)
    left_out: list[Exclusion] = field(default_factory=list)
    """Those without which enough nodes are left for the job."""
    before: list[str] = field(default_factory=list)
    """The job's ExcNodeList."""
    names: list[str] = field(default_factory=list)
    """What it is to be."""

    def missing(self, job: Path) -> list[str]:
        """The nodes that this very job has found sick, where it cannot do without all of them."""
        own = str(job)
        if not any(one.job == own for one in self.left_out):
            return []
        return sorted(one.node for one in [*self.kept, *self.left_out] if one.job == own)


class Exclusions:
    """What one job knows of sick nodes, and has made of it."""

    def __init__(
        self, job: Path, sweep: Path, hours: float, say: Callable[[str], None] = print
    ) -> None:
        """`job` and `sweep` are their directories."""
        self._job, self._hours, self._say = job, hours, say
        self._own, self._shared = forge_dir(job) / FOLDER, forge_dir(sweep) / FOLDER
        self._noted: list[Exclusion] = []
        self._said: set[Exclusion] = set()
        self.ours: list[str] = []
        """Nodes in the job's ExcNodeList that are there by forge, and not by its user."""
        self.left: list[str] = []
        """Nodes that it has left since the last attempt, without having tried them."""

    def load(self, state: Mapping[str, Any], *, is_same_list: bool) -> None:
        """Take over from an earlier start; with another number, the job has another list."""
        self.ours = list(state.get("excluded", ())) if is_same_list else []
        self.left = list(state.get("left", ())) if is_same_list else []

    def to_json(self) -> dict[str, Any]:
        """What `load` takes."""
        return {"excluded": self.ours, "left": self.left}

    def note(self, found: Iterable[Sick]) -> None:
        """Take in what the ranks of an attempt say of their nodes."""
        for one in found:
            if one.action == "halt" or not _NODE.fullmatch(one.node):
                continue
            now = time.time()
            until = now + self._hours * 3600
            made = Exclusion(one.node, one.check, one.text, str(self._job), now, until)
            self._noted.append(made)
            folder = self._shared if one.action == "exclude_node" else self._own
            try:
                make_directory(folder)
                write_json(folder / f"{one.node}.json", asdict(made), is_synced=True)
            except (OSError, Untrusted) as error:  # a full disk ends no job
                self._say(f"could not tell other jobs, and later starts, that {made}: {error}")

    def standing(self) -> list[Exclusion]:
        """What holds now, one for each node: what this job has found first, then the newest."""
        now, own = time.time(), str(self._job)
        found = [*self._noted, *self._read(self._own), *self._read(self._shared)]
        by_node = dict[str, Exclusion]()
        for one in sorted(found, key=lambda one: (one.job != own, -one.found)):
            if one.until > now:
                by_node.setdefault(one.node, one)
        return list(by_node.values())

    def choose(self, info: JobInfo | None, needed: int, within_s: float) -> Choice:
        """Which nodes the job is kept off, so that enough of them are left.

        Args:
            info: What the controller says of the job; None: it has not said anything.
            needed: Nodes of the job.
            within_s: Seconds for each question.
        """
        standing = self.standing()
        if info is None or not (standing or self.ours):
            return Choice(kept=standing)
        before, required, nodes = [info.excluded] if info.excluded else [], list[str](), None
        try:
            before = client.hostnames(info.excluded, within_s)
            required = client.hostnames(info.required, within_s)
            if standing:
                nodes = client.nodes_for(info, within_s)
        except SlurmRefused as error:
            self._say(f"the number of remaining nodes is unknown: {error}")
        fixed = [name for name in before if name not in self.ours]
        kept, left_out = choose(standing, nodes, fixed, required, needed)
        for one in left_out:
            if one not in self._said:
                self._say(f"not excluded, since too few other nodes are left: {one}")
            self._said.add(one)
        names = list(dict.fromkeys([*fixed, *sorted(one.node for one in kept)]))
        return Choice(kept, left_out, before, names)

    def apply(self, job: str, choice: Choice, within_s: float) -> bool:
        """Bring the choice into the list of a job that waits in the queue.

        Returns:
            Whether that has changed the list.
        Raises:
            NoAnswer, NoSuchJob: As `client.exclude`.
        """
        if set(choice.names) == set(choice.before):
            return False
        client.exclude(job, choice.names, within_s)
        self.take(choice)
        return True

    def take(self, choice: Choice) -> None:
        """It is the job's list now."""
        fixed = [name for name in choice.before if name not in self.ours]
        self.ours = [name for name in choice.names if name not in fixed]

    def _read(self, folder: Path) -> list[Exclusion]:
        try:
            paths = sorted(folder.glob("[!.]*.json"))
            return [one for path in paths if (one := _read_one(path)) is not None]
        except (OSError, Untrusted) as error:  # nothing there is worth a job
            self._say(f"the list of excluded nodes cannot be read: {error}")
            return []


def choose(
    standing: Iterable[Exclusion],
    nodes: Mapping[str, bool] | None,
    fixed: Collection[str],
    required: Collection[str],
    needed: int,
) -> tuple[list[Exclusion], list[Exclusion]]:
    """Split exclusions into those that are kept, and those that would leave too few nodes.

    Args:
        standing: The most important ones first.
        nodes: The job's nodes, with whether it could be started there; None: nobody knows.
        fixed: Nodes that its user has excluded.
        required: Nodes that it has to have (`--nodelist`).
        needed: How many nodes it has to have.
    """
    kept, left_out = [], []
    usable = {name for name, is_usable in (nodes or {}).items() if is_usable} - set(fixed)
    for one in standing:
        if one.node in fixed or (nodes is not None and one.node not in nodes):
            continue  # Slurm would not start it there in any case
        is_affordable = nodes is None or one.node not in usable or len(usable) > needed
        if one.node in required or not is_affordable:
            left_out.append(one)
            continue
        kept.append(one)
        usable.discard(one.node)
    return kept, left_out


def _read_one(path: Path) -> Exclusion | None:
    """None: there is none, or none that makes sense."""
    content, kinds = read_json(path) or {}, {"found": float, "until": float}
    try:
        values: dict[str, Any] = {
            name: kinds.get(name, str)(content[name]) for name in Exclusion.__annotations__
        }
    except (KeyError, TypeError, ValueError):
        return None
    return Exclusion(**values) if _NODE.fullmatch(values["node"]) else None
