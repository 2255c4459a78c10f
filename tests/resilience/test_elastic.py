"""`forge.resilience.elastic`: what Slurm's environment says, and where to resume from."""

import pytest
import torch

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.resilience import (
    SLURMInfo,
    get_slurm_info,
    is_slurm_job,
    is_slurm_requeue,
    log_job_info,
    resolve_resume_path,
)

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "gpt",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_PARTITION": "preempt",
}


@pytest.fixture(autouse=True)
def slurm(monkeypatch):
    """Sets Slurm's variables, and removes those of a job that the tests may run in."""
    import os

    for name in os.environ:
        if name.startswith(("SLURM_", "FORGE_RESTART_COUNT")):
            monkeypatch.delenv(name)

    def environment(**changed):
        for name, value in (JOB | changed).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return environment


def test_a_job_is_read_from_its_environment(slurm):
    slurm()
    expected = SLURMInfo("4711", "gpt", "node[01-04]", 4, 8, 2, "preempt", None)
    assert get_slurm_info() == expected
    assert expected.is_requeued
    assert is_slurm_job()
    assert is_slurm_requeue()


def test_a_job_that_forge_has_restarted_ran_before(slurm, monkeypatch):
    """On the same nodes: Slurm's count stays 0."""
    slurm(SLURM_RESTART_COUNT="0")
    assert not is_slurm_requeue()
    monkeypatch.setenv("FORGE_RESTART_COUNT", "2")
    assert is_slurm_requeue()


@pytest.mark.parametrize("job_id", [None, ""])
def test_without_a_job_id_there_is_no_job(slurm, job_id):
    """A login node may well have other SLURM_ variables set."""
    slurm(SLURM_JOB_ID=job_id)
    assert get_slurm_info() is None
    assert not is_slurm_job()
    assert not is_slurm_requeue()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8", 8),
        ("4(x2)", 4),
        ("4(x2),3", 4),
        ("2,16(x3),1", 16),
        ("12(x10)", 12),
        ("", 1),
        (None, 1),
    ],
)
def test_tasks_per_node_is_read_in_every_form_that_slurm_writes(slurm, text, count):
    slurm(SLURM_NTASKS_PER_NODE=text)
    assert get_slurm_info().ntasks_per_node == count


def test_tasks_per_node_falls_back_to_the_other_variable(slurm):
    slurm(SLURM_NTASKS_PER_NODE=None, SLURM_TASKS_PER_NODE="3(x2),2")
    assert get_slurm_info().ntasks_per_node == 3


@pytest.mark.parametrize(("text", "count"), [("", 0), (None, 0), ("0", 0), ("1", 1)])
def test_a_restart_count_may_be_empty(slurm, text, count):
    """At the first start the variable is unset or empty, as the version has it."""
    slurm(SLURM_RESTART_COUNT=text)
    assert get_slurm_info().restart_count == count
    assert is_slurm_requeue() == (count > 0)


@pytest.mark.parametrize(("text", "expected"), [("7", "7"), ("0", "0"), ("", None), (None, None)])
def test_an_array_task_has_its_number(slurm, text, expected):
    slurm(SLURM_ARRAY_TASK_ID=text)
    assert get_slurm_info().array_task_id == expected


def test_old_names_of_the_variables_are_known(slurm):
    slurm(
        SLURM_JOB_NODELIST=None,
        SLURM_NODELIST="old[1-2]",
        SLURM_JOB_NUM_NODES=None,
        SLURM_NNODES="2",
    )
    assert (get_slurm_info().node_list, get_slurm_info().num_nodes) == ("old[1-2]", 2)


def test_job_info_is_said_once_and_only_in_a_job(slurm, caplog):
    caplog.set_level("INFO", logger="forge")
    log_job_info()
    assert "Not a Slurm job" in caplog.text
    caplog.clear()
    slurm(SLURM_ARRAY_TASK_ID="7")
    log_job_info()
    (record,) = caplog.records
    for part in ("4711", "gpt", "array task 7", "4 node(s) node[01-04]", "preempt", "restart 2"):
        assert part in record.message


# -- where to resume from -------------------------------------------------------------------------


