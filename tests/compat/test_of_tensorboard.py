"""What forge needs of TensorBoard's event files."""

from contracts import contract
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forge.compat import of_tensorboard


def test_events_are_written_read_and_forgotten_after_a_restart(tmp_path):
    """TensorBoard itself shows what forge has written, and drops what a restart takes back."""
    with contract(
        of_tensorboard.event_writer,
        of_tensorboard.scalars_event,
        of_tensorboard.restart_event,
        of_tensorboard.event,
    ):
        writer = of_tensorboard.event_writer(tmp_path)
        for step in range(4):
            event = of_tensorboard.scalars_event(step, 100.0 + step, {"loss": step / 2, "lr": 1})
            writer.add_event(event)
        writer.add_event(of_tensorboard.restart_event(2, 104.0))
        writer.flush()
        writer.close()
        again = of_tensorboard.event(event.SerializeToString())
        assert (again.step, again.HasField("summary")) == (3, True)
        assert not of_tensorboard.restart_event(2, 104.0).HasField("summary")
        shown = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
        shown.Reload()
        assert [one.step for one in shown.Scalars("loss")] == [0, 1]
