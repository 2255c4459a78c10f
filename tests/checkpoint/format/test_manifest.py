"""The checksums of chunks, of which a manifest consists."""

import os
import sys
import zlib
from types import SimpleNamespace

import pytest

from forge.checkpoint.format import manifest


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5437])
def test_a_file_is_described_by_the_crc_of_each_chunk(monkeypatch, size):
    """Threads share the chunks, and any zlib can check them."""
    monkeypatch.setattr(manifest, "CHUNK", 1000)
    content = os.urandom(size)
    pieces = [content[start : start + 1000] for start in range(0, size, 1000)]
    expected = {"size": size, "chunks": [zlib.crc32(piece) for piece in pieces]}
    assert manifest.entry_of(content) == expected
    assert manifest.num_chunks(size) == len(pieces)


def test_whichever_crc_is_used_is_that_of_zlib():
    """A checkpoint may be read where another package is installed than where it was written."""
    for size in (0, 1, 9, 4097, 1 << 17):
        content = os.urandom(size)
        assert manifest.crc32(content) == zlib.crc32(content)
        assert manifest.crc32(memoryview(content), 5) == zlib.crc32(content, 5)


@pytest.mark.parametrize("module", [None, object()], ids=["is missing", "lacks it"])
def test_without_a_fast_package_zlib_is_used(monkeypatch, module):
    """It is not to be had for every processor."""
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", module)
    assert manifest._fastest() is zlib.crc32


def test_a_fast_package_is_used_where_there_is_one(monkeypatch):
    """Verifying then costs next to nothing."""
    package = SimpleNamespace(isal_zlib=SimpleNamespace(crc32=len))
    monkeypatch.setitem(sys.modules, "isal", package)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", package.isal_zlib)
    assert manifest._fastest() is len
