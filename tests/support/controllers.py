"""A wrapper of a job on a cluster, and a controller that gives the answers it is given."""

import json
import os

import pytest
from plans import LISTENS, planned

from forge.errors import NoAnswer, SlurmRefused
from forge.jobdir.job_files import REPORT, STATE, forge_dir, write_json
from forge.slurm import client
from forge.slurm.client import JobInfo
from forge.slurm.wrapper import SlurmJob

RUNS = JobInfo("RUNNING", "None", 0, None, left_s=3000.0)
CALLS = ("show", "requeue", "exclude", "nodes_for", "end_step", "signal_step")


class Controller:
    """Answers with what it is given, once each; None: not at all."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.did = []
        self.ended = []
        self.nodes = dict.fromkeys(["n1", "n2", "n3", "n7"], True)

    def show(self, job, within_s):
        answer = self.answers.pop(0)
        if answer is None:
            raise NoAnswer("busy")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def requeue(self, job, within_s):
        self.did.append(("requeue", job))

    def end_step(self, job, number, within_s):
        self.ended.append(number)

    def signal_step(self, job, number, name, within_s):
        answer = self.answers.pop(0)
        if answer is None:
            raise NoAnswer("busy")
        if answer:
            self.did.append((name, number))
        return answer

    def exclude(self, job, nodes, within_s):
        self.did.append(("exclude", nodes))

    def nodes_for(self, info, within_s):
        if self.nodes is None:
            raise SlurmRefused("sinfo: busy")
        return self.nodes


@pytest.fixture
def silence():
    """A pipe through which no signal comes."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def wrapper(tmp_path, monkeypatch, silence):
    """A wrapper whose attempt has just ended, and whose controller gives these answers."""
    forge_dir(tmp_path).mkdir()
    planned(ranks=2, actions=LISTENS | {"HUP": "save"}).write(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def make(*answers, **changes):
        job = SlurmJob(tmp_path, tmp_path / "script.sh")
        job._reader, _ = silence
        job.controller = Controller(*answers)
        for name in CALLS:
            monkeypatch.setattr(client, name, getattr(job.controller, name))
        vars(job).update(changes)
        return job

    return make


def report(job, rank, code, time=1.0, node="n1", is_held=False):
    content = {"code": code, "time": time, "is_held": is_held, "node": node}
    path = forge_dir(job.directory) / (f"{REPORT}.{rank}" if rank else REPORT)
    path.write_text(json.dumps(content))


def exited(code):
    return code << 8


def state_left(job, state, restarts, **more):
    """As a wrapper that was killed in the start with so many restarts leaves it."""
    content = {"because": "why", "counts": {"preemptions": 2, "restarts": 3}, "pid": 1, "code": 7}
    content |= {
        "slurm_job": "7",
        "slurm_restarts": restarts,
        "state": state,
        "step": 4,
        "time": 5.0,
    } | more
    write_json(job.forge / STATE, content)
