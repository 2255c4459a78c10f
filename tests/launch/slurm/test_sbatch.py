"""The batch scripts that the launcher would submit, compared without submitting them."""

import math
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import submitit
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from forge.config.schema import Policy
from forge.errors import ConfigError
from forge.launch.slurm import slurm_options
from forge.launch.slurm.sbatch import Batch, OptionGroup, batches, log_folder
from forge.launch.slurm.slurm_options import SlurmOptions, into_policy, read
from forge.slurm import submitted

THEIRS = {
    "submitit_folder": "/logs/%j",
    "timeout_min": 90,
    "cpus_per_task": 3,
    "gpus_per_node": 2,
    "tasks_per_node": 2,
    "mem_gb": 5,
    "nodes": 2,
    "name": "a name",
    "stderr_to_stdout": True,
    "partition": "low",
    "qos": "high",
    "comment": "what it's for",
    "constraint": "a100",
    "exclude": "n[1-2]",
    "gres": "gpu:2",
    "cpus_per_gpu": 4,
    "gpus_per_task": 1,
    "mem_per_gpu": "7G",
    "mem_per_cpu": "1G",
    "account": "us",
    "signal_delay_s": 77,
    "max_num_timeout": 5,
    "additional_parameters": {"mail-user": "me@example.org", "exclusive": True},
    "array_parallelism": 3,
    "setup": ["module load cuda", "echo 'a  b' ${HOME} \\"],
}
NEWER = {"python": "python3 -O", "srun_args": ["--label"], "use_srun": True}
"""Keys of version 1.4 of the submitit launcher; forge accepts them with older versions, too."""
THEIR_KEYS = {one.name for one in fields(SlurmQueueConf)} - {"_target_"}
"""The keys of the installed version; THEIRS and NEWER have a value for each of them."""


def script_of(given, count=1, **group) -> str:
    defaults = {"signal": "USR2", "warning_s": 77.0, "is_requeued": True}
    one = OptionGroup(options=read(given), **(defaults | group))
    return Batch(one, list(range(count)), Path("/logs"), Path("/jobs.bundle")).script


def header(script) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def test_every_key_of_hydra_submitit_launcher_means_the_same(tmp_path, monkeypatch):
    """Users change only the launcher's name; sbatch gets the same options, and forge's own."""
    assert set(THEIRS) <= THEIR_KEYS <= set(THEIRS) | set(NEWER)
    (tmp_path / "srun").touch(0o755)  # submitit makes a script only if there is one
    monkeypatch.setenv("PATH", str(tmp_path))
    executor = submitit.AutoExecutor("/logs/%j", cluster="slurm", slurm_max_num_timeout=5)
    shared = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb")
    shared += ("nodes", "name", "stderr_to_stdout")
    left_out = ("submitit_folder", "max_num_timeout")
    theirs = {key: value for key, value in THEIRS.items() if key not in left_out}
    executor.update_parameters(
        **{key if key in shared else f"slurm_{key}": value for key, value in theirs.items()}
    )
    inner = executor._executor
    inner.parameters["map_count"] = 8
    wanted = inner._make_submission_file_text("command", "uid")
    ours, expected = header(script_of(THEIRS, 8)), header(wanted)
    assert ours.pop("requeue") == ""
    assert expected.pop("wckey") == "submitit"
    assert ours.pop("signal") == "USR2@77"
    assert expected.pop("signal") == "USR2@77"
    assert expected.pop("output") == "/logs/%A_%a/%A_%a_0_log.out"
    assert ours.pop("output") == "/logs/%A_%a_0_log.out"
    assert ours == expected
    for line in THEIRS["setup"]:
        assert line in script_of(THEIRS).splitlines()


def test_its_types_are_checked_in_whatever_version_is_installed():
    """An integer is accepted as a partition's name; tasks_per_node can be null from 1.4 on."""
    assert read({"partition": 2080, "mem_gb": 1.5}).partition == "2080"
    with pytest.raises(ConfigError, match="3 problems") as caught:
        read({"cpus_per_gpu": "four", "setup": "module load cuda", "use_srun": False})
    assert "`hydra.launcher.cpus_per_gpu=four`: Value 'four' of type 'str'" in str(caught.value)
    assert "`hydra.launcher.use_srun=False`: expected true" in str(caught.value)
    if "use_srun" in THEIR_KEYS:
        assert read({"tasks_per_node": None}).ranks == 1
        assert "ntasks-per-node" not in header(script_of({"tasks_per_node": None}))


@pytest.mark.parametrize("key", THEIRS)
def test_no_key_is_silently_without_effect(key):
    """Exceptions are the keys for the log folder, and those that the policy replaces."""
    alone = read({key: THEIRS[key]})
    assert getattr(alone, key) == THEIRS[key]
    elsewhere = ("submitit_folder", "signal_delay_s", "max_num_timeout", "array_parallelism")
    if key not in (*elsewhere, "cpus_per_gpu"):
        both = THEIRS | {"cpus_per_gpu": None}  # it needs gpus_per_task
        rest = {name: value for name, value in both.items() if name != key}
        assert script_of(both) != script_of(rest)


