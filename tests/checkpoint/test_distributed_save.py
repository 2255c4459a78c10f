"""One checkpoint of several ranks, which are threads here: it is complete or absent."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forge.checkpoint import reading, writing
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import files_of
from forge.checkpoint.staging import Snapshot
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig, NanConfig
from forge.errors import CheckpointError, RankFailed
from forge.jobdir.ledger_writer import Ledger
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy
from forge.training.saver import SaveCause, Saver

SIZE = 3


class Values:
    """The values that the ranks exchanged, by key."""

    def __init__(self):
        self.given = {}
        self.changed = threading.Condition()

    def of(self, rank):
        values = self

        class Rank:
            size = SIZE

            def gather(self, key, value, timeout_s, unless=None):
                with values.changed:
                    values.given.setdefault(key, {})[rank] = value
                    values.changed.notify_all()
                    values.changed.wait_for(lambda: len(values.given[key]) == SIZE, 60)
                    return [values.given[key][one] for one in range(SIZE)]

            def forget(self, key):
                del values.given[key][rank]

        one = Rank()
        one.rank = rank
        return one


def on_all(do):
    """The result or the exception of `do(rank)` for each rank; all ranks run at the same time."""
    with ThreadPoolExecutor(SIZE) as pool:
        futures = [pool.submit(do, rank) for rank in range(SIZE)]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture
def stores(tmp_path):
    values = Values()
    made = [
        Store(tmp_path / "checkpoints", CheckpointConfig(), ranks=values.of(rank))
        for rank in range(SIZE)
    ]
    yield made
    for one in made:
        one.close()


def state_of(rank, step=1):
    shared = torch.arange(1000.0) * step
    return {"shared": shared, "own": torch.full((10,), float(rank)), "rank": rank}


def save(stores, step):
    """Each rank saves its state of this step into one checkpoint."""

    def one(rank):
        state = state_of(rank, step)
        snapshot = stores[rank].snapshot(step, state, copy=rank == 1)
        return stores[rank].commit(snapshot).name

    return on_all(one)


def test_each_rank_reads_what_it_has_saved(stores):
    """A value that is equal on all ranks is on disk once."""
    assert save(stores, 1) == ["step_1"] * SIZE
    folder = stores[0].directory / "step_1"
    sizes = [(folder / files_of(rank)[1]).stat().st_size for rank in range(SIZE)]
    assert sizes[0] > 4000 > max(sizes[1:])
    for rank, found in enumerate(on_all(lambda rank: stores[rank].newest())):
        assert torch.equal(found.state["shared"], torch.arange(1000.0))
        assert torch.equal(found.state["own"], torch.full((10,), float(rank)))
        assert found.state["rank"] == rank


def test_a_checkpoint_needs_the_files_of_all_ranks(stores):
    """The manifest lists them all, also for a rank that reads only some of them."""
    save(stores, 1)
    path = stores[0].directory / "step_1"
    described = manifest.read(path)
    assert described.world_size == SIZE
    assert described.files.keys() == {name for rank in range(SIZE) for name in files_of(rank)}
    (path / files_of(2)[1]).unlink()
    for error in on_all(lambda rank: stores[rank].newest()):
        assert "tensors_rank00002.safetensors is missing" in str(error)


def test_ranks_at_different_steps_save_nothing(stores):
    """Without this check a mixed checkpoint would look complete."""

    def one(rank):
        store = stores[rank]
        store.commit(store.snapshot(1 + (rank == 2), state_of(rank), copy=False))

    errors = on_all(one)
    assert {str(error).removeprefix("rank 2: CheckpointError: ") for error in errors} == {
        "rank 2 saves step_2, but rank 0 step_1"
    }
    assert not list(stores[0].directory.glob("step_*"))


def test_a_rank_of_an_older_attempt_has_nowhere_to_write(stores):
    """A newer claim has renamed the directory in which the old rank would write."""
    snapshot = stores[1].snapshot(1, state_of(1), copy=False)
    with pytest.raises(FileNotFoundError):
        writing.write_state(stores[0].directory / ".work_taken/step_1", snapshot, rank=1)


def test_rank_0_writes_beside_the_digests(stores, monkeypatch):
    """The digests take as long as the write, so rank 0 writes its file in the meantime."""
    is_written = threading.Event()
    write, digests = writing.write_state, Snapshot.digests

    def written(folder, snapshot, rank=0, *shared):
        files = write(folder, snapshot, rank, *shared)
        if rank == 0:
            is_written.set()
        return files

    def digested(snapshot):
        assert is_written.wait(60), "nothing is written before the digests are there"
        return digests(snapshot)

    monkeypatch.setattr(writing, "write_state", written)
    monkeypatch.setattr(Snapshot, "digests", digested)
    assert save(stores, 1) == ["step_1"] * SIZE


def test_nothing_is_written_or_compared_before_all_have_their_copy(stores, monkeypatch):
    """Both would take cores and memory from ranks whose training still waits for the copy."""
    began = []
    monkeypatch.setattr(writing, "write_state", lambda *_: began.append("write"))
    monkeypatch.setattr(Snapshot, "digests", lambda _: began.append("digests"))

    def one(rank):
        if rank == 2:
            stores[2].fail_save(ValueError("a bug"))
        snapshot = stores[rank].snapshot(1, state_of(rank), copy=True)
        stores[rank].commit(snapshot)

    errors = on_all(one)
    assert [type(error) for error in errors] == [RankFailed, RankFailed, ValueError]
    assert not began


def test_a_rank_that_fails_while_rank_0_writes_leaves_nothing_behind(stores, monkeypatch):
    """A file that is still being written would reappear after its folder was removed."""
    has_failed = threading.Event()
    write = writing.write_state

    def written(folder, snapshot, rank=0, *shared):
        assert has_failed.wait(60)
        return write(folder, snapshot, rank, *shared)

    def digested(snapshot):
        if snapshot.tree["rank"] == 1:
            has_failed.set()
            raise ValueError("a bug")
        return {}

    monkeypatch.setattr(writing, "write_state", written)
    monkeypatch.setattr(Snapshot, "digests", digested)
    errors = save(stores, 1)
    assert [type(error) for error in errors] == [RankFailed, ValueError, RankFailed]
    assert not list(stores[0].directory.glob(".work_*/*"))
    assert not list(stores[0].directory.glob("step_*"))


def test_what_is_there_is_left_on_all_ranks(stores):
    """Rank 0 checks, for all ranks, whether the checkpoint exists already."""
    save(stores, 1)
    before = (stores[0].directory / "step_1").stat().st_ino

    def again(rank):
        snapshot = stores[rank].snapshot(1, state_of(rank), copy=True, replaces=False)
        return stores[rank].commit(snapshot)

    assert on_all(again) == [None] * SIZE
    assert (stores[0].directory / "step_1").stat().st_ino == before


@pytest.fixture
def savers(stores, tmp_path):
    """One saver for each rank, which saves in the background."""
    config = CheckpointConfig(async_save=True)
    ledgers = [Ledger(tmp_path / f"ledger_{rank}") for rank in range(SIZE)]
    yield [
        Saver(store, config, ledger, NanPolicy(NanConfig()), Metrics(ledger))
        for store, ledger in zip(stores, ledgers, strict=True)
    ]
    for ledger in ledgers:
        ledger.close()


def test_a_periodic_save_waits_for_no_other_rank(savers, stores):
    """Training waits only for the copy of its own rank, in whatever order the ranks arrive."""
    for rank in (2, 0, 1):  # one after the other: a rank that waits for another would hang here
        savers[rank].save(1, lambda rank=rank: state_of(rank), SaveCause.periodic)
    on_all(lambda rank: savers[rank].wait())
    assert [one.state["rank"] for one in on_all(lambda r: stores[r].newest())] == [0, 1, 2]


@pytest.mark.parametrize("error", [CheckpointError("a lambda"), OSError(5, "EIO")])
def test_a_state_that_one_rank_cannot_save_is_saved_by_none(error, savers, stores):
    """No rank retries the save alone, even if the error looks like that of a disk."""

    def state():
        raise error

    for rank in range(2):
        savers[rank].save(1, lambda rank=rank: state_of(rank), SaveCause.periodic)
    with pytest.raises(CheckpointError):
        savers[2].save(1, state, SaveCause.periodic)
    for rank in range(2):
        with pytest.raises(RankFailed, match="rank 2"):
            savers[rank].wait()
    assert not list(stores[0].directory.glob("step_*"))


def test_equal_bytes_of_another_dtype_are_another_tensor(stores):
    """The digest includes the dtype, not only the bytes."""
    dtypes = [torch.int32, torch.float32, torch.int32]

    def one(rank):
        state = {"value": torch.zeros(5, dtype=dtypes[rank])}
        stores[rank].commit(stores[rank].snapshot(1, state, copy=False))

    on_all(one)
    found = on_all(lambda rank: stores[rank].newest())
    assert [one.state["value"].dtype for one in found] == dtypes


@pytest.mark.parametrize("broken", range(SIZE))
def test_a_disk_that_fails_on_one_rank_fails_the_save_of_all(broken, stores, monkeypatch):
    """The ranks keep the previous checkpoint, and the next save succeeds."""
    save(stores, 1)
    write = writing.write_file
    name = files_of(broken)[1]

    def failing(path, file):
        if path.name == name:
            raise OSError(28, "No space left on device")
        return write(path, file)

    monkeypatch.setattr(writing, "write_file", failing)
    errors = save(stores, 2)
    assert [type(one) for one in errors] == [OSError] * SIZE
    assert {one.errno for one in errors} == {28}
    assert [path.name for path in stores[0].directory.glob("**/step_*")] == ["step_1"]
    assert [one.state["rank"] for one in on_all(lambda r: stores[r].newest())] == [0, 1, 2]
    monkeypatch.undo()
    assert save(stores, 2) == ["step_2"] * SIZE
    assert {one.path.name for one in on_all(lambda r: stores[r].newest())} == {"step_2"}


@pytest.mark.parametrize("broken", range(SIZE))
def test_what_is_damaged_for_one_rank_is_passed_over_by_all(broken, stores):
    """Otherwise the ranks would continue from different steps."""
    save(stores, 1)
    save(stores, 2)
    file = stores[0].directory / "step_2" / files_of(broken)[1]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    found = on_all(lambda rank: stores[rank].newest())
    assert {one.path.name for one in found} == {"step_1"}
    for one in stores:
        (reason,) = one.passed_over
        assert "step_2" in reason
        assert file.name in reason


def test_a_newer_attempt_ends_all_ranks_of_the_old_one(stores):
    """Only rank 0 has the claim; the other ranks end with the exit code of its error."""
    save(stores, 1)
    token = stores[0].directory / ".fence.json"
    token.write_text(json.dumps(json.loads(token.read_text()) | {"token": "another"}))
    errors = save(stores, 2)
    assert {int(one.exit_code) for one in errors} == {73}
    assert isinstance(errors[1], RankFailed)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_another_number_of_ranks_has_the_state_of_rank_0_and_what_is_each_ones_own(size, stores):
    """Each old rank gets its own values of `own`; new ranks get those of rank 0."""
    save(stores, 1)
    path = stores[0].directory / "step_1"
    for rank in range(size):
        state = reading.read(path, rank=rank, size=size, personal=("own",)).state
        assert state["rank"] == 0
        assert torch.equal(state["shared"], torch.arange(1000.0))
        assert torch.equal(state["own"], torch.full((10,), float(rank if rank < SIZE else 0)))
    assert reading.read(path, rank=2).state["rank"] == 2
