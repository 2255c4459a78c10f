"""Small files are there whole, or as they were."""

import errno
import os

import pytest

from forge.filesystem.files import write_atomically


def test_what_is_to_survive_a_power_cut_is_on_the_disk_before_it_has_its_name(
    tmp_path, monkeypatch
):
    """Else a name may come back without its content: an empty file in place of a good one."""
    calls, originals = [], {name: getattr(os, name) for name in ("fsync", "replace")}

    def noting(name):
        def noted(*given, **options):
            calls.append(name)
            return originals[name](*given, **options)

        return noted

    for name in originals:
        monkeypatch.setattr(os, name, noting(name))
    write_atomically(tmp_path / "file", "text", is_synced=True)
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "file").read_text() == "text"


def test_a_disk_that_fails_as_the_file_is_made_leaves_nothing_behind(tmp_path, monkeypatch):
    """Neither a file under a name that nobody looks for, nor an open descriptor."""
    (tmp_path / "file").write_text("before")

    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fstat", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "file", "text")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"
    assert len(os.listdir("/proc/self/fd")) == opened