def foreign(directory, *names):
    """Checkpoints of another tool: no manifest."""
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "model.pt").write_bytes(b"weights")


def committed(directory, *steps):
    """Checkpoints of ours."""
    store = Store(directory, CheckpointConfig())
    for step in steps:
        store.commit(store.snapshot(step, {"w": torch.ones(3)}, copy=False))
    store.close()


def test_nothing_there_is_none(tmp_path):
    assert resolve_resume_path(tmp_path / "nowhere") is None
    assert resolve_resume_path(tmp_path) is None
    (tmp_path / "file").write_text("")
    assert resolve_resume_path(tmp_path / "file") is None


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path):
    foreign(tmp_path, "step_900", "step_1000", "step_99")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_1000"
    assert resolve_resume_path(str(tmp_path)) == tmp_path / "step_1000"


@pytest.mark.parametrize(
    "name",
    ["step_900_corrupt", "step_", "step_x", "step_1e9", "mystep_900", "step_-900", ".step_900"],
)
def test_other_names_are_no_steps(tmp_path, name):
    foreign(tmp_path, "step_100", name)
    assert resolve_resume_path(tmp_path) == tmp_path / "step_100"


def test_a_file_called_like_a_step_is_none(tmp_path):
    foreign(tmp_path, "step_100")
    (tmp_path / "step_200").write_text("")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_100"


@pytest.mark.parametrize("make", ["foreign", "ours"])
def test_latest_decides_even_against_a_higher_number(tmp_path, make):
    """Whoever set it meant it: after a rollback, say."""
    if make == "ours":
        committed(tmp_path, 100, 200)
        (tmp_path / "latest").unlink()
    else:
        foreign(tmp_path, "step_100", "step_200")
    (tmp_path / "latest").symlink_to("step_100")
    assert resolve_resume_path(tmp_path) == (tmp_path / "step_100").resolve()


@pytest.mark.parametrize("make", ["foreign", "ours"])
def test_a_dangling_latest_falls_back_to_the_highest_number(tmp_path, make):
    if make == "ours":
        committed(tmp_path, 100, 200)
        (tmp_path / "latest").unlink()
    else:
        foreign(tmp_path, "step_100", "step_200")
    (tmp_path / "latest").symlink_to("step_300")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_200"


def test_a_latest_that_points_at_itself_is_passed_over(tmp_path):
    foreign(tmp_path, "step_100")
    (tmp_path / "latest").symlink_to("latest")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_100"


def test_latest_may_point_to_another_disk(tmp_path):
    foreign(tmp_path / "elsewhere", "step_7")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "elsewhere" / "step_7")
    assert resolve_resume_path(tmp_path / "run") == (tmp_path / "elsewhere" / "step_7").resolve()


def test_among_ours_a_directory_without_a_manifest_is_a_save_that_did_not_finish(tmp_path):
    committed(tmp_path, 100)
    foreign(tmp_path, "step_200")
    assert resolve_resume_path(tmp_path) == (tmp_path / "step_100").resolve()


@pytest.mark.parametrize("target", ["step_200", "step_900_corrupt", "empty"])
def test_among_ours_a_latest_to_something_unusable_is_passed_over(tmp_path, target):
    committed(tmp_path, 100)
    foreign(tmp_path, "step_200", "step_900_corrupt", "empty")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(target)
    assert resolve_resume_path(tmp_path) == tmp_path / "step_100"


@pytest.mark.parametrize("harm", ["truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_of_ours_is_passed_over_though_latest_names_it(tmp_path, harm):
    committed(tmp_path, 100, 200)
    (tensors,) = (tmp_path / "step_200").glob("tensors*")
    if harm == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif harm == "missing":
        tensors.unlink()
    else:
        (tmp_path / "step_200" / "manifest.json").write_text("{}")
    assert (tmp_path / "latest").resolve().name == "step_200"
    assert resolve_resume_path(tmp_path) == tmp_path / "step_100"


def test_where_all_of_ours_are_damaged_there_is_none(tmp_path):
    """Not a foreign one, and not half a save: none."""
    committed(tmp_path, 100)
    (tmp_path / "step_100" / "manifest.json").write_text("{}")
    assert resolve_resume_path(tmp_path) is None
