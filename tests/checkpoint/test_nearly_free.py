"""Saves in the background: the copy, its memory, and the file that two threads write.

One module, since all three use the same host buffer.
"""

import errno
import fcntl
import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from forge.checkpoint import staging, writing
from forge.checkpoint.format import manifest
from forge.checkpoint.format.tensor_encoding import PAGE
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.staging import HostBuffer, StagedFile, room_for, views_of
from forge.checkpoint.writing import write_file
from forge.process import memory

CHUNK = 2 * PAGE


@pytest.fixture
def small_chunks(monkeypatch):
    """Get many chunks out of few bytes."""
    for module in (manifest, staging, writing):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def odd_tensors(num_bytes):
    """A tensor of `num_bytes`, and one of each layout and dtype that a file can have."""
    generator = torch.Generator().manual_seed(num_bytes)
    square = torch.randn(40, 30, generator=generator)
    return {
        "long": torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8),
        "transposed": square.t(),
        "strided": square[::3, ::2],
        "expanded": torch.ones(1).expand(100),
        "conjugate": torch.randn(300, dtype=torch.complex64, generator=generator).conj(),
        "negative": torch.randn(9, dtype=torch.complex128, generator=generator).conj().imag,
        "wide": torch.randn(5, dtype=torch.complex128, generator=generator),
        "half": torch.randn(77, generator=generator).bfloat16(),
        "eighth": torch.randn(77, generator=generator).to(torch.float8_e4m3fn),
        "flags": torch.rand(13, generator=generator) > 0.5,
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "learned": torch.nn.Parameter(square.clone()),
    }


def written(path, file):
    entry = write_file(path, file)
    return path.read_bytes(), entry


def copied(tensors):
    """The file of these tensors, copied to a buffer."""
    layout = Layout(tensors)
    file = StagedFile(layout, tensors)
    buffer = HostBuffer(room_for(layout.size))
    file.copy_to(buffer, views_of(buffer, layout, tensors))
    return file


def content_of(file):
    """All bytes of a copied file, as they are in its buffer."""
    read = file.readers()[0]
    chunks = [bytes(read(number)) for number in range(manifest.num_chunks(file.layout.size))]
    return b"".join(chunks)[: file.layout.size]


# -- the file --------------------------------------------------------------------------------------


def test_memory_of_another_device_is_not_read_as_the_host_s(monkeypatch):
    """Addresses on MPS or XPU are no host addresses, so torch has to copy; for meta it raises."""
    tensors = {"large": torch.empty(20 << 20, dtype=torch.uint8, device="meta")}
    monkeypatch.setattr(staging, "_move_all", lambda moves: pytest.fail("memory was read"))
    with pytest.raises(NotImplementedError, match="no data"):
        copied(tensors)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, 3 * CHUNK, 7 * CHUNK + 5])
def test_image_and_stream_write_the_same_file_and_safetensors_reads_it(
    num_bytes, small_chunks, tmp_path
):
    """The file must have the same bytes whether training waits for the save or not."""
    tensors = odd_tensors(num_bytes)
    layout = Layout(tensors)
    content, entry = written(tmp_path / "image", copied(tensors))
    streamed, same_entry = written(tmp_path / "stream", StagedFile(layout, tensors))
    assert content == streamed
    assert entry == same_entry
    assert entry["size"] == len(content) == layout.size
    assert manifest.entry_of(content) == entry
    loaded = load_file(tmp_path / "image")
    for name, tensor in tensors.items():
        expected = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if expected.dtype is torch.complex128:
            expected = torch.view_as_real(expected)
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].shape == expected.shape
        assert bytes(loaded[name].view(-1).view(torch.uint8)) == bytes(
            expected.view(-1).view(torch.uint8)
        ), name


def count_calls(monkeypatch, module, name):
    """A list that gets one entry for each call."""
    calls, real = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: (calls.append(name), real(*given)))
    return calls


