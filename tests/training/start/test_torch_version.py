"""A job that resumes with another version of torch."""

import torch
from nan_trainer import kill, train


def test_another_version_of_torch_is_named_at_the_resume(tmp_path, caplog, monkeypatch):
    """Its kernels round otherwise: without a word nobody finds out why the bits differ."""

    def said(version, **options):
        caplog.clear()
        monkeypatch.setattr(torch, "__version__", version)
        train(tmp_path, steps=6, **options)
        return caplog.text

    caplog.set_level("INFO", logger="forge")
    assert "saved with torch" not in said("2.6.0+cpu", at={2: kill})
    resumed = said("2.7.1+cu128", at={2: kill})
    assert (
        resumed.count("step_2 was saved with torch 2.6.0+cpu, but this is torch 2.7.1+cu128") == 1
    )
    assert "saved with torch" not in said("2.7.1+cu128")
