"""Every kind of batch script, and those of the page, literally: each job comes back exactly once.

On a cluster of their own, whose grace time a busy machine keeps to.
"""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from batch_scripts import COMMAND, CONF, HYDRA, TRAIN, preempt
from cluster import SBIN, Cluster, missing, wait_for
from own_scripts import CASES, NODES, SETTINGS, Scripts
from repository import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PAGE = (ROOT / "docs/how-to/batch-script.md").read_text()
SCRIPTS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
NODES_OF = ["n3,n4", "n5,n6", "n1", "n1", "n1"]
RANKS_OF = [4, 4, 1, 1, 1]
MAIN = 'train(Path("notes"), {}, POLICY | {"checkpoint": {"dir": "run", "every_steps": 100}})'


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory):
    if problem := missing():
        pytest.skip(problem)
    running = Cluster(tmp_path_factory.mktemp("own") / "run", *SETTINGS, nodes=NODES)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def rows(own_cluster, tmp_path_factory):
    scripts = Scripts(own_cluster, tmp_path_factory.mktemp("cases"), CASES)
    scripts.disturb()
    return {row.case: row for row in scripts.rows()}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_job_comes_back_exactly_once_where_it_should(rows, name):
    """No step is repeated, and the weights are those of an undisturbed run."""
    assert rows[name].is_right, f"{rows[name]}\n{rows[name].output}"


@pytest.fixture(scope="module")
def pages(own_cluster, tmp_path_factory):
    """The jobs of the page's scripts, preempted once all of them train."""
    jobs = []
    for number, script in enumerate(SCRIPTS):
        folder = tmp_path_factory.mktemp(f"page{number}")
        library = TRAIN.partition('    if __name__ == "__main__"')[0]
        files = {
            "training.py": library,
            "train.py": f"from training import *\n{MAIN}\n",
            "train_hydra.py": HYDRA.replace("from train import", "from training import"),
            "conf.yaml": CONF.replace("???", "notes"),
            "simulate.py": COMMAND.replace("sys.argv[1]", '"notes"'),
        }
        for name, text in files.items():
            (folder / name).write_text(textwrap.dedent(text))
        jobs.append((folder, submit_literally(own_cluster, folder, script, NODES_OF[number])))
    for (folder, _), ranks in zip(jobs, RANKS_OF, strict=True):
        wait_for(lambda f=folder, r=ranks: len(list(f.glob("notes*/waits.*"))) >= r, "page", 300)
    preempt(own_cluster, tmp_path_factory.mktemp("a"), "--nodelist=n1", "--partition=alone")
    pair = ("--nodes=4", "--nodelist=n[3-6]", "--partition=pair")
    preempt(own_cluster, tmp_path_factory.mktemp("b"), *pair)
    return jobs


def submit_literally(cluster, folder, script, nodes):
    path = folder / "job.sh"
    path.write_text(script)
    mine = ("env", f"PATH={Path(sys.executable).parent}:{SBIN}", "OMP_NUM_THREADS=1")
    sbatch = (*mine, "sbatch", "--parsable", f"--nodelist={nodes}", str(path))
    return cluster.run(*sbatch, cwd=folder).strip()


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_scripts_of_the_page_run_as_they_stand_there(pages, own_cluster, number):
    """Preempted once, requeued once, and finished without a step that was done twice."""
    folder, job = pages[number]
    wait_for(lambda: own_cluster.show(job)["JobState"] in ("COMPLETED", "FAILED"), "end", 300)
    shown = own_cluster.show(job)
    output = (folder / f"slurm-{job}.out").read_text()
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), output
    trainings = list(folder.glob("notes*"))
    assert trainings
    for one in trainings:
        steps = (one / "steps.0").read_text().split()
        assert len(steps) == len(set(steps)), output
        assert (one / "result.0").exists()
