"""After an error the message says how to resume, if there is anything to resume from."""

import logging

import pytest

import forge


@pytest.mark.parametrize("at", [1, 3], ids=["before the first save", "after it"])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_says_how_to_resume_only_after_a_save(tmp_path, caplog, at, is_async):
    """A command that "resumes" and starts at step 0 would mislead."""
    policy = {"checkpoint": {"dir": str(tmp_path), "every_steps": 2, "async_save": is_async}}

    def train():
        with forge.Run(policy) as run:
            for step in run.steps(5):
                if step == at:
                    raise ValueError("planted")

    with caplog.at_level(logging.ERROR, "forge"), pytest.raises(ValueError, match="planted"):
        train()
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"in step {at}; Python shows its traceback below." in said
    assert ("To resume:\n" in said) is (at == 3)
    assert ("There is no checkpoint yet: the same command starts at step 0." in said) is (at == 1)
