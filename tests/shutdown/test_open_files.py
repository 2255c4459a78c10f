"""A stop ends quickly, but not before every file that somebody left open is written."""

import gzip
import os
import signal
import sys

import pytest
import warm
from harness import Process, full_pipe
from rows import few
from started import Popen

JOB = """
import atexit, gc, gzip, io, os, signal, sys
folder = sys.argv[1]

class Trainer:
    def __init__(self):
        self.me = self  # only the collector would find it
        self.log = open(f"{folder}/log.txt", "w")
        self.packed = io.TextIOWrapper(gzip.open(f"{folder}/log.gz", "wb"))
        self.raw = open(f"{folder}/log.bin", "wb", buffering=1 << 20)

import torch
import forge
from forge.shutdown import stopping

is_frozen = False
exec(sys.argv[2])
os.chdir(folder)
with forge.Run({}, model=torch.nn.Linear(1, 1)) as run:
    trainer = Trainer()
    atexit.register(lambda: trainer.log.write("the last word"))
    if is_frozen:
        gc.freeze()  # as the launchers do once main is imported
    for step in run.steps(100):
        trainer.log.write(f"step {step}, ")
        trainer.packed.write(f"step {step}, ")
        trainer.raw.write(b"step")
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def stopped(tmp_path):
    """Runs `extra`, then trains until its own signal; returns exit code and output."""

    def run(extra: str, popen=warm.Popen) -> tuple[int, str]:
        command = [sys.executable, "-c", JOB, str(tmp_path), extra]
        process = Process(command, tmp_path / "output", popen=popen)
        return process.wait(), process.output

    return run


@pytest.mark.parametrize("is_frozen", few(1, [True, False]))
def test_files_in_cycles_are_written_to_their_last_word(is_frozen, stopped, tmp_path):
    """As Python itself ends."""
    code, output = stopped(f"is_frozen = {is_frozen}", popen=Popen)
    assert code == 128 + signal.SIGTERM, output
    steps = "step 0, step 1, step 2, "
    assert (tmp_path / "log.txt").read_text() == steps + "the last word"
    assert gzip.decompress((tmp_path / "log.gz").read_bytes()).decode() == steps
    assert (tmp_path / "log.bin").read_bytes() == b"stepstepstep"
    assert "Exception ignored" not in output


def test_one_that_cannot_be_closed_keeps_no_other_from_it_and_is_told(stopped, tmp_path):
    code, output = stopped("odd = open('/dev/full', 'w'); odd.write('x'); odd_too = [odd]")
    assert code == 128 + signal.SIGTERM, output
    assert (tmp_path / "log.txt").read_text().endswith("the last word")
    assert "No space left on device" in output


def test_a_file_that_nobody_reads_does_not_keep_a_stop_from_ending(stopped, tmp_path):
    """Its last words are lost with whoever should have read them; the exit code is not."""
    reader, writer = full_pipe()
    os.close(writer)
    try:
        path = f"/proc/{os.getpid()}/fd/{reader}"
        code, output = stopped(
            f"stopping.allow(2); held = open({path!r}, 'w'); held.write('x' * 100)"
        )
    finally:
        os.close(reader)
    assert code == 128 + signal.SIGTERM, output
