"""Checksums of chunks, and of the whole from them."""

import os
import sys
import zlib
from types import SimpleNamespace

import pytest

from forge.checkpoint.format import checksums


@pytest.fixture
def chunk(monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 1000)
    return 1000


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5437])
def test_the_whole_follows_from_the_chunks(chunk, size):
    """Threads share the chunks; `cksum`-like tools and people check whole files."""
    content = os.urandom(size)
    found = checksums.Checksums()
    for start in range(0, size, 333):
        found.update(memoryview(content)[start : start + 333])
    pieces = [content[start : start + chunk] for start in range(0, size, chunk)]
    assert found.entry() == {
        "size": size,
        "crc32": zlib.crc32(content),
        "chunks": [zlib.crc32(piece) for piece in pieces],
    }
    assert checksums.num_chunks(size) == len(pieces)


def test_whichever_crc_is_used_is_that_of_zlib():
    """A checkpoint may be read where another package is installed than where it was written."""
    for size in (0, 1, 9, 4097, 1 << 17):
        content = os.urandom(size)
        assert checksums.crc32(content) == zlib.crc32(content)
        assert checksums.crc32(memoryview(content), 5) == zlib.crc32(content, 5)


@pytest.mark.parametrize("module", [None, object()], ids=["is missing", "lacks it"])
def test_without_a_fast_package_zlib_is_used(monkeypatch, module):
    """It is not to be had for every processor."""
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", module)
    assert checksums._fastest() is zlib.crc32


def test_a_fast_package_is_used_where_there_is_one(monkeypatch):
    """Verifying then costs next to nothing."""
    package = SimpleNamespace(isal_zlib=SimpleNamespace(crc32=len))
    monkeypatch.setitem(sys.modules, "isal", package)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", package.isal_zlib)
    assert checksums._fastest() is len


def test_a_terabyte_is_put_together_at_once():
    """64 Ki chunks: the work must not grow with the bytes."""
    whole = checksums.whole(1 << 40, [zlib.crc32(bytes(1 << 24))] * (1 << 16))
    zeros = 0
    for _ in range(1 << 6):
        zeros = zlib.crc32(bytes(1 << 24), zeros)
    assert checksums.whole(1 << 30, [zlib.crc32(bytes(1 << 24))] * (1 << 6)) == zeros
    assert 0 <= whole < 1 << 32
