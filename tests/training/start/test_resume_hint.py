"""After an error the message says how to resume, if there is anything to resume from."""

import logging
import math

import pytest
from nan_trainer import outliving

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


def test_a_halt_before_the_first_save_says_once_that_there_is_no_checkpoint(tmp_path, caplog):
    """The message names the newest checkpoint, if there is one, before it says how to resume."""
    policy = {"checkpoint": {"dir": str(tmp_path)}, "nan": {"action": "halt"}}

    def train():
        with outliving(), forge.Run(policy) as run:
            for _ in run.steps(5):
                run.should_step(math.nan)

    with caplog.at_level(logging.ERROR, "forge"), pytest.raises(forge.Exit) as exit_:
        train()
    assert exit_.value.code == 65
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.lower().count("no checkpoint yet") == 1
    assert said.endswith("exit code 65. The same command starts at step 0.")
