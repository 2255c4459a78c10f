"""What all tests share: one thread each, no signal handler left behind, quick starts, one cluster.

Long tests come first.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import light
import pytest
import torch
import warm
from started import ended_here
from warm import IS_QUICK, QUICK

from forge import messages
from forge.jobdir import code
from forge.shutdown import stopping

pytest_plugins = ["played_jobs", "store_fixtures"]

# As `make` does: else each process that starts for real compiles forge, and each run the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: threads that wait take a core
# As in an active environment: `python` is no shim of a version manager, which takes several shells.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
# Each Run that has a directory reads the code of its job: not that of hundreds of test modules.
INSTALLED = (*code.installed(), os.path.join(os.path.dirname(__file__), ""))
code.installed = lambda: INSTALLED
messages.PATIENCE_S = 60.0  # on a busy machine a test reads a log before the message is in it
MEMORY = "/dev/shm"
ROOM_GIB = 4
"""Free memory for the files of all tests; those of a test that has passed are removed at once."""


def has_room(folder):
    """Whether the files of the tests fit into this file system, and programs among them can run."""
    if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(folder).free >= ROOM_GIB * 2**30


# Each of a hundred thousand calls of fsync would wait for a disk. `make proofs` once uses the disk.
if IS_QUICK and has_room(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)  # of pytest's own `tmp_path`
if IS_QUICK and QUICK not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    os.environ["PYTHONPATH"] = os.pathsep.join([QUICK, *given])


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart():
    """The processes of pytest-xdist are forked, too: with torch, and with what forks for them."""
    begin = subprocess.Popen
    if IS_QUICK and "PYTEST_XDIST_WORKER" not in os.environ:
        subprocess.Popen = functools.partial(warm.Popen, is_worker=True)
    try:
        return (yield)
    finally:
        subprocess.Popen = begin


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadscope`: Slurm's tests have two processes, and a cluster in each; proofs a third.

    They wait for Slurm more than they work, so the other processes have the cores meanwhile.
    A file whose tests share what one fixture made has one process, too. So have all tests whose
    ranks are sharded, and all tests of trainers: their modules are imported once; and those that
    parse all of forge. All other tests go one by one to whichever is free. Marks `xdist_group`
    would say it, but the groups of pytest-xdist 3.8 are lost with pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if "pytest.mark.slurm" in text_of(config.rootpath / file):
                folder = file.rpartition("/")[0]
                return (
                    folder if folder in ("tests/slurm", "tests/proofs") else "others on a cluster"
                )
            if SHARDED.search(text_of(config.rootpath / file)):
                return "sharded ranks"
            if TRAINERS.search(text_of(config.rootpath / file)):
                return "trainers"
            if SOURCES.search(text_of(config.rootpath / file)):
                return "sources"
            return file if is_one(config.rootpath / file) else nodeid

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


SHARDED = re.compile(r'fsdp2|warm\.SHARDING|"(shards|norms|alike)\.py"')
"""In tests that start ranks with torch's modules for sharding; see `ranked.py`."""
TRAINERS = re.compile(r"^from (trained|lightning_jobs) import", re.MULTILINE)
"""In tests that start scripts with the modules of trainers, which are imported once, too."""
SOURCES = re.compile(r"from (repository import .*\btree|private_parts import)\b")
"""In tests that read all of forge: each file is parsed once."""


@functools.cache
def text_of(path):
    return path.read_text()


def is_one(path):
    """Whether a file's tests share what one fixture made, and so have one process."""
    return 'scope="module"' in text_of(path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Each process compiles a share of the test modules that are new, instead of all of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not IS_QUICK:
        return
    of_all = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    tests = session.config.rootpath / "tests"
    compiled = {one.name.partition(".")[0] for one in tests.rglob("__pycache__/test_*")}
    paths = [one for one in sorted(tests.rglob("test_*.py")) if "proofs" not in one.parts]
    new = [one for one in paths if one.stem not in compiled]
    for path in new[int(os.environ["PYTEST_XDIST_WORKER"][2:]) :: of_all]:
        sys.path.insert(0, str(path.parent))
        # What is raised here is raised again, and shown, as pytest imports the module.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(path.stem)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The order: tests on Slurm, slow tests and files that share a fixture, sweeps, short tests."""

    waiting = {item.path for item in items if item.get_closest_marker("slurm")}

    def place(item):
        is_long = item.get_closest_marker("slow") is not None or is_one(item.path)
        return item.path not in waiting, not is_long, item.path.parent.name != "launch"

    items.sort(key=place)


def pytest_collection_finish():
    """Each Run looks at all objects there are: not at the thousands that are pytest's own."""
    gc.collect()
    gc.freeze()


_unfrozen = []
"""Tests that have ended since then."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor at what earlier tests have left, such as parsed sources and modules of torch."""
    yield
    _unfrozen.append(item)
    if len(_unfrozen) >= 20 and (nextitem is None or nextitem.path != item.path):
        _unfrozen.clear()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all test processes of this run see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def disk(tmp_path):
    """A directory over which a private namespace may mount a small file system."""
    directory = tmp_path / "disk"
    directory.mkdir()
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(directory)]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs the right to mount in a private namespace (root)")
    return directory


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    """A test that leaves a handler behind would change the tests after it."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(autouse=True)
def _processes_end_with_their_test():
    """A process that a test leaves behind could fail later tests: it inherits their open files."""
    with ended_here():
        yield
    if multiprocessing.active_children():
        gc.collect()  # the workers of a DataLoader end with it, which can be part of a cycle
    assert multiprocessing.active_children() == []


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A true Slurm with two nodes, for all tests of this process; skipped where there is none."""
    from cluster import Cluster, missing

    problem = missing()
    if problem and os.environ.get("FORGE_REQUIRE_SLURM"):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)
    # Ranks meet at a port made of the job's number: two clusters on one machine share no numbers.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = f"FirstJobId={1000 * (number + 1)}"
    running = Cluster(tmp_path_factory.mktemp("slurm") / "run", first)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def own_environment():
    """Jobs submitted once for a module find the tests' functions, and know of no outer job."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("SLURM", "SUBMITIT", "SBATCH"))]:
            patch.delenv(name)
        inherited = [one for one in [os.environ.get("PYTHONPATH")] if one]
        patch.setenv("PYTHONPATH", os.pathsep.join([*inherited, light.PYTHONPATH]))
        yield patch


@pytest.fixture(autouse=True)
def _no_guard(monkeypatch):
    """A stop in the process of the tests would end it ten seconds later, in another test."""
    started = []
    monkeypatch.setattr(stopping, "_start_guard", lambda *given: started.append(given))
    yield
    assert not started, "a stop started its guard: use `outliving()` of nan_trainer"
