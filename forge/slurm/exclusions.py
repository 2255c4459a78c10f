"""The nodes that failed a health check, and the choice of those that a job avoids.

<job dir>/.forge/excluded/<node>.json     by this job, with the action `refuse`
<sweep dir>/.forge/excluded/<node>.json   by any job of the sweep, with `exclude_node`

Each node has a file, written atomically: two jobs can add nodes at the same time, and a job that is
killed leaves no half-written file. A file contains the time at which the exclusion expires; forge
does not remove the file, since another job can just have renewed it. Standard library only.
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
from forge.jobdir.node_fault import NodeFault
from forge.slurm import client
from forge.slurm.job_info import JobInfo

FOLDER = "excluded"
_NODE = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Exclusion:
    """A node on which a health check has failed, and until when jobs avoid it."""

    node: str
    check: str
    """Name of the check; empty if it is unknown."""
    text: str
    """The finding, for people."""
    job: str
    """Directory of the job that found it."""
    found: float
    """Unix time."""
    until: float
    """Unix time."""

    def __str__(self) -> str:
        """The node, the check and the expiry, for messages."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        what = f"`{self.check}` failed there" if self.check else "a check failed there"
        return f"{self.node} ({what} for the job in {self.job}; jobs avoid it until {when})"


@dataclass(frozen=True)
class Choice:
    """The current exclusions that are applied to a job, and those that are not."""

    kept: list[Exclusion] = field(default_factory=list)
    left_out: list[Exclusion] = field(default_factory=list)
    """Exclusions that are ignored, so that enough nodes are left for the job."""
    before: list[str] = field(default_factory=list)
    """The job's current ExcNodeList."""
    names: list[str] = field(default_factory=list)
    """The new ExcNodeList."""

    def missing(self, job: Path) -> list[str]:
        """The nodes that this job itself has found sick, if it needs at least one of them."""
        own = str(job)
        if not any(one.job == own for one in self.left_out):
            return []
        return sorted(one.node for one in [*self.kept, *self.left_out] if one.job == own)


class Exclusions:
    """The exclusions that apply to one job, and the nodes that forge has excluded for it."""

    def __init__(
        self, job: Path, sweep: Path, hours: float, say: Callable[[str], None] = print
    ) -> None:
        """`job` and `sweep` are the directories of the job and of its sweep."""
        self._job, self._hours, self._say = job, hours, say
        self._own, self._shared = forge_dir(job) / FOLDER, forge_dir(sweep) / FOLDER
        self._noted: list[Exclusion] = []
        self._said: set[Exclusion] = set()
        self.ours: list[str] = []
        """Nodes in the job's ExcNodeList that forge, and not the user, has added."""
        self.left: list[str] = []
        """Nodes on which the job has not tried to start since its last attempt."""

    def load(self, state: Mapping[str, Any], *, is_same_list: bool) -> None:
        """Restore the state of an earlier start; a job with a new number has a new ExcNodeList."""
        self.ours = list(state.get("excluded", ())) if is_same_list else []
        self.left = list(state.get("left", ())) if is_same_list else []

    def to_json(self) -> dict[str, Any]:
        """The state for `load`."""
        return {"excluded": self.ours, "left": self.left}

    def note(self, found: Iterable[NodeFault]) -> None:
        """Exclude the nodes that the ranks of an attempt have reported as sick."""
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
            except (OSError, Untrusted) as error:  # a full disk must not end the job
                self._say(
                    f"The exclusion of node {made} could not be stored, so other jobs and later"
                    f" starts can use the node: {error}"
                )

    def standing(self) -> list[Exclusion]:
        """The current exclusions, one for each node: first those of this job, then the newest."""
        now, own = time.time(), str(self._job)
        found = [*self._noted, *self._read(self._own), *self._read(self._shared)]
        by_node = dict[str, Exclusion]()
        for one in sorted(found, key=lambda one: (one.job != own, -one.found)):
            if one.until > now:
                by_node.setdefault(one.node, one)
        return list(by_node.values())

    def choose(self, info: JobInfo | None, needed: int, within_s: float) -> Choice:
        """Choose the nodes to exclude, so that enough nodes are left for the job.

        Args:
            info: The job, as the controller describes it; None if the controller did not answer.
            needed: Number of nodes of the job.
            within_s: Timeout in seconds for each question to the controller.
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
            self._say(f"forge could not find out how many nodes would be left: {error}")
        fixed = [name for name in before if name not in self.ours]
        kept, left_out = choose(standing, nodes, fixed, required, needed)
        for one in left_out:
            if one not in self._said:
                self._say(f"the job can start on this node, since too few others are left: {one}")
            self._said.add(one)
        names = list(dict.fromkeys([*fixed, *sorted(one.node for one in kept)]))
        return Choice(kept, left_out, before, names)

    def apply(self, job: str, choice: Choice, within_s: float) -> bool:
        """Set the ExcNodeList of a job that waits in the queue.

        Returns:
            Whether the list has changed.
        Raises:
            NoAnswer, NoSuchJob: As `client.exclude`.
        """
        if set(choice.names) == set(choice.before):
            return False
        client.exclude(job, choice.names, within_s)
        fixed = [name for name in choice.before if name not in self.ours]
        self.ours = [name for name in choice.names if name not in fixed]
        return True

    def _read(self, folder: Path) -> list[Exclusion]:
        try:
            paths = sorted(folder.glob("[!.]*.json"))
            return [one for path in paths if (one := _read_one(path)) is not None]
        except (OSError, Untrusted) as error:  # the job is more important
            self._say(f"the list of excluded nodes cannot be read: {error}")
            return []


def choose(
    standing: Iterable[Exclusion],
    nodes: Mapping[str, bool] | None,
    fixed: Collection[str],
    required: Collection[str],
    needed: int,
) -> tuple[list[Exclusion], list[Exclusion]]:
    """Split exclusions into those that are applied, and those that would leave too few nodes.

    Args:
        standing: The exclusions, the most important first.
        nodes: The nodes that the job can get, and whether it could start there; None if unknown.
        fixed: Nodes that the user has excluded.
        required: Nodes that the user requires (`--nodelist`).
        needed: Number of nodes of the job.
    """
    kept, left_out = [], []
    usable = {name for name, is_usable in (nodes or {}).items() if is_usable} - set(fixed)
    for one in standing:
        if one.node in fixed or (nodes is not None and one.node not in nodes):
            continue  # Slurm would not start the job there in any case
        is_affordable = nodes is None or one.node not in usable or len(usable) > needed
        if one.node in required or not is_affordable:
            left_out.append(one)
            continue
        kept.append(one)
        usable.discard(one.node)
    return kept, left_out


def _read_one(path: Path) -> Exclusion | None:
    """Read a file; None if it is missing or malformed."""
    content, kinds = read_json(path) or {}, {"found": float, "until": float}
    try:
        values: dict[str, Any] = {
            name: kinds.get(name, str)(content[name]) for name in Exclusion.__annotations__
        }
    except (KeyError, TypeError, ValueError):
        return None
    return Exclusion(**values) if _NODE.fullmatch(values["node"]) else None
