"""The files that forge counts as the code of a job."""

import hashlib
import importlib.util
import sys

import pytest

from forge.jobdir import code, job_dir


def test_the_code_of_a_job_is_its_own_wherever_forge_lies(tmp_path, monkeypatch):
    """forge's own files do not count, even if forge is not installed in site-packages."""
    own = tmp_path / "helper.py"
    own.write_text("")
    found = importlib.util.spec_from_file_location("helper_of_a_job", own)
    monkeypatch.setitem(sys.modules, "helper_of_a_job", importlib.util.module_from_spec(found))
    files = code.fingerprint()
    assert str(own) in files
    for module in (job_dir, pytest, importlib.util, sys.modules["forge"]):
        assert module.__file__ not in files


def test_a_file_has_changed_if_its_content_has_or_if_it_is_gone(tmp_path):
    """Saved again without a change it is the same; on a machine without the folder, unknown."""
    files = [tmp_path / name for name in ("same.py", "edited.py", "removed.py", "gone/a.py")]
    recorded = {str(file): hashlib.sha256(b"x = 1").hexdigest() for file in files}
    files[0].write_text("x = 1")
    files[1].write_text("x = 2")
    assert code.changed_files(recorded) == [str(files[1]), str(files[2])]
