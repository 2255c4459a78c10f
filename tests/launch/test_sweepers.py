"""Warnings at the start of a sweep whose sweeper loses trials if its launcher is killed."""

import pytest

from forge.launch.hydra_launcher import check_sweeper

OPTUNA = {"_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"}
KEPT = {"_target_": "forge.integrations.optuna.Storage", "url": "sqlite:///study.db"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampler": {"seed": 1}, "storage": None}, []),
        ({"sampler": {"seed": 1}, "storage": KEPT}, []),
        ({"sampler": {}, "storage": None}, []),
        ({"sampler": {"seed": None}, "storage": None}, ["sampler.seed=null"]),
        ({"sampler": {"seed": 1}, "storage": "sqlite:///a.db"}, ["storage=sqlite:///a.db"]),
    ],
)
def test_what_a_sweep_with_optuna_cannot_resume_is_named(options, named, caplog):
    """The sweep repeats trials otherwise, and nothing says so."""
    check_sweeper(OPTUNA | options)
    check_sweeper({"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"})
    found = [record.getMessage().partition("`: ")[0] for record in caplog.records]
    assert found == [f"`hydra.sweeper.{one}" for one in named]
