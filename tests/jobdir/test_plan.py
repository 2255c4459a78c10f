"""A plan is written and read by one module, and one of another version refused by name."""

import json
from dataclasses import replace

import pytest
from plans import planned

from forge.errors import ConfigError
from forge.jobdir import plan
from forge.jobdir.job_files import PLAN, forge_dir
from forge.slurm import submitted


def store(job_dir, content):
    forge_dir(job_dir).mkdir()
    (forge_dir(job_dir) / PLAN).write_text(json.dumps(content))


@pytest.mark.parametrize("made", [planned(), planned(slurm=None, main={"path": "/a/train.py"})])
def test_what_is_written_is_read(made, tmp_path):
    """The task acts on the launcher's decisions."""
    forge_dir(tmp_path).mkdir()
    made.write(tmp_path)
    assert plan.read(tmp_path) == made


def test_a_bundle_gives_the_same_plan(tmp_path):
    """On a cluster the plan is copied through another file first."""
    made = planned(ranks=3)
    path = next(submitted.bundle_paths(tmp_path))
    submitted.write_bundle(path, b"", [(tmp_path / "job", made, b"")], {"train.py": "a5"})
    submitted.unpack(path, 0)
    found = replace(made, launch=path.name, code={"train.py": "a5"})
    assert plan.read(tmp_path / "job") == found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": 4}, "unexpected keyword argument 'ranks'"),
        ({"slurm": {"ranks": 4}}, "missing 3 required keyword-only arguments: 'start', "),
        ({"slurm": [4]}, "after ** must be a mapping"),
    ],
)
def test_a_plan_of_another_version_is_refused_by_name(change, problem, tmp_path):
    """With fields that it does not know, a job could train something else or crash."""
    store(tmp_path, planned().to_json() | {"version": "9.8"} | change)
    with pytest.raises(ConfigError) as refused:
        plan.read(tmp_path)
    (sentence,) = refused.value.problems
    assert sentence.startswith(f"{forge_dir(tmp_path) / PLAN}: ")
    assert problem in sentence
    assert "forge 9.8" in sentence
    assert "run the sweep's command again" in sentence


def test_a_plan_without_a_version_is_of_an_earlier_one(tmp_path):
    """Plans of early versions of forge had no version number."""
    content = planned().to_json()
    del content["version"], content["token"]
    store(tmp_path, content)
    with pytest.raises(ConfigError, match=r"'token'.* by an earlier version of forge"):
        plan.read(tmp_path)


def test_a_whole_plan_of_another_version_is_read(tmp_path):
    """A job that waits in the queue while forge is updated starts all the same."""
    made = planned(version="0.0.7")
    store(tmp_path, made.to_json())
    assert plan.read(tmp_path) == made


@pytest.mark.parametrize("content", [{}, [1], {"overrides": ["+mode=a"], "unknown": 1}])
def test_a_launcher_takes_what_it_knows_of_an_earlier_plan(content, tmp_path):
    """The launcher writes a new plan anyway, so it ignores damaged fields of the old one."""
    store(tmp_path, content)
    found = plan.read_earlier(tmp_path)
    assert found.environment == {}
    assert found.overrides == (content.get("overrides") if isinstance(content, dict) else None)
    assert found.checkpoint_dir == "checkpoints"


def test_a_job_without_a_plan_is_told_what_to_do(tmp_path):
    """For example, only a part of the job's directory was copied."""
    with pytest.raises(ConfigError, match=r"cannot be read\. Run the sweep's command again"):
        plan.read(tmp_path)
