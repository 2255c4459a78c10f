"""Is `forge why` right? Jobs with planted causes, and its answers from their directories alone.

    python tests/proofs/planted_causes.py [GROUP…]

Each row is a job that ends, waits or runs on for a cause that was planted: a raised exception, a
memory cgroup that is too small, a full disk, a save longer than the warning, a preemption on a
throwaway Slurm cluster, and so on. `forge why --json` has to name exactly the planted causes, in
order, and its evidence has to have the file, the line or the number. Exits with 1 if one answer is
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from hanging_apps import HangingApp
from harness import Process, until
from planted_jobs import Case, PlantedApp, answers, forge, row
from showcase_jobs import table
from slurm_apps import CONF as CLUSTER_CONF
from slurm_apps import SlurmApp, urgent
from slurm_apps import table as mapping
from started import ended_here
from sweeps import SweptJob

import forge as library
from forge.jobdir.job_state import State

HEAD = ["planted", "causes that forge why names", "its evidence", ""]
CGROUP_BYTES = 1 << 30
STOPS = {"shutdown": {"timeout_s": 1}}
MANY = {"max_failures": 9}
SICK = {"run": ["sh", "-c", "echo planted sickness; exit 1"]}
ENDED = [
    Case("raises", "exception", r"train\.py:\d+ in misbehave: ValueError: planted error"),
    Case("exits", "exit_code", r"exit code 9\b"),
    Case("killed", "killed budget", r"SIGKILL while it was in `step`.*step_10: 7 steps"),
    Case(
        *("over_budget", "killed budget", r"`resilience\.requeue\.max_failures=1`", "killed"),
        {"requeue": {"max_failures": 1}},
    ),
    Case(
        *("saves_nothing", "killed no_progress", r"`resilience\.requeue\.max_no_progress=2`"),
        *("killed_early", {"requeue": {"max_no_progress": 2, **MANY}}),
    ),
    Case(
        *("not_restarted", "killed requeue_disabled", r"`resilience\.requeue\.enabled=true`"),
        *("killed", {"requeue": {"enabled": False, **MANY}}),
    ),
    Case("bad_loss", "halted", r"step 17\b", "nan", {"nan": {"action": "halt"}}),
    Case("config", "config", r"keep_last"),
    Case("slow_step", "stopped_late budget", r"not exited 1 s later: the step", policy=STOPS),
    Case("slow_save", "save_too_long budget", r"warning_s` to at least \d+", policy=STOPS),
    Case(
        *("sick_node", "unhealthy", r"planted sickness", "ends"),
        {"health": {"enabled": True, "commands": {"planted": SICK | {"action": "refuse"}}}},
    ),
    Case(
        *("sick_halts", "unhealthy", r"planted sickness[\s\S]*forge doctor", "ends"),
        {"health": {"enabled": True, "commands": {"planted": SICK | {"action": "halt"}}}},
    ),
    Case(
        *("damages", "checkpoints", r"step_10", ""),
        {"requeue": MANY},
    ),
]
TIMED = [
    Case("waits", "time_limit budget", r"limit of 0:00:30 was near; the job saved at step 18"),
    Case("deaf", "signal_missed budget", r"USR2 did not reach it.*warning of 10 s", "slow_step"),
    Case("save_at_limit", "save_too_long budget", r"warning of 10 s", "slow_save"),
    Case("no_run", "no_run budget", r"no `forge\.Run`"),
]
LIVE = [
    Case("unsaved", "nothing_saved_yet", r"every_s", "holds", more={"at": 5}),
    Case("healthy", "running", r"running at step 22", "holds", more={"at": 22}),
    Case("save_fails", "save_failed", r"at step 10.*planted: no answer"),
    Case("starting", "starting", r"was started .* ago"),
    Case("stands", "hung", r"hangs/\*/summary\.txt", "holds", {"hang": {"timeout_s": 2}}),
    Case("behind", "not_started", r"when another job has ended", "ends"),
]

RANKED = [
    (
        Case("rank_killed", "killed budget", r"\(rank 1\)[\s\S]*output\.log\.1"),
        "if step == 20 and RANK == 1: os.kill(os.getpid(), signal.SIGKILL)",
    ),
    (
        Case("rank_raises", "exception", r"train\.py:\d+ in misbehave: ValueError: of rank 1"),
        "if step == 20 and RANK == 1: raise ValueError('of rank 1')",
    ),
]


class Answers:
    """The rows so far, and whether all are right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[list[str]] = []
        self.num_right = 0

    def add(self, case: Case, found: list[dict]) -> None:
        """Compare the answers about a job with its case."""
        cells, is_right = row(case, found)
        self.rows.append(cells)
        self.num_right += is_right
        print(" | ".join(cells), flush=True)

    @contextlib.contextmanager
    def app(self, name: str, cases: list[Case]) -> Iterator[PlantedApp]:
        """The folder of an app, whose processes end with it."""
        app = PlantedApp(self.folder / name, cases)
        with contextlib.closing(app):
            yield app

    def all_of(self, app: PlantedApp, cases: list[Case]) -> None:
        """The jobs of a sweep that has ended, in the order of the cases."""
        found = answers(app.sweep_dir, *range(len(cases)))
        for number, case in enumerate(cases):
            self.add(case, found[number])


