"""Which files are the code of a job."""

import importlib.util
import sys

import pytest

from forge.jobdir import job_dir


def test_the_code_of_a_job_is_its_own_wherever_forge_lies(tmp_path, monkeypatch):
    """In a repository forge lies in no site-packages, and changes by no hand of the user's."""
    own = tmp_path / "helper.py"
    own.write_text("")
    found = importlib.util.spec_from_file_location("helper_of_a_job", own)
    monkeypatch.setitem(sys.modules, "helper_of_a_job", importlib.util.module_from_spec(found))
    files = job_dir.code_fingerprint()
    assert str(own) in files
    for module in (job_dir, pytest, importlib.util, sys.modules["forge"]):
        assert module.__file__ not in files
