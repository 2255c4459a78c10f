"""Every logger of `forge.loggers`, with the real packages, over five kills and a rollback.

`make proofs` installs the packages below the environment, in `loggers`.
"""

import sys
from pathlib import Path

import pytest
from harness import Job
from logged_values import READERS, compared

from forge.jobdir import ledger

PACKAGES = str(Path(sys.prefix, "loggers"))
sys.path.append(PACKAGES)
NONE = {"missing": [], "repeated": [], "unknown": [], "different": []}
ROLLBACK = {"nan": {"action": "rollback", "max_consecutive": 2, "rollback": {"steps_back": 5}}}
PLAN = {
    "kills": (["13 SIGKILL", "33 SIGTERM", "38 SIGKILL", "47 SIGKILL", "58 SIGKILL"], {}),
    "evaluation": (["34 SIGTERM", "evaluation_42 SIGTERM", "evaluation_49 SIGKILL"], {}),
    "rollback": (["52 SIGKILL"], {"bad_steps": [33, 34, 57], "policy": ROLLBACK}),
}


@pytest.mark.parametrize("plan", PLAN)
@pytest.mark.parametrize("kind", READERS)
def test_each_value_is_there_once(tmp_path, kind, plan):
    """Each of these packages alone repeats or loses steps when its process is killed."""
    hits, spec = PLAN[plan]
    env = {
        "PYTHONPATH": PACKAGES,
        "MLFLOW_ALLOW_FILE_STORE": "true",  # what was once MLflow's only store
        "WANDB_SILENT": "true",
    }
    job = Job(tmp_path, "logged.py", loggers=[kind], **spec)
    for hit in hits:
        code = job.run(HIT=hit, **env)
        assert code == (-9 if hit.endswith("KILL") else 143), job.output
    assert job.run(**env) == 0, job.output
    assert "Traceback" not in job.output
    metrics = ledger.read(job.checkpoints).metrics
    expected = {(step, name): value for step, row in metrics.items() for name, value in row.items()}
    assert {step for step, _ in expected} == set(range(60))
    assert compared(READERS[kind](job.checkpoints), expected) == NONE
