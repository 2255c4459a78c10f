"""What is free, and kills for memory, by the counts of cgroups: both versions, and none."""

import pytest

from forge.process import memory

EVENTS = "low 0\nhigh 0\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("own", "path", "text", "count"),
    [
        ("0::/job/step\n", "job/step/memory.events", EVENTS, 2),
        ("0::/\n", "memory.events", EVENTS, 2),  # in a container that sees its own alone
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", CONTROL, 3),
        ("4:cpu,memory:/elsewhere\n", "memory/memory.oom_control", CONTROL, 3),
        ("0::/\n", "memory.stat", "anon 0\n", None),  # the root of all counts nothing
        ("4:memory:/job\n", "memory/job/memory.oom_control", "under_oom 0\n", None),  # Linux 4.12
        ("4:cpu:/job\n", "memory/job/memory.oom_control", CONTROL, None),
    ],
)
def test_the_count_is_that_of_the_own_cgroup(own, path, text, count, tmp_path, monkeypatch):
    """Where nobody counts, nobody knows: that is not the same as none."""
    file = tmp_path / "cgroup" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(memory, "OWN_CGROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(memory, "CGROUPS", str(tmp_path / "cgroup"))
    assert memory.oom_kills() == count


def test_without_cgroups_there_is_no_count(tmp_path, monkeypatch):
    """macOS, or a container that hides them."""
    monkeypatch.setattr(memory, "OWN_CGROUPS", str(tmp_path / "nothing"))
    assert memory.oom_kills() is None


V2 = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    "sys/slurm/job_7/memory.max": "8000000\n",
    "sys/slurm/job_7/memory.current": "6000000\n",
    "sys/slurm/job_7/memory.stat": "anon 1\ninactive_file 500000\n",
    "sys/slurm/job_7/step_0/memory.max": "max\n",
    "sys/slurm/job_7/step_0/memory.current": "6000000\n",
}
V1 = {
    "proc/self/cgroup": "9:cpuset:/x\n5:hugetlb,memory:/slurm/job_7\n",
    "sys/memory/slurm/job_7/memory.limit_in_bytes": "9000000\n",
    "sys/memory/slurm/job_7/memory.usage_in_bytes": "9500000\n",
    "sys/memory/slurm/job_7/memory.stat": "total_inactive_file 100\n",
    "sys/memory/slurm/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4096 kB\n"}, 4 << 20),
        (V2, 2_500_000),
        ({**V2, "proc/meminfo": "MemAvailable: 1000 kB\n"}, 1_024_000),
        ({**V2, "sys/slurm/job_7/memory.stat": "torn"}, None),
        (V1, 0),
    ],
)
def test_the_least_of_what_machine_and_cgroups_leave_counts(files, expected, tmp_path, monkeypatch):
    """Slurm gives each job a cgroup: the machine's free memory is not the job's."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    places = {"MEMINFO": "proc/meminfo", "OWN_CGROUPS": "proc/self/cgroup", "CGROUPS": "sys"}
    for name, path in places.items():
        monkeypatch.setattr(memory, name, str(tmp_path / path))
    assert memory.free_bytes() == expected


def test_this_machine_tells_how_much_there_is():
    """The fixtures above are copies of what a kernel writes: this is one."""
    assert memory.free_bytes() > 1 << 20
