"""The progress of a transformers Trainer: counters, running sums, log history, callbacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl

from forge.compat import of_transformers, of_trl
from forge.integrations.callbacks import lost_on_resume

_NOT_SAVED = {
    "max_steps": "the arguments decide: a job can be continued with more steps",
    "num_train_epochs": "the same",
    "is_local_process_zero": "it belongs to the process",
    "is_world_process_zero": "the same",
    "is_hyper_param_search": "a search is refused",
    "trial_name": "the same",
    "trial_params": "the same",
    "stateful_callbacks": "the callbacks are saved as they are now",
}
"""Fields of `TrainerState` that a checkpoint must not have, and why. All others are saved: in a
training that began with a checkpoint of the Trainer's own, they are those of that checkpoint."""


_LIBRARIES = ("transformers", "trl", "peft", "accelerate", "forge")
"""Packages whose callbacks keep nothing that training depends on, apart from what they export."""
_TIMES = ("runtime", "per_second")
"""Ends of the names of logged values that are times."""


class TrainerProgress:
    """The progress of a Trainer as an object with a state_dict.

    Args:
        trainer: A `transformers.Trainer`; the attributes that it names in `saved_attributes` are
            saved, too.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._attributes = [*trainer.saved_attributes, *of_trl.logged_attributes(trainer)]
        self.place = (0, 0, 0)
        """The epoch, the batches trained on in it, and the batches trained on in all epochs."""
        self.is_over = False
        """Whether the loop has ended."""

    def advance(self, epoch: int, in_epoch: int, trained: int) -> None:
        """Note the place, before each boundary.

        Args:
            epoch: The epoch.
            in_epoch: Batches trained on in this epoch.
            trained: Batches trained on in all epochs.
        """
        self.place = epoch, in_epoch, trained

    def end(self) -> None:
        """Note that the loop has ended."""
        self.is_over = True

    def state_dict(self) -> dict[str, Any]:
        """The progress after the last step."""
        trainer = self._trainer
        fields = [one.name for one in dataclasses.fields(trainer.state)]
        state = {one: getattr(trainer.state, one) for one in fields if one not in _NOT_SAVED}
        history = state["log_history"]
        return {
            "place": [*self.place, self.is_over],
            "state": state | {"log_history": [without_times(row) for row in history]},
            "measured": {"times": [{k: row[k] for k in row if is_time(k)} for row in history]},
            "sums": of_transformers.sums(trainer),
            "callbacks": {name: _exported(one) for name, one in self._callbacks()},
            "attributes": {name: _plain(getattr(trainer, name)) for name in self._attributes},
            "eval_loaders": of_transformers.names_of_lasting_eval_loaders(trainer),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from there."""
        trainer = self._trainer
        *place, self.is_over = saved["place"]
        self.place = tuple(place)
        self.restore_counters(saved)
        of_transformers.restore_sums(trainer, saved["sums"])
        callbacks = dict(self._callbacks())
        for name, values in saved["callbacks"].items():
            if name in callbacks:
                _restore(callbacks[name], values)
        for name, value in saved["attributes"].items():
            setattr(trainer, name, _refilled(getattr(trainer, name), value))
        for name in saved["eval_loaders"]:
            self._start_workers(name)

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Restore the `TrainerState`, which the Trainer reads before it builds the optimizer."""
        for name, value in saved["state"].items():
            setattr(self._trainer.state, name, value)
        rows = zip(saved["state"]["log_history"], saved["measured"]["times"], strict=True)
        self._trainer.state.log_history = [row | times for row, times in rows]

    def unsaved(self) -> Iterator[str]:
        """A sentence for each callback whose attributes are not saved."""
        saved = [one for _, one in self._callbacks()]
        for one in self._trainer.callback_handler.callbacks:
            is_own = type(one).__module__.partition(".")[0] not in _LIBRARIES
            if is_own and one not in saved and (sentence := lost_on_resume(one)):
                yield f"{sentence}, or transformers' ExportableState."

    def _start_workers(self, name: str) -> None:
        """Start workers that persist since an earlier evaluation; starting them draws a seed."""
        if name not in of_transformers.names_of_lasting_eval_loaders(self._trainer):
            loader = self._trainer.get_eval_dataloader(None if name == "eval" else name)
            iter(loader.base_dataloader)

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """The callbacks that say what they keep, by name."""
        seen: dict[str, int] = {}
        for one in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState) or hasattr(one, "state_dict"):
                name = type(one).__name__
                seen[name] = seen.get(name, -1) + 1
                yield f"{name}.{seen[name]}", one


def is_time(name: str) -> bool:
    """Whether a logged value is a time, which differs between two equal runs."""
    return name.endswith(_TIMES)


def without_times(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logged values without the times."""
    return {name: value for name, value in logs.items() if not is_time(name)}


def _exported(one: Any) -> dict[str, Any]:
    if isinstance(one, TrainerControl):
        return dict(vars(one))
    if hasattr(one, "state_dict"):
        return dict(one.state_dict())
    state = one.state()  # the arguments too: they can be those of the Trainer's own checkpoint
    return {**state["args"], **state["attributes"]}


def _restore(one: Any, values: dict[str, Any]) -> None:
    if hasattr(one, "load_state_dict"):
        one.load_state_dict(values)
        return
    for name, value in values.items():
        if hasattr(one, name):  # not an argument that the callback keeps under another name
            setattr(one, name, value)


def _plain(value: Any) -> Any:
    """A value whose dicts, also those of a subclass, are copied as plain dicts."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


def _refilled(now: Any, saved: Any) -> Any:
    """The saved value; dicts keep their identity and their class, for example defaultdict."""
    if not isinstance(now, dict):
        return saved
    values = {key: _refilled(now[key], one) if key in now else one for key, one in saved.items()}
    now.clear()
    now.update(values)
    return now
