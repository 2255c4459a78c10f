"""What forge needs of Optuna's private parts, in both releases that the proofs install."""

import subprocess
import sys
from pathlib import Path

import pytest
from contracts import contract

from forge.compat import of_optuna

SCRIPT = """
import optuna
from forge.compat import of_optuna

assert of_optuna.is_in_memory(optuna.create_study())
study = optuna.create_study(storage="sqlite:///study.db")
assert not of_optuna.is_in_memory(study)
begun = study.ask()
value = begun.suggest_float("lr", 0, 1)
(running,) = study.get_trials()
trial = of_optuna.continued(study, running)
assert (trial.number, trial.suggest_float("lr", 0, 1)) == (0, value)
study.tell(trial, 1.0)
assert [one.state.name for one in study.trials] == ["COMPLETE"]
"""


@pytest.mark.proofs
@pytest.mark.parametrize("packages", ["optuna", "sweepers"])
def test_a_trial_continues_in_another_process(tmp_path, packages, monkeypatch):
    """With the parameters that it had."""
    monkeypatch.setenv("PYTHONPATH", str(Path(sys.prefix, packages)))
    with contract(of_optuna.continued, of_optuna.is_in_memory):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
