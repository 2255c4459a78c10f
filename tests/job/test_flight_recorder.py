"""NCCL's flight recorder, by a pipe and a file that stand for torch's."""

import os
import threading

import pytest
from stepwise import returned

from forge.job import flight_recorder


def collected(environ, rank, to):
    return returned(flight_recorder.collect(environ, rank, to))


def test_torch_is_asked_to_listen_unless_the_user_has_set_it(tmp_path):
    found = flight_recorder.environ(tmp_path, {})
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "nccl_")
    assert set(found) == {
        *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE")
    }
    assert list(tmp_path.iterdir()) == []
    assert flight_recorder.environ(tmp_path, {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/x"}) == {}
    assert "TORCH_FR_BUFFER_SIZE" not in flight_recorder.environ(
        tmp_path, {"TORCH_FR_BUFFER_SIZE": "0"}
    )


def test_where_there_can_be_no_pipes_torch_is_not_asked_for_one(tmp_path, monkeypatch):
    """torch would refuse to make its process group."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "mkfifo", refuse)
    assert flight_recorder.environ(tmp_path, {}) == {}


def test_the_record_is_asked_for_and_copied(tmp_path):
    """torch writes it once a byte has come by its pipe."""
    environ = flight_recorder.environ(tmp_path, {})
    pipe, file = tmp_path / "nccl_3.pipe", tmp_path / "nccl_trace_3"
    file.write_bytes(b"of an earlier time")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def torch():
        assert os.read(reader, 1) == b"1"
        assert not file.exists()
        file.write_bytes(b"the record")

    keeps = os.open(pipe, os.O_WRONLY)  # else the reader sees an end before anybody has written
    thread = threading.Thread(target=torch)
    thread.start()
    assert collected(environ, 3, tmp_path / "nccl_3.bin")
    thread.join()
    os.close(keeps)
    os.close(reader)
    assert (tmp_path / "nccl_3.bin").read_bytes() == b"the record"


@pytest.mark.parametrize("is_there", [True, False])
def test_without_a_reader_nobody_waits(tmp_path, is_there):
    """Opening a pipe that nobody reads would block the supervisor."""
    environ = flight_recorder.environ(tmp_path, {})
    if is_there:
        os.mkfifo(tmp_path / "nccl_0.pipe")
    assert not collected(environ, 0, tmp_path / "nccl_0.bin")
    assert not collected({}, 0, tmp_path / "nccl_0.bin")
