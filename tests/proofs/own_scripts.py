"""What becomes of batch scripts that users write by hand: one table.

    python tests/proofs/own_scripts.py [WORD OF A CASE…]

Starts a cluster, submits a script of each kind, disturbs each job, and shows its last state, how
often it was requeued, and which steps were done again. Exits with 1 if a job ended
otherwise than it should, or with other weights than an undisturbed one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from batch_scripts import COLLIDES, HOLD, STEPS, BatchScript, Folder, preempt
from cluster import Cluster, missing, wait_for

NODES = 7
SETTINGS = (
    "SlurmdTimeout=20",
    *(
        f"PartitionName={name} Nodes=n[1-{NODES}] {rest}"
        for name, rest in {
            "low": "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30",
            "zero": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
            "patient": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=60",
            # One that waits for its nodes holds up the next one in its partition.
            **dict.fromkeys(
                ("urgent", "alone", "pair", "twice"), "PriorityTier=10 PreemptMode=OFF"
            ),
        }.items()
    ),
)
ALONE, QUIET, PAIR, OTHER_PAIR, LOST = "n1", "n2", "n3,n4", "n5,n6", "n6"
TWICE = "n7"
SRUN = "srun $train"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


@dataclass
class Case:
    """A script, what is done to its job, and what has to come of it."""

    name: str
    script: str = SRUN
    options: tuple[str, ...] = (f"--nodelist={ALONE}",)
    act: Callable[[BatchScript], object] = bool
    """What is done to the job once it holds; those on a node that is preempted need nothing."""
    ends: tuple[str, int] | None = ("COMPLETED", 1)
    """None: only shown, since Slurm alone decides how it ends."""
    trainings: tuple[str, ...] = ()
    """Names of its trainings, if they are not that of the case."""
    ranks: int = 1
    waits: bool = True
    """Whether it holds until it is disturbed."""

    repeats: int = 0
    """Steps that are done again: nobody can save on a node that is gone."""

    def submit(self, folder: Folder) -> BatchScript:
        """The job."""
        return folder.submit(self.slug, self.script, *self.options)

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w]+", "-", self.name).strip("-")


def scancel(*options: str) -> Callable[[BatchScript], None]:
    return lambda job: job.scancel(*options)


def kill(job: BatchScript) -> None:
    os.kill(int(job.noted("waits")[-1]), 15)


def cancel_while_saving(job: BatchScript) -> None:
    wait_for(lambda: job.noted("saving"), "save after the preemption")
    job.scancel()
    (job.notes / "cancelled").touch()


def preempt_again(job: BatchScript) -> None:
    where = (f"--nodelist={TWICE}", "--partition=twice")
    preempt(job.cluster, job.place.parent, *where)
    job.wait(2)
    preempt(job.cluster, job.place.parent, *where)


def end_the_slow_step(job: BatchScript) -> None:
    wait_for(
        lambda: "will be requeued when Slurm step" in job.output, "a step that waits for the other"
    )
    (job.notes.parent / "two-steps-b" / "cancelled").touch()


def lose(job: BatchScript) -> None:
    job.cluster.lose(LOST)
    wait_for(lambda: job.shown["Restarts"] == "1", "requeue by Slurm", 300)
    job.cluster.bring_back(LOST)


on_quiet = (f"--nodelist={QUIET}",)
CASES = [
    Case("preempted"),
    Case("preempted, GraceTime=0", options=(f"--nodelist={ALONE}", "--partition=zero")),
    Case("USR1 before the limit", options=(*on_quiet, "--time=3", "--signal=USR1@45"), waits=False),
    Case("USR2 before the limit", options=(*on_quiet, "--time=3", "--signal=USR2@45"), waits=False),
    Case("B: without a trap", options=(*on_quiet, "--time=3", "--signal=B:USR1@45"), waits=False),
    Case("limit without a signal", options=(*on_quiet, "--time=1"), waits=False),
    Case("scancel", options=on_quiet, act=scancel(), ends=("CANCELLED", 0)),
    Case(
        "scancel while it saves",
        f"{SRUN} slow=1",
        act=cancel_while_saving,
        ends=("CANCELLED", 0),
    ),
    Case(
        "scancel --signal=TERM", options=on_quiet, act=scancel("--signal=TERM"), ends=("FAILED", 0)
    ),
    Case("kill", options=on_quiet, act=kill, ends=("FAILED", 0)),
    Case("--no-requeue", options=(f"--nodelist={ALONE}", "--no-requeue"), ends=("FAILED", 0)),
    Case("requeue.enabled=false", f"{SRUN} disabled=1", ends=("FAILED", 0)),
    Case(
        "two steps",
        "srun -n1 --exact python $forge/train.py $name-a &\n"
        "srun -n1 --exact python $forge/train.py $name-b slow=1 &\nwait",
        (f"--nodelist={ALONE}", "--ntasks=2", "--partition=patient"),
        end_the_slow_step,
        trainings=("two-steps-a", "two-steps-b"),
    ),
    Case("python without srun, preempted", "$train", ends=None),
    Case("array", options=(f"--nodelist={ALONE}", "--array=0-0")),
    Case(
        "requeues itself in a trap",
        "trap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun $train & wait; wait",
        (*on_quiet, "--time=3", "--signal=B:USR1@45"),
        waits=False,
    ),
    Case(
        "requeues itself by the code",
        "srun $train\n[ $? != 75 ] || scontrol requeue $SLURM_JOB_ID",
        (*on_quiet, "--time=3", "--signal=USR1@45"),
        waits=False,
    ),
    Case("DDP 2 x 2 by srun", options=(f"--nodelist={PAIR}", *TWO_BY_TWO), ranks=4),
    Case(
        "DDP 2 x 2 by torchrun",
        "srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
        " --rdzv-endpoint=127.0.0.1:$((20000 + SLURM_JOB_ID)) --rdzv-id=$SLURM_JOB_ID"
        " --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 $args",
        (f"--nodelist={PAIR}", "--nodes=2", "--ntasks-per-node=1"),
        ranks=4,
    ),
    Case("node lost", options=(f"--nodelist={LOST}",), act=lose, repeats=HOLD + 1),
]

CASES += [
    Case(
        "Hydra, directory by the time",
        "srun python $forge/hydra_train.py name=$name",
        trainings=("Hydra-directory-by-the-time 3",),
    ),
    Case(
        "local sweep",
        "srun python $forge/hydra_train.py -m hydra/launcher=local name=$name seed=1,2",
        trainings=("local-sweep 1", "local-sweep 2"),
    ),
    Case("forge exec", "srun forge exec -- python $forge/command.py $name"),
    Case(
        "forge exec, limit without a signal",
        "srun forge exec -- python $forge/command.py $name",
        (*on_quiet, "--time=1"),
        waits=False,
    ),
    Case(
        "budget of 1, preempted twice",
        f"{SRUN} budget=1 holds=0,1",
        (f"--nodelist={TWICE}",),
        act=preempt_again,
        ends=("FAILED", 1),
    ),
]


@dataclass
class Interactive(Case):
    """In an allocation of salloc's."""

    def submit(self, folder: Folder) -> BatchScript:
        """Starts salloc, which ends with its job."""
        place = folder.folder / f"{self.slug} job"
        place.mkdir()
        outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        command = ["salloc", f"--job-name={self.slug}", *self.options]
        command += ["srun", sys.executable, "../train.py", f"../{self.slug}"]
        with (place / "slurm-salloc.out").open("wb") as output:
            subprocess.Popen(
                command,
                cwd=place,
                env=outer | folder.cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        named = ("squeue", "--noheader", f"--name={self.slug}", "--format=%i")
        wait_for(lambda: bool(folder.cluster.run(*named).strip()), "allocation")
        return BatchScript(folder, self.slug, folder.cluster.run(*named).strip(), place)


CASES.append(Interactive("salloc, preempted", ends=("FAILED", 0)))


@dataclass
class Collision(Case):
    """An array whose tasks share a directory: what counts is the task that is not refused."""

    def submit(self, folder: Folder) -> BatchScript:
        """The task, once the others have ended."""
        winner = super().submit(folder).winner()
        self.trainings = (winner.name,)
        return winner


CASES.append(Collision("--array in one second", COLLIDES, (f"--nodelist={ALONE}", "--array=0-3")))


@dataclass
class Row:
    """What became of a job."""

    case: str
    state: str
    restarts: int
    repeated: int
    is_same: bool | None
    """Whether the weights are those of an undisturbed run; None: it did not finish."""
    is_right: bool
    output: str = ""

    def __str__(self) -> str:
        bits = {True: "the same", False: "OTHERS", None: "-"}[self.is_same]
        verdict = "" if self.is_right else "  <- WRONG"
        head = f"{self.case:38} {self.state:10} {self.restarts:8} {self.repeated:8}  {bits}"
        return head + verdict


class Scripts:
    """All cases on one cluster, at once."""

    def __init__(self, cluster: Cluster, folder: Path, cases: list[Case]) -> None:
        self.cluster = cluster
        self.folder = Folder(cluster, folder)
        pair = (f"--nodelist={OTHER_PAIR}", *TWO_BY_TWO)
        self._undisturbed = {
            1: self.folder.submit("undisturbed", f"{SRUN} holds=none", *on_quiet),
            4: self.folder.submit("undisturbed-4", f"{SRUN} holds=none", *pair),
        }
        self._jobs = [(c, c.submit(self.folder)) for c in cases]

    def disturb(self) -> None:
        """Once all hold that are to: preempt two nodes, and do to each job what its case says."""
        for job in self._undisturbed.values():
            assert job.end() == ("COMPLETED", 0), job.output
        for case, job in self._jobs:
            if case.waits:
                for training in case.trainings or (case.slug,):
                    job.wait(1, case.ranks, training)
        folder = self.folder.folder
        preempt(self.cluster, folder, f"--nodelist={ALONE}", "--partition=alone")
        preempt(self.cluster, folder, f"--nodelist={PAIR}", "--nodes=2", "--partition=pair")
        for case, job in self._jobs:
            case.act(job)

    def row(self, case: Case, job: BatchScript) -> Row:
        """Once it has ended."""
        state, restarts = job.end(600)
        trainings = case.trainings or (case.slug,)
        repeated = sum(job.repeated(one) for one in trainings)
        is_same = None
        if state == "COMPLETED":
            ranks = case.ranks
            is_same = all(
                job.noted("result", rank, one) == self._result(one, ranks)
                for one in trainings
                for rank in range(ranks)
            )
        is_right = (state, restarts) == case.ends and is_same is not False
        is_right &= repeated == case.repeats
        is_right |= case.ends is None
        return Row(case.name, state, restarts, repeated, is_same, is_right, job.output)

    def _result(self, training: str, ranks: int) -> list[str]:
        if training.startswith("forge-exec"):
            return [str(STEPS)]
        if training.startswith(("local-sweep", "array-in-one-second")):
            return self._swept(int(training[-1]))
        return self._undisturbed[ranks].noted("result")

    def _swept(self, seed: int) -> list[str]:
        """What an undisturbed run with this seed ends with."""
        folder = self.folder.folder
        name = f"undisturbed-seed-{seed}"
        if not (folder / name).exists():
            outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
            command = [sys.executable, "train.py", name, f"seed={seed}", "holds=none"]
            subprocess.run(command, cwd=folder, env=outer, check=True, capture_output=True)
        return (folder / name / "result.0").read_text().split()

    def rows(self) -> list[Row]:
        return [self.row(case, job) for case, job in self._jobs]


def main(words: list[str]) -> int:
    """The table of the cases with these words, or of all; 1 if one is not as it should be."""
    cases = [one for one in CASES if not words or any(word in one.name for word in words)]
    if problem := missing():
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="forge-scripts-") as folder:
        cluster = Cluster(Path(folder) / "slurm", *SETTINGS, nodes=NODES)
        try:
            (Path(folder) / "jobs").mkdir()
            scripts = Scripts(cluster, Path(folder) / "jobs", cases)
            scripts.disturb()
            rows = scripts.rows()
        finally:
            cluster.stop()
    print(f"{'case':38} {'state':10} {'restarts':>8} {'repeated':>8}  final weights")
    for row in rows:
        print(row)
    for row in rows:
        if not row.is_right:
            print(f"\n== {row.case}\n{row.output}")
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
