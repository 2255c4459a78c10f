"""Loaders and samplers that count their epochs in an attribute, and say so to nobody."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import forge
from forge.data.position import Position
from forge.jobdir import process_id


class Counting:
    """Another order in each epoch, by a number of its own."""

    def __init__(self, size):
        self.size = size
        self.epochs = 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.epochs += 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epochs))
        yield from order.tolist()


KINDS = {
    "loader": lambda: Counting(5),
    "sampler": lambda: DataLoader(range(5), sampler=Counting(5)),
    "batch_sampler": lambda: DataLoader(
        range(5), batch_sampler=torch.utils.data.BatchSampler(Counting(5), 2, False)
    ),
}


def batches(position, count):
    return [torch.as_tensor(position.next()).tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [3, 7, 11])
def test_the_epochs_go_on_with_the_number_they_had(kind, taken):
    """They began with the first again, in silence."""
    whole = batches(Position(KINDS[kind]()), 20)
    first = Position(KINDS[kind]())
    assert batches(first, taken) == whole[:taken]
    second = Position(KINDS[kind]())
    second.load(first.state())
    assert batches(second, 20 - taken) == whole[taken:]


def test_what_never_changes_is_left_as_it_is_made_now():
    """A batch size may be another one in a job that resumes with a changed config."""
    first, second = Counting(5), Counting(5)
    second.width = 7
    first.width = 3
    position = Position(first)
    batches(position, 7)
    other = Position(second)
    other.load(position.state())
    assert second.width == 7


def test_each_pass_of_an_epoch_has_the_number_it_had(tmp_path, monkeypatch):
    """Also where the job is stopped between two passes."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def train(name, stop=None):
        seen, policy = [], {"checkpoint": {"dir": str(tmp_path / name), "every_steps": 1}}
        loader = Counting(4)
        with forge.Run(policy, model=torch.nn.Linear(1, 1)) as run:
            for _epoch in run.epochs(4):
                for _, batch in run.batches(loader):
                    seen.append(batch)
                    if len(seen) == stop:
                        raise RuntimeError("as a kill would")
        return seen

    whole = train("whole")
    for stop in (4, 6, 9):
        name = f"job {stop}"
        with pytest.raises(RuntimeError, match="as a kill"):
            train(name, stop)
        assert train(name) == whole[stop - 1 :]


class Hard:
    """Draws what the loop finds hard more often: the loop changes it in mid-epoch."""

    def __init__(self):
        self.weights = torch.ones(12)

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(torch.multinomial(self.weights, 12, replacement=True).tolist())

    def state_dict(self):
        return {"weights": self.weights.clone()}

    def load_state_dict(self, state):
        self.weights = state["weights"].clone()


def test_what_the_loop_has_changed_in_the_sampler_since_the_epoch_began_is_kept(tmp_path):
    """The order of the epoch is drawn again from what it was; the next one from what is now."""

    def part(directory, stop_at):
        torch.manual_seed(0)
        sampler, seen = Hard(), []
        policy = {"checkpoint": {"dir": str(directory), "every_steps": 1}}
        with forge.Run(policy, model=torch.nn.Linear(1, 1)) as run:
            for step, batch in run.steps(12, DataLoader(range(12), 3, sampler=sampler)):
                if step == stop_at:
                    raise RuntimeError("stopped here")
                sampler.weights[batch] *= 1.5
                seen.append((batch.tolist(), sampler.weights.tolist()))
        return seen

    undisturbed = part(tmp_path / "undisturbed", None)
    with pytest.raises(RuntimeError, match="stopped here"):
        part(tmp_path / "job", 6)
    assert part(tmp_path / "job", None) == undisturbed[6:]
