"""The last boundary of a job one of whose ranks has died: rank 0 saves it for all of them.

    at each boundary   every rank keeps a page: its random state, its place in the data
    a rank dies        the collective fails in which the others stand, and they leave
    rank 0, leaving    the pages of all ranks, and what all have alike: one checkpoint

What is alike in the last checkpoint is so at this boundary, too: gradients were averaged. Rank 0
still has it, unless something of it has changed in the step; then, or where a page is missing, the
job resumes from its last checkpoint, and the ledger says why.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from forge.checkpoint.format import shards
from forge.checkpoint.load import reading
from forge.compat import of_torch
from forge.errors import ForgeError
from forge.filesystem.steps import step_dirs
from forge.group.group import Group
from forge.jobdir.job_files import forge_dir
from forge.training.contents import Contents
from forge.training.emergency.pages import Pages
from forge.training.loop.loops import Loops
from forge.training.start.run_directory import RunDirectory

_KNOWN = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
"""Kinds of objects of which it is seen whether they have changed since the boundary."""

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
        live = contents.live
        is_sharded = any(shards.is_sharded(p) for _, p in live.parameters())
        self._pages: Pages | None = None
        if group.size > 1 and not is_sharded:
            self._pages = Pages(forge_dir(directory.job), group.rank)
        self._hooks = [one.register_step_pre_hook(self._begun) for one in live.optimizers]
        self._parameters = [p for _, p in live.parameters()]
        self._modules = [m for one in live.objects.values() for m in _modules(one)]
        self._holders = [m for m in self._modules if [*m.buffers(recurse=False)]]
        self._schedules = [one for one in live.objects.values() if isinstance(one, LRScheduler)]
        self._dropouts = [m for m in self._modules if hasattr(m, "p")]
        self._boundary: int | None = None
        """That of the step which is under way."""
        self._step, self._num_steps = 0, -1
        self._has_begun = False
        """Whether an optimizer has, in this step."""
        self._had_gradients = False
        self._mark: list[Any] = []
        self._options: list[dict[str, Any]] = []
        self._training: list[bool] = []

    def _begun(self, *_: Any) -> None:
        self._has_begun = True

    def arrive(self) -> None:
        """The step has ended."""
        self._boundary = None

    def leave_boundary(self, boundary: int) -> None:
        """A step begins: keep what this rank alone has."""
        if self._pages is None or self._contents.is_large:
            return
        self._boundary, self._step, self._has_begun = boundary, self._loops.step, False
        self._num_steps += 1
        if self._group.rank == 0:
            self._mark = self._marked()
            self._had_gradients = any(one.grad is not None for one in self._parameters)
            self._options = [options for _, options in self._groups()]
            self._training = [one.training for one in self._modules]
        self._pages.write(boundary, self._contents.of_this_rank())

    def _marked(self) -> list[Any]:
        """What another value of tells that something of the state has changed."""
        buffers = [one for m in self._holders for one in m.buffers(recurse=False)]
        return [
            [(id(one), of_torch.version(one)) for one in buffers],
            [of_torch.version(one) for one in self._parameters],
            [one.requires_grad for one in self._parameters],
            [one.last_epoch for one in self._schedules],
            [one.p for one in self._dropouts],
        ]

    def _groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each group of the optimizers, and its options: many loops set the rate in each step."""
        groups = [group for one in self._contents.live.optimizers for group in one.param_groups]
        return [(one, {k: v for k, v in one.items() if k != "params"}) for one in groups]

    def _put_back(self) -> None:
        """What a step may set before its backward pass."""
        for (group, _), options in zip(self._groups(), self._options, strict=True):
            group.update(options)
        for module, is_training in zip(self._modules, self._training, strict=True):
            module.training = is_training

    def save(self) -> str:
        """Save the boundary for all, as rank 0; says what the job resumes from, or nothing."""
        with contextlib.suppress(RuntimeError):  # values on a device that has failed stay there
            self._directory.metrics.flush()
        if self._pages is None or self._group.rank:
            return ""
        step, ledger = self._step, self._directory.ledger
        self._directory.saver.finish()
        try:
            problem = self._problem() or self._save_for_all(self._pages)
        except (OSError, RuntimeError, ForgeError) as error:
            problem = str(error).partition("\n")[0]
        if not problem:
            return f"Rank 0 has saved step {step} for all ranks"
        ledger.write("not_saved", step=step, text=problem)
        return f"Step {step} was not saved, since {problem}. {self._directory.in_place()}"

    def _problem(self) -> str:
        """Why what all ranks have alike is not at hand; empty where it is."""
        live = self._contents.live
        if self._contents.is_large:
            return "run.state, or what a loader says of its place, is too large to be kept"
        if self._boundary is None:
            return "rank 0 was between two steps"
        if self._has_begun or self._contents.is_judged:
            return "an optimizer had begun its step, or run.update had judged it"
        if self._num_steps < _MIN_STEPS:
            return f"this attempt had not yet done {_MIN_STEPS} steps"
        for name, one in live.objects.items():
            if not isinstance(one, _KNOWN) or _has_extra(one):
                return f"{name}, a {type(one).__name__}, may have changed in the step"
        if self._had_gradients:
            return "gradients were kept over the boundary: clear them after the optimizer's step"
        if self._mark != self._marked():
            return "a parameter, a buffer (averages of a BatchNorm?) or a schedule had changed"
        return self._unlike()

    def _unlike(self) -> str:
        """What the last checkpoint has of ranks by themselves, besides their pages."""
        for path in step_dirs(self._directory.checkpoint_dir)[:1]:
            found = reading.unlike(path, "live", self._group.size)
            return f"{found[0]} is not the same on all ranks" if found else ""
        return "no checkpoint tells yet what is the same on all ranks"

    def _save_for_all(self, pages: Pages) -> str:
        assert self._boundary is not None
        found = [pages.read(rank, self._boundary) for rank in range(self._group.size)]
        step = self._step
        missing = [r for r, one in enumerate(found) if one is None or one["step"] != step]
        if missing:
            return f"rank {missing[0]} was not at the boundary where rank 0 was"
        self._put_back()
        alike = self._contents.of_all_ranks()
        alike["live"]["grads"] = {}  # of the step that is under way
        states = [alike | one for one in found]
        self._directory.saver.save_for_all(step, states)
        return ""

    def close(self) -> None:
        """The loop has ended, or nothing more can be saved."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._pages is not None:
            self._pages.close()


def _modules(one: Any) -> list[torch.nn.Module]:
    return [*one.modules()] if isinstance(one, torch.nn.Module) else []


def _has_extra(one: Any) -> bool:
    """Whether a module says by itself what else is its state."""
    own = torch.nn.Module.get_extra_state
    return any(type(module).get_extra_state is not own for module in _modules(one))
