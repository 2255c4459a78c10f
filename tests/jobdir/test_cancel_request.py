"""Requests to cancel a job, which its wrapper looks for as long as the job runs."""

import errno
import os

from forge.jobdir import cancel_request
from forge.jobdir.cancel_request import CancelRequest


def test_a_disk_that_is_away_for_a_moment_has_no_request(tmp_path, monkeypatch):
    """The error would end the wrapper, and with it the job."""
    CancelRequest(by="me").write(tmp_path)
    stat = os.stat

    def evicted(path, *args, **how):
        if os.fspath(path).endswith(cancel_request.FILE):
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", evicted)
        assert cancel_request.read(tmp_path) is None
    assert cancel_request.read(tmp_path).by == "me"
