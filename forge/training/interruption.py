"""A stop that no step boundary comes for: the training never polls, or a step takes too long.

Whoever has waited long enough (`forge.Checkpointable`) interrupts the main thread between two
bytecodes and calls `stop` there. Where an exact state is at hand it is saved, as `Run.poll` would;
else what is registered is saved as it is. What that means for each place the run may be in:

    before `run.steps`, nothing changed     nothing to save
    a loop of the user's own                everything as it is now; where that loop was, only the
                                            user knows
    in a step, its update done              as the state between this step and the next: exact but
                                            for what the rest of the step would have done
    in a step, its update not done          the step is repeated with its batch, from weights that
                                            are exact; gradients of this and of accumulating steps
                                            before it, and buffers that forward changed, are not
    between two steps, reading a batch      as at the boundary; only what reading drew is not exact
    anywhere, a checkpoint of this step     that one: it is exact
"""

from __future__ import annotations

import os
import signal
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from forge import messages
from forge.checkpoint import Store
from forge.errors import CheckpointError, ConfigError, DirectoryInUse
from forge.jobdir import spawned
from forge.state import fingerprint
from forge.training import preflight
from forge.training.session import Session

_FORGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OPTIM = os.path.join(os.path.dirname(torch.optim.__file__), "")
_READING = {"_steps", "_one_step", "_go_to"}
_HARMLESS = {"checkpointable.py", "position.py", "data.py", "workers.py"}
"""Files of forge below which the user's code, or a loader, may run for long."""

_active: list[LateSession] = []
written: list[int] = []
"""The step of each checkpoint that was written here; without `run.steps` it is always the same."""


class LateSession(Session):
    """A session that can be left where it is."""

    def open(self) -> None:
        """See `Session.open`."""
        preflight.check_alone(any(one._pid == os.getpid() for one in _active))
        super().open()
        self._opened = self._versions()
        _active.append(self)
        spawned.once_parent_is_gone(self._stop_as_orphan)

    def _release(self) -> None:
        if self in _active:
            _active.remove(self)
        super()._release()

    def _stop_as_orphan(self) -> None:
        if self in _active:
            messages.warn("The process that started this one is gone: saving and exiting")
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_here(self) -> NoReturn:
        """Save once what there is to save, and leave through `Exit`."""
        if self._leaving is not None:
            raise self._leaving  # it was swallowed
        if self._has_begun:
            self.poll()
        try:
            self.save_here()
        except (CheckpointError, ConfigError, DirectoryInUse) as error:
            self._leave(error.exit_code, str(error), "error")
        self._stop(should_save=False)

    def save_here(self) -> bool:
        """Save as the table above says; returns whether a checkpoint was written.

        Raises:
            CheckpointError: Where it could not be written.
        """
        if self._nan.halt_reason is not None or self._nan.rollback_from is not None:
            return False  # what is registered is known to be bad
        if not self._has_begun:
            has_changed = self._versions() != self._opened
            is_ours = self._loaded is not None and bool(self._loaded["positions"])
            return has_changed and not is_ours and not self._is_complete and self._write()
        if self._loaded is not None:
            return False  # this attempt has trained nothing yet
        has_updated = self._is_in_step and self._updater.has_updated
        if has_updated:
            self.step += 1
            return self._write()
        if self._disk.store.holds(self.step, is_complete=False):
            return False
        return self._write(is_repeated=self._is_in_step)

    def _write(self, is_repeated: bool = False) -> bool:
        state = self._state()
        if is_repeated:
            replay = {**self._batch.saved(), "begin_rng": {}, "losses": [], "logged": []}
            if self._batch.is_intact() and Store.is_savable(replay):
                state["replay"] = replay
            state["live"]["grads"] = {}
            state["rng"] = self._marker.begin_rng or state["rng"]
        self._disk.saver.wait()
        snapshot = self._disk.store.snapshot(self.step, state, False, copy=False)
        try:
            path = self._disk.store.commit(snapshot)
        except OSError as error:
            raise CheckpointError(
                f"The state in step {self.step} could not be saved: {error}"
            ) from error
        self._disk.ledger.write("save", step=self.step, reason="late", path=path.name)
        written.append(self.step)
        return True

    def _versions(self) -> Any:
        """Changes whenever a registered object does; equals nothing where that is not known."""
        tensors: list[torch.Tensor] = [parameter for _, parameter in self._live.parameters()]
        for one in self._live.objects.values():
            if isinstance(one, torch.nn.Module):
                modules = list(fingerprint.every([one]))
                if any(map(fingerprint.saves_more, modules)):
                    return object()
                tensors += one.buffers()
            elif not isinstance(one, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
                return object()
        if any(tensor.is_inference() for tensor in tensors):
            return object()
        return [(id(tensor), tensor._version) for tensor in tensors]


def is_active() -> bool:
    """Whether a `forge.Run` is open in this process."""
    return bool(_active)


def save() -> bool:
    """Save what is registered as it is now, if a run is open; main thread only."""
    return bool(_active) and _active[-1].save_here()


def stop() -> None:
    """Save and leave, if a run is open; main thread only."""
    if _active:
        _active[-1].stop_here()


def is_safe(frame: FrameType | None) -> bool:
    """Whether the main thread, interrupted in `frame`, is in nothing that must not be halved.

    That is an update, and whatever forge itself does: a save that is under way, above all.
    """
    while frame is not None:
        if not _is_safe(frame.f_code):
            return False
        frame = frame.f_back
    return True


def _is_safe(code: CodeType) -> bool:
    path = code.co_filename
    if path.startswith(_OPTIM):
        return False
    name = path.removeprefix(_FORGE)
    if name == path or name in _HARMLESS:
        return True
    return name == "session.py" and code.co_name in _READING
