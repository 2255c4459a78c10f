"""Which time limit a job's policy is checked against, where it is submitted and where it runs."""

import pytest
from omegaconf import OmegaConf

from forge.errors import ConfigError
from forge.hydra_app.job_policy import policy_of


def config(launcher, **policy):
    target = f"hydra_plugins.forge_launcher.{launcher}.Launcher"
    hydra = {"launcher": {"_target_": target, "timeout_min": 1}}
    return OmegaConf.create(
        {"hydra": hydra, "resilience": {"signal": {"warning_s": 600}, **policy}}
    )


def test_a_job_with_a_limit_of_its_own_is_checked_against_that():
    """Also in its own process: it would be refused there, an hour after it was submitted."""
    policy = policy_of(config("slurm", slurm={"timeout_min": 240}))
    assert policy.slurm == {"timeout_min": 240}


@pytest.mark.parametrize(
    ("launcher", "policy"), [("slurm", {}), ("local", {"slurm": {"timeout_min": 240}})]
)
def test_any_other_against_its_launcher_s(launcher, policy):
    """`resilience.slurm` says nothing to the local launcher."""
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.timeout_min=1"):
        policy_of(config(launcher, **policy))


def test_without_a_policy_there_is_nothing_to_check():
    assert policy_of(OmegaConf.create({"hydra": {}})) is None