@pytest.mark.parametrize("own", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[], [5], [5, 5], [9, 1, 1], [1, 1, 9], [3] * 20, [10**6]])
def test_a_copy_in_threads_is_the_copy_in_one(sizes, own, monkeypatch):
    """The result is the same for all sizes and for any number of threads that torch uses."""
    tensors = {str(n): torch.randn(size) for n, size in enumerate(sizes)} | odd_tensors(40)
    tensors["turned"] = torch.randn(3, 5).t()
    alone = content_of(copied(tensors))
    calls = [
        count_calls(monkeypatch, *of) for of in ((torch, "_foreach_copy_"), (staging, "_move_all"))
    ]
    monkeypatch.setattr(staging, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(staging, "num_threads", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    assert content_of(copied(tensors)) == alone
    assert [len(one) for one in calls] == [0, max(own, 2)]
    for one in (torch.randn(7), torch.randn(3, 5).t()):
        assert torch.equal(copied({"x": one}).tensors()["x"], one)


@pytest.mark.parametrize("beyond", [-PAGE, -1, 0, 1, PAGE - 1, PAGE, PAGE + 1])
def test_every_end_of_a_file_is_written(beyond, small_chunks, tmp_path):
    """O_DIRECT writes whole pages only: the rest of the last page is written without it."""
    empty = Layout({"x": torch.empty(0, dtype=torch.uint8)})
    wanted = 3 * CHUNK + beyond
    tensors = {"x": torch.arange(wanted - empty.size).to(torch.uint8)}
    layout = Layout(tensors)
    content, _ = written(tmp_path / "file", copied(tensors))
    assert len(content) == layout.size
    assert content[len(layout.head) :] == bytes(tensors["x"])


@pytest.fixture
def was_direct(monkeypatch):
    """For each write, whether it used O_DIRECT."""
    found, pwrite = [], os.pwrite

    def noting(fd, data, position):
        found.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", noting)
    return found


def test_the_page_cache_is_spared_where_the_file_system_lets_us(was_direct, small_chunks, tmp_path):
    """The page cache would copy every byte, and evict the data that training reads."""
    probe = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip(f"{tmp_path} lies on a file system that refuses O_DIRECT")
    finally:
        os.close(probe)
    tensors = odd_tensors(5 * CHUNK)
    layout = Layout(tensors)
    assert layout.size % PAGE
    written(tmp_path / "file", copied(tensors))
    assert was_direct == [True] * (len(was_direct) - 1) + [False]
    assert len(was_direct) > 3


@pytest.mark.parametrize("moment", ["flag", "first write", "later write"])
def test_file_systems_that_refuse_o_direct_are_served(
    moment, monkeypatch, was_direct, small_chunks, tmp_path
):
    """tmpfs refuses the flag, and some network file systems refuse only some of the writes."""
    refused, pwrite, set_flags = [], os.pwrite, fcntl.fcntl

    def refusing(fd, data, position):
        is_direct = set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT
        if is_direct and position >= (3 * CHUNK if moment == "later write" else 0):
            refused.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data, position)

    def no_flag(fd, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            refused.append(-1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(fd, command, value)

    if moment == "flag":
        monkeypatch.setattr(fcntl, "fcntl", no_flag)
    else:
        monkeypatch.setattr(os, "pwrite", refusing)
    tensors = odd_tensors(6 * CHUNK + 11)
    content, _ = written(tmp_path / "file", copied(tensors))
    assert refused
    monkeypatch.undo()
    assert content == content_of(copied(tensors))


@pytest.mark.parametrize("is_direct", [True, False])
def test_short_writes_are_gone_on_from(is_direct, monkeypatch, small_chunks, tmp_path):
    """A nearly full disk or a network file system can write fewer bytes than requested."""
    pwrite, num_short = os.pwrite, []

    def short(fd, data, position):
        num_short.append(len(data))
        return pwrite(fd, data[: max(1, len(data) // 3)], position)

    monkeypatch.setattr(os, "pwrite", short)
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT")
    tensors = odd_tensors(4 * CHUNK + 3)
    content, _ = written(tmp_path / "file", copied(tensors))
    monkeypatch.undo()
    assert content == content_of(copied(tensors))
    assert len(num_short) > 12


def test_what_either_thread_meets_is_raised(monkeypatch, small_chunks, tmp_path):
    """An error in the second thread must not leave a checkpoint with a hole."""
    pwrite, main = os.pwrite, threading.current_thread()
    other_failed = threading.Event()

    def failing(fd, data, position):
        if threading.current_thread() is not main:
            other_failed.set()
            raise OSError(errno.EIO, "Input/output error")
        assert other_failed.wait(60)
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", failing)
    tensors = odd_tensors(9 * CHUNK)
    with pytest.raises(OSError, match="Input/output error"):
        written(tmp_path / "file", copied(tensors))


# -- the copy --------------------------------------------------------------------------------------


def test_a_snapshot_is_not_touched_by_what_training_does_next(store):
    """The save has the state of the boundary, not the changes of later steps."""
    state = {"weights": torch.full((1000,), 1.0), "step": 1}
    snapshot = store.snapshot(1, state, copy=True)
    assert snapshot.is_independent
    state["weights"].mul_(0)
    state["step"] = 2
    store.commit(snapshot)
    found = store.newest().state
    assert found["step"] == 1
    assert torch.equal(found["weights"], torch.ones(1000))


def address(snapshot):
    """That of the buffer, which begins at a huge page."""
    return snapshot.file.tensors()["w"].data_ptr() >> 21


def test_memory_is_taken_once_and_again_only_when_the_state_has_grown(store):
    """Touching a page for the first time costs three to four times a copy."""
    addresses = []
    for step, size in enumerate((1000, 1000, 500, 50_000, 50_000), 1):
        snapshot = store.snapshot(step, {"w": torch.full((size,), float(step))}, copy=True)
        addresses.append(address(snapshot))
        store.commit(snapshot)
        del snapshot
        assert torch.equal(store.newest().state["w"], torch.full((size,), float(step)))
    first, last = addresses[0], addresses[-1]
    assert addresses == [first, first, first, last, last]


def test_two_copies_that_are_still_to_be_written_do_not_meet(store):
    """The worst bug would be a file with the bytes of another step and valid checksums."""
    snapshots = [
        store.snapshot(step, {"w": torch.full((1000,), float(step))}, copy=True)
        for step in (1, 2, 3)
    ]
    for step, snapshot in reversed(list(enumerate(snapshots, 1))):
        path = store.commit(snapshot)
        assert torch.equal(store.read(path).state["w"], torch.full((1000,), float(step)))
    with pytest.raises(AssertionError, match="another step"):
        store.commit(snapshots[0])


def test_forked_children_do_not_get_the_copy():
    """DataLoader workers would pay for every page that a save writes in the meantime."""
    taken = HostBuffer(8 << 20)
    begin = taken.bytes.data_ptr()
    flags, is_there = "", False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                is_there = low <= begin < high
            elif is_there and head == "VmFlags:":
                flags = line
    assert " dc" in flags, f"expected dc (do not copy on fork) in {flags!r}"
    assert begin % PAGE == 0
    assert len(taken.bytes) == 8 << 20


# -- memory ----------------------------------------------------------------------------------------


def test_short_memory_makes_a_save_wait_and_says_so_once(store, monkeypatch, caplog):
    """A slow save is better than an out-of-memory kill because of a copy."""
    state = {"w": torch.ones(1 << 18)}
    monkeypatch.setattr(memory, "free_bytes", lambda: staging.RESERVE + 1000)
    for step in (1, 2):
        snapshot = store.snapshot(step, state, copy=True)
        assert not snapshot.is_independent
        store.commit(snapshot)
    assert store.newest().manifest.step == 2
    [told] = [r.message for r in caplog.records if "Too little host memory" in r.message]
    assert "256.0 MiB are available" in told
    monkeypatch.setattr(memory, "free_bytes", lambda: staging.RESERVE + (2 << 20))
    assert store.snapshot(3, state, copy=True).is_independent


def test_no_memory_at_all_makes_a_save_wait(store, monkeypatch, caplog):
    """With `ulimit -v` or overcommit=2, mmap can fail although /proc/meminfo shows free memory."""

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staging.mmap, "mmap", refuse)
    snapshot = store.snapshot(1, {"w": torch.ones(1000)}, copy=True)
    assert not snapshot.is_independent
    assert "training waits during each save" in caplog.text
    with pytest.raises(OSError, match="not enough host memory"):  # as on a full disk
        store.commit(snapshot)
    monkeypatch.undo()
    store.commit(snapshot)
    assert store.newest().manifest.step == 1
