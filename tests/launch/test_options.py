"""The launcher's options, and how the machine is shared out between its jobs."""

import json
import os
import stat

import pytest
from sweeps import App

from forge.errors import ConfigError, ExitCode
from forge.launch.local import resources
from forge.launch.local.resources import LocalOptions, options, slots

FREE = {"n_jobs", "gpus_per_job", "timeout_min"}
"""Options that can be null."""


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("n_jobs", [0, -1], "expected at least 1"),
        ("n_jobs", [1.5, True, [1], "two"], "could not be converted to Integer"),
        ("cpus_per_job", [0, -1], "expected at least 1"),
        ("tasks_per_job", [0, -1], "expected at least 1"),
        ("cpus_per_job", [None], "field 'cpus_per_job' is not Optional"),
        ("gpus_per_job", [-1], "expected at least 0"),
        ("gpus_per_job", [0.5, "GPU-1", False, {"a": 1}], "could not be converted to Integer"),
        ("timeout_min", [0, -5, float("nan"), float("inf")], "expected minutes above 0"),
        ("timeout_min", ["1h", True], "could not be converted to Float"),
        ("progress", ["bar", 1, True, "${oc.env:HOME}"], "expected auto | live | plain | none"),
        ("progress", [None], "field 'progress' is not Optional"),
    ],
)
def test_a_bad_value_is_told_with_its_key_and_what_was_expected(key, values, expected):
    """A sweep that ends in a TypeError of ours sends people into our code."""
    for value in values:
        with pytest.raises(ConfigError) as caught:
            options({key: value})
        (problem,) = caught.value.problems
        assert problem.startswith(f"`hydra.launcher.{key}={value}`: ")
        assert problem.endswith(f"{expected}.")
        assert caught.value.exit_code == ExitCode.BAD_CONFIG
    if key in FREE:
        assert getattr(options({key: None}), key) is None


def test_all_problems_are_told_together_with_the_keys_there_are():
    """A typo that is silently ignored leaves the default in force."""
    with pytest.raises(ConfigError) as caught:
        options({"njobs": 3, "n_jobs": 0, "progress": "bar", "hours": 1})
    text = str(caught.value)
    assert text.startswith("The launcher's configuration has 4 problems:")
    known = "n_jobs, tasks_per_job, cpus_per_job, gpus_per_job, timeout_min, snapshot, progress"
    assert "`hydra.launcher.njobs=3`: there is no such key. Did you mean `n_jobs`?" in text
    assert f"`hydra.launcher.hours=1`: there is no such key. There are {known}." in text


def test_good_values():
    """Each value in the documentation is accepted."""
    assert options({}) == LocalOptions()
    assert options({"timeout_min": 90}).time_limit_s == 5400
    assert options({"timeout_min": 0.5}).time_limit_s == 30
    assert options({}).time_limit_s is None
    for progress in ("auto", "live", "plain", "none"):
        assert options({"progress": progress}).progress == progress


