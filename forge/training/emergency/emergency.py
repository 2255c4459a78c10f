"""The last boundary of a job one of whose ranks has died: rank 0 saves it for all of them.

    at each boundary   every rank keeps a page: its random state, its place in the data
    a rank dies        the collective fails in which the others stand, and they leave
    rank 0, leaving    the pages of all ranks, and what all have alike: one checkpoint

Rank 0 has what is alike, unless the step has changed it; `step_changes.py` says whether it has.
Where that is not certain, or a page is missing, nothing is saved: the job resumes from its last
checkpoint, and the ledger says why.
"""

from __future__ import annotations

import torch.distributed as dist

from forge import messages
from forge.checkpoint.format import manifest
from forge.checkpoint.load import reading
from forge.errors import DamagedCheckpoint
from forge.filesystem.steps import step_dirs
from forge.group.group import Group
from forge.jobdir.job_files import forge_dir
from forge.training.contents import Contents
from forge.training.emergency.pages import Pages
from forge.training.emergency.step_changes import StepChanges
from forge.training.loop.loops import Loops
from forge.training.start.run_directory import RunDirectory

_MIN_STEPS = 2
"""Steps of an attempt until its DDP modules have the buckets that they keep."""


class Emergency:
    """What is at hand of the last boundary, while a step is under way.

    Args:
        group: The ranks; of a single one nothing is kept.
        loops: Where the run is.
        contents: What is saved.
        directory: Where it is saved.
    """

    def __init__(
        self, group: Group, loops: Loops, contents: Contents, directory: RunDirectory
    ) -> None:
        self._group = group
        self._loops = loops
        self._contents = contents
        self._directory = directory
        self._first_step = loops.step
        self._boundary: int | None = None
        """That of the step which is under way."""
        self._step = 0
        self._pages: Pages | None = None
        self._changes: StepChanges | None = None
        self._never = ""
        """Why nothing can be saved in this attempt."""
        if group.size == 1:
            return
        # With NCCL the watchdog ends the others in their collective, and costs would be in vain.
        self._never = "" if dist.get_backend() == "gloo" else "the backend is not gloo"
        changes = StepChanges(contents.live)
        self._never = self._never or changes.problem()
        if self._never:
            return
        try:
            self._pages = Pages(forge_dir(directory.job), group.rank)
        except OSError as error:
            self._never = str(error)
            return
        if group.rank == 0:
            self._changes = changes
            changes.listen()

    def arrive(self) -> None:
        """The step has ended."""
        self._boundary = None

    def leave_boundary(self, boundary: int) -> None:
        """A step begins: keep what this rank alone has."""
        if self._pages is None:
            return
        self._boundary, self._step = boundary, self._loops.step
        problem = "a loader says its own place" if self._loops.is_stateful else ""
        try:
            if self._changes is not None:
                self._changes.begin_step()
            page = self._contents.of_this_rank() | {"of": str(self._directory.checkpoint_dir)}
            problem = problem or self._pages.write(boundary, page)
        except Exception as error:  # noqa: BLE001 - training goes on without
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        messages.warn(f"Where a rank dies, the job resumes from its last checkpoint: {problem}")
        self._never = problem
        self.close()

    def save(self) -> str:
        """Save the boundary for all, as rank 0, once a rank is lost; says what it did, if it did.

        Takes as long as a save, and is tried once.
        """
        if self._group.size == 1 or self._group.rank or not self._group.lost(0):
            return ""
        try:
            problem = self._problem() or self._save_for_all()
        except Exception as error:  # noqa: BLE001 - the exit that is under way counts
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not problem:
            return f"Rank 0 has saved step {self._step} for all ranks"
        step = self._loops.step
        self._directory.ledger.write("not_saved", step=step, text=problem)
        return f"The step was not saved, since {problem}. {self._directory.in_place()}"

    def _problem(self) -> str:
        """Why what all ranks have alike is not at hand; empty where it is."""
        if self._never:
            return self._never
        if self._boundary is None or self._changes is None:
            return "rank 0 was between two steps"
        if self._contents.is_judged:
            return "run.update had judged the step"
        if self._step - self._first_step < _MIN_STEPS:
            return f"this attempt had not yet done {_MIN_STEPS} steps"
        return self._changes.changed() or self._unlike()

    def _unlike(self) -> str:
        """What the last checkpoint has of ranks by themselves, besides their pages."""
        for path in step_dirs(self._directory.checkpoint_dir)[:1]:
            if manifest.read(path).step:  # that of step 0 is alike in any case
                found = reading.unlike(path, self._group.size, "live", "nan", "overflows")
                return f"{found[0]} is not the same on all ranks" if found else ""
        return "no checkpoint tells yet what is the same on all ranks"

    def _save_for_all(self) -> str:
        pages, step, boundary = self._pages, self._step, self._boundary
        assert pages is not None
        assert boundary is not None
        found = [pages.read(rank, boundary) for rank in range(self._group.size)]
        own = str(self._directory.checkpoint_dir), step
        for rank, page in enumerate(found):
            if page is None or (page.pop("of"), page["step"]) != own:
                return f"rank {rank} was not at the boundary where rank 0 was"
        try:
            if manifest.read(self._directory.checkpoint_dir / f"step_{step}"):
                return ""  # it is there
        except (OSError, DamagedCheckpoint):
            self._directory.metrics.flush()
            self._directory.saver.finish()
        assert self._changes is not None
        self._changes.put_back()
        alike = self._contents.of_all_ranks()
        alike["live"]["grads"] = {}  # of the step that is under way
        self._directory.saver.save_for_all(step, [alike | page for page in found])
        return ""

    def close(self) -> None:
        """The loop has ended, or nothing more can be saved."""
        if self._changes is not None:
            self._changes.close()
        if self._pages is not None:
            self._pages.close()
        self._pages = None