def names(cases: list[Case]) -> str:
    """The override that sweeps over the cases."""
    return f"case={','.join(case.name for case in cases)}"


# -- on this machine -------------------------------------------------------------------------------


def ended(rows: Answers) -> None:
    """Jobs that end by themselves."""
    with rows.app("ended", ENDED) as app:
        app.run(names(ENDED), "hydra.launcher.n_jobs=2")
        assert app.line in str(answers(app.sweep_dir, 0)), app.line
        rows.all_of(app, ENDED)


def edited(rows: Answers) -> None:
    """The first job edits a module of the user's before the second one starts."""
    case = Case("raises", "code_changed", r"since it was submitted: helper\.py")
    with rows.app("edited", [Case("edits", "", ""), case]) as app:
        app.run("case=edits,raises", "hydra.launcher.n_jobs=1")
        rows.add(case, answers(app.sweep_dir, 1)[1])


def memory(rows: Answers) -> None:
    """A memory cgroup of 1 GiB."""
    case = Case("eats", "out_of_memory budget", r"memory ran out, and the kernel killed 1 process")
    with rows.app("memory", [case]) as app, cgroup() as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        subprocess.run(
            ["sh", "-c", enter, "sh", *app.command("case=eats")],
            **{"cwd": app.folder, "capture_output": True, "timeout": 250},
        )
        rows.all_of(app, [case])


@contextlib.contextmanager
def cgroup(num_bytes: int = CGROUP_BYTES) -> Iterator[Path]:
    """A cgroup that has little memory; needs root."""
    root = Path("/sys/fs/cgroup/memory")
    is_v1 = root.is_dir()
    folder = (root if is_v1 else root.parent) / f"forge-{os.getpid()}"
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
        (folder / limit).write_text(str(num_bytes))
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "end of the cgroup's processes")
        folder.rmdir()


def disk(rows: Answers) -> None:
    """A file system of 2 MiB, which a job fills."""
    case = Case("fills", "disk_full budget", r"disk_full, code 71[\s\S]*keep_last")
    mount = 'mount -t tmpfs -o size=2m tmpfs "$1"; from=$1; to=$2; shift 2'
    empty = 'rm "$from/ballast"; cp -r "$from/sweep" "$to"'
    with rows.app("disk", [case]) as app:
        small, kept = app.folder / "disk", app.sweep_dir
        small.mkdir()
        app.sweep_dir = small / "sweep"
        command = ["sh", "-c", f'{mount}; "$@"; {empty}', "sh", small, kept]
        subprocess.run(
            ["unshare", "-m", *command, *app.command("case=fills")],
            **{"cwd": app.folder, "capture_output": True, "timeout": 250},
        )
        app.sweep_dir = kept
        rows.all_of(app, [case])


def timed(rows: Answers) -> None:
    """A time limit of 30 s, and a warning 10 s before it."""
    cases = [
        Case(c.name, c.causes, c.evidence, c.mode, more={"signal": False, **c.more}) for c in TIMED
    ]
    with rows.app("timed", cases) as app:
        options = ("hydra.launcher.n_jobs=4", "hydra.launcher.timeout_min=0.5")
        policy = ("resilience.signal.warning_s=10", "resilience.shutdown.timeout_s=9")
        app.run(names(cases), *options, *policy)
        rows.all_of(app, cases)