def quota(monkeypatch, tmp_path, text: str) -> None:
    """A cgroup with a CPU quota, as in containers, on a machine of 16 cores."""
    (tmp_path / "cpu.max").write_text(text)
    real = open

    def fake(path, *args, **kwargs):
        path = tmp_path / "cpu.max" if path == "/sys/fs/cgroup/cpu.max" else path
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 16),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("9900000 100000\n", 16),
        ("", 16),
        ("rubbish\n", 16),
        ("1 0 1", 16),
    ],
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, text, expected):
    """Sixteen jobs on two cores' worth of time are slower than two."""
    quota(monkeypatch, tmp_path, text)
    assert resources.cores() == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]),
        (" 2, 0 ", ["2", "0"]),
        ("GPU-8f3,MIG-77/1/0", ["GPU-8f3", "MIG-77/1/0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("1,1", ["1"]),
    ],
)
def test_cuda_visible_devices_says_what_jobs_may_use(monkeypatch, visible, expected):
    """Slurm sets it, `NoDevFiles` too: a GPU beyond it belongs to somebody else's job."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resources.gpus() == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo GPU-11aa; echo GPU-22bb", ["GPU-11aa", "GPU-22bb"]),
        ("echo No devices were found", []),
        ("echo the driver is not loaded; exit 9", []),
        (None, []),
    ],
)
def test_nvidia_smi_is_asked_where_nothing_is_set(tmp_path, monkeypatch, script, expected):
    """GPUs are listed by UUID: nvidia-smi and CUDA can number different cards differently."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if script else str(tmp_path))
    if script:
        path = tmp_path / "nvidia-smi"
        asked = '[ "$*" = "--query-gpu=uuid --format=csv,noheader" ] || exit 1\n'
        path.write_text(f"#!/bin/sh\n{asked}{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert resources.gpus() == expected


@pytest.mark.parametrize(
    ("given", "devices", "cores", "expected"),
    [
        ({}, 0, 4, [[]] * 4),
        ({"cpus_per_job": 2}, 0, 5, [[]] * 2),
        ({"cpus_per_job": 9}, 0, 4, [[]]),
        ({"n_jobs": 7}, 0, 2, [[]] * 7),
        ({}, 2, 8, [["0"], ["1"]]),
        ({}, 4, 2, [["0"], ["1"]]),
        ({"gpus_per_job": 2}, 4, 8, [["0", "1"], ["2", "3"]]),
        ({"gpus_per_job": 2}, 5, 8, [["0", "1"], ["2", "3"]]),
        ({"gpus_per_job": 2, "n_jobs": 1}, 4, 8, [["0", "1"]]),
        ({"gpus_per_job": 0}, 4, 3, [[]] * 3),
        ({"tasks_per_job": 2}, 0, 5, [[]] * 2),
        ({"tasks_per_job": 2, "cpus_per_job": 4}, 0, 8, [[]] * 2),
        ({"tasks_per_job": 2}, 5, 8, [["0", "1"], ["2", "3"]]),
    ],
)
def test_the_machine_is_shared_out(monkeypatch, given, devices, cores, expected):
    """Two jobs on one GPU can run out of memory, and an idle GPU is a waste."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices))))
    monkeypatch.setattr(resources, "cores", lambda: cores)
    found = slots(options(given))
    assert found.gpus == expected
    assert found.count == len(expected)


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        ({"gpus_per_job": 3}, "0,1", "gpus_per_job=3`: 2 visible here (0, 1)."),
        ({"gpus_per_job": 1}, "", "gpus_per_job=1`: 0 visible here (nvidia-smi lists none)."),
        (
            {"gpus_per_job": 2, "n_jobs": 3},
            "0,1,2,3",
            "n_jobs=3`: with `hydra.launcher.gpus_per_job=2` the 4 GPUs allow 2 jobs at a time."
            " Lower one of the two.",
        ),
        ({"tasks_per_job": 3}, "0,1", "gpus_per_job=3`: 2 visible here (0, 1)."),
        (
            {"tasks_per_job": 4, "gpus_per_job": 2},
            "0,1",
            "gpus_per_job=2` is less than `hydra.launcher.tasks_per_job=4`, so tasks would share a"
            " GPU. Set gpus_per_job to 4, or to 0 for jobs without a GPU.",
        ),
    ],
)
def test_more_gpus_than_there_are(monkeypatch, given, visible, expected):
    """The error comes before the first job starts, and not later from CUDA."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as caught:
        slots(options(given))
    assert caught.value.problems == [f"`hydra.launcher.{expected}"]


# -- true sweeps -------------------------------------------------------------------------------

MEETING = """
    import json, os, select, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        began = time.monotonic()
        here = Path(HydraConfig.get().sweep.dir, "here")
        here.mkdir(exist_ok=True)
        (here / str(HydraConfig.get().job.num)).touch()
        # Until as many have come as are expected to run at once: then they did.
        while len(list(here.iterdir())) < cfg.meet:
            assert time.monotonic() < began + 60, "nobody else came"
            select.select([], [], [], 0.01)
        seen = {
            "began": began,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": os.environ["OMP_NUM_THREADS"],
            "ended": time.monotonic(),
        }
        Path(HydraConfig.get().runtime.output_dir, "seen.json").write_text(json.dumps(seen))

    if __name__ == "__main__":
        main()
"""


def sweep_of(jobs: int, tmp_path, *overrides, meet: int, **env) -> list[dict]:
    app = App(tmp_path / "app", MEETING, f"meet: {meet}\nx: 0\n")
    done = app.run(f"x=range({jobs})", *overrides, **env)
    assert done.returncode == 0, done.stdout
    return [json.loads((app.job(n).directory / "seen.json").read_text()) for n in range(jobs)]


def at_once(jobs: list[dict]) -> int:
    """The largest number of jobs that ran at the same time."""
    moments = [job["began"] for job in jobs]
    return max(sum(j["began"] <= moment <= j["ended"] for j in jobs) for moment in moments)


def test_jobs_that_run_at_once_see_gpus_of_their_own(tmp_path):
    """Two processes on one GPU would silently change each other's timing and memory."""
    jobs = sweep_of(
        4,
        tmp_path,
        "hydra.launcher.n_jobs=2",
        "hydra.launcher.gpus_per_job=2",
        "hydra.launcher.cpus_per_job=3",
        meet=2,
        CUDA_VISIBLE_DEVICES="0,1,2,3",
        OMP_NUM_THREADS="5",
    )
    assert {job["gpus"] for job in jobs} == {"0,1", "2,3"}
    for one in jobs:
        for other in jobs:
            is_apart = one["ended"] < other["began"] or other["ended"] < one["began"]
            assert one is other or is_apart or one["gpus"] != other["gpus"]
    assert at_once(jobs) == 2
    assert {job["threads"] for job in jobs} == {"5"}, "what the user has set stays"


def test_no_more_jobs_at_once_than_asked(tmp_path):
    """A user can set n_jobs=1 on a shared machine."""
    jobs = sweep_of(2, tmp_path, "hydra.launcher.n_jobs=1", meet=1, CUDA_VISIBLE_DEVICES="-1")
    assert at_once(jobs) == 1
    assert [job["gpus"] for job in jobs] == ["-1"] * 2
    began = [job["began"] for job in jobs]
    assert began == sorted(began), "in the order of their numbers"


def test_as_many_jobs_at_once_as_asked(tmp_path, monkeypatch):
    """`n_jobs` can exceed the number of cores; each job gets its number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    overrides = ["hydra.launcher.n_jobs=3", "hydra.launcher.cpus_per_job=3"]
    jobs = sweep_of(3, tmp_path, *overrides, meet=3, CUDA_VISIBLE_DEVICES="")
    assert at_once(jobs) == 3
    assert {job["threads"] for job in jobs} == {"3"}
    assert [job["gpus"] for job in jobs] == [""] * 3


def test_bad_options_end_the_sweep_before_it_makes_a_directory(tmp_path):
    """78 and the list, no traceback, nothing to clean up."""
    app = App(tmp_path / "app", MEETING, "meet: 1\nx: 0\n")
    done = app.run(
        "x=1,2", "hydra.launcher.n_jobs=none", "hydra.launcher.timeout_min=0", "+hydra.launcher.a=1"
    )
    assert done.returncode == 78
    for text in (
        "has 3 problems",
        "`hydra.launcher.n_jobs=none`",
        "`hydra.launcher.timeout_min=0`",
        "`hydra.launcher.a=1`: there is no such key",
    ):
        assert text in done.stdout
    assert "Traceback" not in done.stdout
    assert not app.job(0).directory.exists()
    done = app.run("x=1,2", "hydra.launcher.gpus_per_job=3", CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 78
    assert "2 visible here (0, 1)" in done.stdout
    assert not app.job(0).directory.exists()


LATE = """
    import hydra, signal

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        if cfg.late:
            signal.pause()

    if __name__ == "__main__":
        main()
"""


def test_a_time_limit_without_a_policy_is_the_limit_itself(tmp_path):
    """Without a policy no handler is installed, so a warning signal would kill the job early."""
    app = App(tmp_path / "app", LATE, "late: false\n")
    done = app.run("late=false", "hydra.launcher.timeout_min=1")
    assert done.returncode == 0, done.stdout
    app = App(tmp_path / "other", LATE, "late: false\n")
    done = app.run("late=true", "hydra.launcher.timeout_min=0.02")
    assert done.returncode == 1
    assert app.job(0).state["reason"] == "time_limit"
    assert "time limit" in done.stdout
    assert app.job(0).is_free()