def test_a_jobs_own_options_replace_those_of_the_launcher():
    """Options that the job does not set keep the launcher's value; both are checked alike."""
    own = {"timeout_min": 5, "mem_gb": 2, "additional_parameters": {"licenses": "a"}}
    found = read(THEIRS).of_job(Policy(slurm=own))
    assert (found.timeout_min, found.mem_gb, found.qos) == (5, 2, "high")
    assert found.additional_parameters == {"licenses": "a"}
    bad = {"nodes": "many", "timeout_min": 0, "additional_parameters": {"signal": "USR1"}}
    with pytest.raises(ConfigError) as refused:
        read({}).of_job(Policy(slurm=bad))
    found = refused.value.problems
    assert len(found) == 3
    assert "`resilience.slurm.nodes=many`: Value 'many' of type 'str'" in found[0]
    assert "`resilience.slurm.timeout_min=0`: expected minutes above 0." in found
    assert "`resilience.slurm.additional_parameters.signal`: forge sets --signal itself" in found[2]


def test_signal_delay_and_timeouts_are_the_policy_s():
    """If both names of an option are set, a default is replaced, a contradiction is an error."""
    from omegaconf import OmegaConf

    options = read({"signal_delay_s": 77, "max_num_timeout": 5})
    hydra = {"overrides": {"task": ["lr=1"]}}
    cfg = OmegaConf.create({"resilience": {"signal": {"name": "USR2"}}, "hydra": hydra})
    into_policy(options, cfg)
    assert cfg.hydra.overrides.task == [
        "lr=1",
        "++resilience.signal.warning_s=77",
        "++resilience.requeue.max_timeouts=5",
    ]
    assert cfg.resilience.signal.warning_s == 77
    assert cfg.resilience.requeue.max_timeouts == 5
    for section in ({"signal": {"warning_s": 60.0}}, {"requeue": {"max_timeouts": 1}}):
        with pytest.raises(ConfigError, match="contradict each other"):
            into_policy(options, OmegaConf.create({"resilience": section, "hydra": hydra}))


@pytest.mark.parametrize("key", list(slurm_options.OURS))
def test_options_that_are_forge_s_own_are_refused(key):
    """In submitit such options silently replace the launcher's own."""
    for spelled in (key, key.replace("-", "_")):
        with pytest.raises(ConfigError, match=f"forge sets --{key} itself"):
            read({"additional_parameters": {spelled: "x"}})


@pytest.mark.parametrize("given", [{"requeue": "expedite"}, {"requeue=expedite": True}])
def test_an_expedited_requeue_is_refused(given):
    """Slurm would start a job again that forge has ended, whatever the reason."""
    with pytest.raises(ConfigError, match="would bring back jobs that forge has ended"):
        read({"additional_parameters": given})


def test_all_problems_are_reported_at_once_with_the_nearest_key():
    """Hydra would report only the first of them."""
    given = {"partitoin": "low", "nodes": 0, "timeout_min": -1, "setup": "one", "wait": "maybe"}
    with pytest.raises(ConfigError, match="5 problems") as caught:
        read(given)
    assert "Did you mean `partition`?" in str(caught.value)


def test_jobs_with_the_same_options_are_one_array_and_long_ones_are_split():
    """An array's numbers are below MaxArraySize."""
    short, long = (
        OptionGroup(SlurmOptions(timeout_min=minutes), "USR2", 30.0, True) for minutes in (10, 20)
    )
    groups = [short, long, short, short, short, long]
    found = batches(groups, Path("/logs"), submitted.bundle_paths(Path("/none")), 3)
    assert [one.members for one in found] == [[0, 2, 3], [4], [1, 5]]
    assert [header(one.script).get("array") for one in found] == ["0-2%3", None, "0-1%2"]
    assert len({one.bundle for one in found}) == 3
    assert [header(one.script)["time"] for one in found] == ["10", "10", "20"]


def test_a_job_without_a_policy_is_neither_signalled_nor_requeued():
    """The signal would kill the job, since no handler is registered."""
    found = header(script_of({}, signal=None, is_requeued=False))
    assert "signal" not in found
    assert "requeue" not in found
    assert "no-requeue" in found


def test_fractions_of_minutes_and_seconds_are_rounded_up():
    """sbatch accepts whole numbers only; a job must not get less time than configured."""
    found = header(script_of({"timeout_min": 10.5}, warning_s=30.2))
    assert (found["time"], found["signal"]) == ("11", f"USR2@{math.ceil(30.2)}")


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("/a/sweep/.submitit/%j", "/a/sweep/.submitit"),
        ("/else/where/%A/logs", "/else/where"),
        ("", "/a/sweep"),
    ],
)
def test_logs_lie_above_the_first_folder_of_a_single_job(given, folder):
    """Slurm creates no folders, and the job's number is not known before the submission."""
    assert log_folder(given, Path("/a/sweep")) == Path(folder)


def test_a_percent_sign_in_the_path_is_none_of_slurm_s():
    """A `%j` in the name of a sweep's directory must not be replaced by the job's number."""
    folder = log_folder("/a/100%j it's/.submitit/%j", Path("/a/100%j it's"))
    one = Batch(OptionGroup(read({}), None, 0.0, False), [0, 1], folder, Path("/jobs.bundle"))
    (output,) = shlex.split(header(one.script)["output"])
    assert output == "/a/100%%j it's/.submitit/%A_%a_0_log.out"