def swallowed(rows: Answers) -> None:
    """A shell above the training, as in a container, that keeps the signal for itself."""
    case = Case("shell", "signal_missed budget", r"`exec`")
    folder = rows.folder / "swallowed"
    folder.mkdir()
    shell = "trap '' USR2 TERM; sleep 600; true"
    command = [sys.executable, "-m", "forge", "exec", "hydra.launcher.timeout_min=0.1"]
    command += ["resilience.signal.warning_s=3", "resilience.shutdown.timeout_s=2"]
    command += ["resilience.requeue.max_timeouts=0", "hydra.sweep.dir=sweep"]
    done = subprocess.run(
        [*command, "--", "sh", "-c", shell], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert (folder / "sweep").exists(), done.stdout + done.stderr
    rows.add(case, answers(folder / "sweep", 0)[0])


def ranks(rows: Answers) -> None:
    """A lock that is never released; a rank that leaves the others."""
    hung = Case("lock", "hung", r"train\.py:\d+ in stand_lock")
    app = HangingApp(rows.folder / "hung")
    app.run("hang.where=step", "resilience.hang.action=halt")
    rows.add(hung, answers(app.sweep_dir, 0)[0])
    for case, body in RANKED:
        app = HangingApp(rows.folder / case.name, 2, body)
        app.run("resilience.hang.action=ignore", "resilience.requeue.max_failures=0")
        rows.add(case, answers(app.sweep_dir, 0)[0])


def in_use(rows: Answers) -> None:
    """Another run, without a launcher, trains in the directory of the job's checkpoints."""
    other = Case("holder", "", "", "holds")
    case = Case("second", "directory_in_use", r"pid \d+ on ", "ends")
    with rows.app("in_use", [other, case]) as app:
        shared = f"resilience.checkpoint.dir={app.folder}/shared"
        single = [sys.executable, "train.py", "hydra.run.dir=single", "case=holder", shared]
        run = Process(single, app.folder / "single.txt", app.folder)
        SweptJob(app.folder / "single").wait_for_step(17)
        app.run("case=second", shared)
        run.signal(signal.SIGTERM)
        run.wait()
        rows.all_of(app, [case])


def live(rows: Answers) -> None:
    """Jobs that are looked at while they run, and then ended by people and with the launcher."""
    with rows.app("live", LIVE) as app:
        sweep = app.start(names(LIVE), "hydra.launcher.n_jobs=5")
        numbers = {case.name: number for number, case in enumerate(LIVE)}
        for name, step in (("unsaved", 5), ("healthy", 22), ("save_fails", 12), ("stands", 17)):
            app.job(numbers[name]).wait_for_step(step)

        def are_seen() -> bool:
            jobs = library.sweep(app.sweep_dir).jobs
            return bool(jobs[numbers["stands"]].hang) and jobs[3].state is State.starting

        until(are_seen, "the hang")
        rows.all_of(app, LIVE)
        forge("cancel", app.sweep_dir, numbers["healthy"], numbers["behind"], cwd=app.folder)
        until(lambda: state(app, numbers["healthy"]) is State.stopped, "end of the cancelled job")
        os.kill(app.job(numbers["save_fails"]).wrapper, signal.SIGINT)
        until(lambda: state(app, numbers["save_fails"]) is State.stopped, "end after SIGINT")
        sweep.signal(signal.SIGSTOP)  # so that it starts no job again
        doomed = app.job(numbers["stands"])
        for pid in [doomed.wrapper, *doomed.marked]:
            os.kill(pid, signal.SIGKILL)
        sweep.signal(signal.SIGKILL)
        sweep.wait()
        until(lambda: state(app, numbers["unsaved"]) is State.stopped, "end of the orphan")
        found = answers(app.sweep_dir, *range(len(LIVE)))
        for case in (
            Case("healthy", "cancelled", r"cancelled by .*step_23"),
            Case("behind", "cancelled", r"before it had run"),
            Case("save_fails", "interrupted save_failed", r"Ctrl\+C"),
            Case("stands", "lost", r"/lock, and its last state is `running`"),
            Case("unsaved", "orphaned", r"its last checkpoint is step_6"),
        ):
            rows.add(case, found[numbers[case.name]])


def state(app: PlantedApp, number: int) -> State:
    """The state of a job as `forge status` has it."""
    return library.sweep(app.sweep_dir).jobs[number].state


# -- on a cluster ----------------------------------------------------------------------------------

KINDS = {
    "preempted": Case("preempted", "preempted", r"preempted the job on n1; it saved at step 13"),
    "fixed": Case("fixed", "preempted requeue_disabled", r"requeue\.enabled=true"),
    "told": Case("told", "signalled", r"SIGTERM to the job on n2; it saved at step 13"),
    "asked": Case("asked", "requested", r"A requeue was requested on n2"),
    "gone": Case("gone", "cancelled", r"`forge resume [^`]*\d` starts it"),
    "stuck": Case("stuck", "pending", r"does not end by itself[\s\S]*squeue, job \d+"),
    "node": Case("node", "node_failed", r"A node of the job failed on n4"),
}
AGAIN = """
    if RESTARTS and step == 20:
        Path(cfg.gates, f"{cfg.kind} again").touch()
        while not stopping.is_stopping():
            time.sleep(0.02)
"""
"""Each job that starts again waits until it has been looked at."""
NODES = mapping(told="n2", asked="n2", gone="n2", stuck="n3", node="n4")


def slurm(rows: Answers) -> None:
    """What only a cluster does to a job."""
    cluster = Cluster(rows.folder / "slurm", nodes=4)
    enabled = 'requeue: {enabled: "${oc.select:enabled.${kind},true}", '
    conf = CLUSTER_CONF.replace("requeue: {", enabled) + "    enabled: {}\n"
    try:
        with contextlib.closing(
            SlurmApp(cluster, rows.folder / "cluster", conf=conf, misbehave=AGAIN)
        ) as app:
            on_cluster(rows, cluster, app)
    finally:
        cluster.stop()


def on_cluster(rows: Answers, cluster: Cluster, app: SlurmApp) -> None:
    """One sweep, each job of which is disturbed in its own way."""
    set_state = ("scontrol", "update", "Reason=planted")
    cluster.run(*set_state, "State=DRAIN", "NodeName=n3")
    holds = mapping(**dict.fromkeys(KINDS, 1))
    own = (f"+holds={holds}", f"+nodes={NODES}", "+enabled={fixed:false}")
    sweep = app.start(f"kind={','.join(KINDS)}", *own)
    for kind in KINDS:
        if kind != "stuck":
            app.wait_for_gate(f"{kind} 0", sweep)
    jobs = app.jobs()
    jobs["told"].scancel("--signal=TERM")
    jobs["asked"].scancel("--signal=USR1")
    jobs["gone"].scancel()
    cluster.lose("n4")
    cluster.run(*set_state, "State=DOWN", "NodeName=n4")
    cluster.bring_back("n4")
    urgent(cluster, app.folder, "--nodelist=n1")
    for kind in ("preempted", "told", "asked", "node"):
        app.wait_for_gate(f"{kind} again", sweep)
    final = ("fixed", "gone")
    wait_for(
        lambda: all(jobs[kind].state["state"] in ("failed", "stopped") for kind in final),
        "end of the jobs that do not start again",
    )
    found = answers(app.sweep_dir, *range(len(KINDS)), env=app.environment)
    for number, case in enumerate(KINDS.values()):
        rows.add(case, found[number])


GROUPS: dict[str, Callable[[Answers], None]] = {
    one.__name__: one
    for one in (ended, edited, memory, disk, timed, swallowed, ranks, in_use, live, slurm)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    options = parser.parse_args()
    if problem := missing():
        print(problem)
        return 2
    with tempfile.TemporaryDirectory(prefix="forge-causes-") as folder, ended_here():
        rows = Answers(Path(folder))
        for name in options.groups or GROUPS:
            GROUPS[name](rows)
        print(f"\n{table(rows.rows, HEAD)}\n\n{rows.num_right} of {len(rows.rows)}")
        return int(rows.num_right < len(rows.rows))


if __name__ == "__main__":
    sys.exit(main())
