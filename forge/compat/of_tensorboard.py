"""Parts of TensorBoard without documentation: its event files, which other programs read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def event_writer(directory: Path) -> Any:
    """A new event file in the directory, with `add_event`, `flush` and `close`.

    If it goes: `torch.utils.tensorboard.SummaryWriter`, which writes each value as an event.
    """
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(directory))


def event(record: bytes) -> Any:
    """An event: `step`, and `HasField("summary")` if it has values of that step.

    If it goes: leave the files as they are; `SummaryWriter(purge_step=…)` hides repeated steps.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    return Event.FromString(record)


def scalars_event(step: int, time: float, values: Mapping[str, float]) -> Any:
    """An event with all values of a step, which is in the file completely or not at all.

    If it goes: as `event_writer`.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return Event(step=step, wall_time=time, summary=Summary(value=found))


def restart_event(step: int, time: float) -> Any:
    """An event that makes a TensorBoard that is running forget this step and later ones.

    If it goes: `purge_step=` of `torch.utils.tensorboard.SummaryWriter` writes one.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(step=step, wall_time=time, session_log=SessionLog(status=SessionLog.START))
