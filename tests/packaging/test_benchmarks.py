"""The benchmarks run at their smallest size: a benchmark that no longer runs is noticed here.

`make test` runs them in one process. The benchmarks that start processes of their own only print
their help there; `make proofs` runs each benchmark as a person does.
"""

import json
import os
import sys
from functools import partial

import pytest
import warm
from cluster import missing
from harness import Process
from repository import ROOT, files

pytestmark = pytest.mark.slow

IMPORTED = {"several.py"}
"""Imported by other benchmarks."""
WITHIN = {"ending.py", "loading.py", "saving.py", "stopping.py"}
"""Run by `checkpoint.py`."""
ONE = "--rounds 1"
SMALL = f"--mib 1 {ONE}"
RUNS = {
    "agreement.py": (f"--calls 10 {ONE} --steps 10 --ranks 2", "2 ranks, sent by rank 0 in 10"),
    "checkpoint.py": (f"--mib 1 --threads 1 {ONE} --peers peers", "of which the end of the inter"),
    "launch.py": (f"--jobs 1 {ONE}", "a sweep of one such job"),
    "lightning_step.py": (f"--steps 10 {ONE}", "ForgeCallback, stream"),
    "nan_check.py": (f"--millions 0.1 {ONE}", "no check"),
    "progress_marks.py": ("--pairs 1 --steps 10 --seconds 0.1 --calls 10", "wake-ups"),
    "rank_saving.py": (f"{SMALL} --ranks 2", "dcp.async_save"),
    "restart_ranks.py": (f"--ranks 2 --every 4 {ONE} --kinds forge", "s until all train"),
    "slurm_launch.py": (f"--jobs 2 {ONE}", "Hydra checking"),
    "startup.py": (ONE, "import forge; forge.config.load"),
    "status.py": (f"--jobs 3 --steps 20 {ONE}", "x naive"),
    "step.py": (f"--steps 10 {ONE}", "forge"),
    "transformers_step.py": (f"--steps 10 {ONE}", "Accelerate, forge"),
}
"""Benchmark -> its options, and something that it prints."""
STARTS_PROCESSES = {
    *("agreement.py", "checkpoint.py", "launch.py", "progress_marks.py"),
    *("rank_saving.py", "restart_ranks.py", "slurm_launch.py", "startup.py", "step.py"),
    *("lightning_step.py", "status.py", "transformers_step.py"),
}
IN_ONE_PROCESS = """
import json, runpy, sys, warnings
warnings.simplefilter("ignore")
for path, options in json.loads(sys.argv[1]):
    sys.argv[:] = [path, *options]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:  # that of --help
        assert not error.code, f"{path}: {error}"
"""


def test_every_benchmark_is_run():
    """Here, or by another one."""
    names = {name.removeprefix("benchmarks/") for name in files() if name.startswith("benchmarks/")}
    assert names == {"README.md", *IMPORTED, *WITHIN, *RUNS}


def test_all_benchmarks_begin_and_those_of_one_process_print_their_figures(tmp_path):
    """Somebody who doubts a number of the docs measures it again."""
    given = {name: options for name, (options, _) in RUNS.items() if name not in STARTS_PROCESSES}
    given |= dict.fromkeys(STARTS_PROCESSES | WITHIN, "--help")
    folder = ROOT / "benchmarks"
    runs = [(str(folder / name), options.split()) for name, options in sorted(given.items())]
    command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(runs)]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    popen = partial(warm.Popen, imports=warm.SHARDING)
    process = Process(command, tmp_path / "output.txt", tmp_path, popen, PYTHONPATH=path)
    assert process.wait(280) == 0, process.output
    for name in given:
        printed = f"usage: {name}" if given[name] == "--help" else RUNS[name][1]
        assert printed in process.output


@pytest.mark.proofs
@pytest.mark.parametrize("name", RUNS)
def test_it_prints_its_figures(name, tmp_path, tmp_path_factory):
    """Somebody who doubts a number of the docs measures it again."""
    options, printed = RUNS[name]
    problem = missing() if name == "slurm_launch.py" else None
    if problem and not os.environ.get("FORGE_REQUIRE_SLURM"):
        pytest.skip(problem)
    peers = tmp_path / "peers"  # without Lightning, which is not installed for the tests
    (peers / "bin").mkdir(parents=True)
    (peers / "bin" / "python").symlink_to(sys.executable)
    (peers / "done").touch()
    command = [sys.executable, str(ROOT / "benchmarks" / name), *options.split()]
    short = str(tmp_path_factory.getbasetemp())  # a socket's path has at most 108 characters
    process = Process(
        command, tmp_path / "output.txt", tmp_path, PYTHONPATH=str(ROOT), TMPDIR=short
    )
    assert process.wait(280) == 0, process.output
    assert printed in process.output
