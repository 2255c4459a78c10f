"""Small files on a full disk."""

import pytest

from forge.filesystem import preallocated_file
from forge.filesystem.preallocated_file import write_padded


def test_on_a_full_disk_a_file_is_written_in_its_place(tmp_path, monkeypatch):
    """A file of sufficient length is overwritten; otherwise the caller gets an error."""

    def full(*_, **__):
        raise OSError(28, "no space")

    path = tmp_path / "state"
    write_padded(path, "first", 8)
    assert path.read_text() == "first   "
    monkeypatch.setattr(preallocated_file, "write_atomically", full)
    write_padded(path, "second", 8)
    assert path.read_text() == "second  "
    with pytest.raises(OSError, match="no space"):
        write_padded(path, "the third", 8)
    with pytest.raises(OSError, match="no space"):
        write_padded(tmp_path / "other", "first", 8)
    assert path.read_text() == "second  "
