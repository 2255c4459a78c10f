"""How often a cgroup has counted a kill for memory: both versions, and where there is no count."""

import pytest

from forge.process.memory import oom_kills

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
def test_the_count_is_that_of_the_own_cgroup(own, path, text, count, tmp_path):
    """Where nobody counts, nobody knows: that is not the same as none."""
    file = tmp_path / "cgroup" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / "own").write_text(own)
    assert oom_kills(str(tmp_path / "own"), str(tmp_path / "cgroup")) == count


def test_without_cgroups_there_is_no_count(tmp_path):
    """macOS, or a container that hides them."""
    assert oom_kills(str(tmp_path / "nothing"), str(tmp_path)) is None
