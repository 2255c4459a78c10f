"""The rank of a process, from environment variables as real launchers set them."""

import pytest

from forge.errors import ConfigError
from forge.process import world
from forge.process.world import RankInfo

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_process_by_itself_is_the_only_rank():
    assert world.of({}) == RankInfo()
    assert world.of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == RankInfo()  # a batch script


def test_tasks_that_have_nothing_in_common_are_alone():
    """Jobs of a local sweep inside a Slurm step ignore the step's ranks, but not torchrun's."""
    assert world.of(STEP | {"FORGE_RANKS": "1"}) == RankInfo()
    assert world.of(STEP | TORCHRUN | {"FORGE_RANKS": "1"}).rank == 3


def test_what_torchrun_says_is_taken_as_it_is():
    """Under srun, too: there the task of the step is torchrun's agent, and not a rank."""
    expected = RankInfo(3, 4, 1, 2, "host", 29500)
    assert world.of(TORCHRUN) == world.of(STEP | TORCHRUN) == expected
    assert world.of(expected.variables()) == expected


def test_a_task_of_a_slurm_step_is_a_rank():
    found = world.of(STEP)
    assert found == RankInfo(3, 5, 1, 2, "localhost", found.port)
    assert world.of(STEP | {"SLURM_NODEID": "2"}).local_size == 1
    assert 10_000 <= found.port < 30_000


def test_each_start_has_a_port_of_its_own():
    """Connections of the last start can linger, and other jobs can run on the same node."""
    changes = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "18"}]
    assert len({world.of(STEP | change).port for change in changes}) == 4
    others = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert world.of(STEP | others).port == world.of(STEP).port


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("no-such-n[08-11,20]", "no-such-n08"), ("no-such-a,b", "no-such-a"), ("x[3]-y", "x3-y")],
)
def test_the_first_node_of_a_list_is_where_they_meet(nodes, host):
    """If the node's name cannot be resolved, the address is that of srun's node."""
    given = STEP | {"SLURM_STEP_NODELIST": nodes}
    assert world.of(given).address == host
    assert world.of(given | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.8"}).address == "10.0.0.8"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (STEP | {"RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 and WORLD_SIZE=1 are set, but this is"),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT, the address of the rendezvous, are not",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2, WORLD_SIZE=2: expected integers, and RANK below",
        ),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a': expected integers"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environment, said):
    """Otherwise two processes would be rank 0, and write the same files."""
    with pytest.raises(ConfigError, match=said):
        world.of(environment)


def test_a_free_port_can_be_listened_on():
    import socket

    with socket.create_server(("", world.free_port())) as server:
        assert 10_000 <= server.getsockname()[1] < 30_000
