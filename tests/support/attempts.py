"""What a colleague can try who may write to a shared directory, and what forge says to it.

Each attack has three acts: the victim has used forge there (or not), the attacker prepares
something, the victim uses forge again. What is the victim's own must be as it was.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness import until
from plans import planned
from two_users import ATTACKER, GROUP, LIMIT_S, VICTIM, Place, Said, as_user

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.errors import Reason
from forge.job import local
from forge.jobdir import verdict
from forge.jobdir.job_files import (
    LOCK,
    OUTPUT,
    PLAN,
    RESULT,
    STATE,
    TASK,
    forge_dir,
    write_atomically,
)
from forge.jobdir.ledger_writer import Ledger
from forge.jobdir.plan import JobPlan, RequeueLimits
from forge.jobdir.verdict import Verdict
from forge.launch import results, task
from forge.launch.local.queue import Queue, QueuedJob
from forge.launch.local.resources import Slots
from forge.launch.progress.display import Display
from forge.launch.sweep import SweepDir
from forge.shutdown.signal_handler import ShutdownHandler
from forge.slurm import submitted
from forge.slurm.submitted import Submitted, submissions


@dataclass(frozen=True)
class Attack:
    """One of them."""

    name: str
    attack: Callable[[Place], object]
    """The attack, which runs in a process of the attacker."""
    use: Callable[[Place], object]
    """The victim's use of the attacked files, after the attack."""
    complaint: str
    """Words of the message that the victim or the attacker gets."""
    before: Callable[[Place], object] = lambda place: None
    """The victim's preparation, before the attack."""

    def run(self, place: Place) -> tuple[Said, Said]:
        """Run all three, and return the results of the attacker and of the victim."""
        begun = as_user(VICTIM, lambda: self.before(place))
        assert begun.code == 0, begun.text
        tried = as_user(ATTACKER, lambda: self.attack(place))
        return tried, as_user(VICTIM, lambda: self.use(place))


# -- what the victim does ----------------------------------------------------------------------


def plan(command: list[str]) -> JobPlan:
    limits = RequeueLimits(enabled=False, max_failures=0, max_no_progress=0)
    return planned(
        command=command,
        token="token",
        actions={},
        timeout_s=0.0,
        time_limit_s=None,
        warning_s=0.0,
        signal="USR1",
        requeue=limits,
    )


def packed(place: Place) -> Path:
    return submissions(place.shared / "sweep") / "1.bundle"


def queue(place: Place) -> None:
    """What the launcher writes for Slurm."""
    config = pickle.dumps(print)
    submitted.write_bundle(packed(place), config, [(place.job, plan(["/bin/true"]), config)], {})


def submit(place: Place) -> None:
    """And what the job's wrapper takes out of it, and a task leaves."""
    queue(place)
    submitted.unpack(packed(place), 0)
    write_atomically(forge_dir(place.job) / RESULT, pickle.dumps((None, "")))


def by_an_earlier_version(before: Callable[[Place], object]) -> Callable[[Place], None]:
    """The same, with files and directories that the group can write."""

    def act(place: Place) -> None:
        before(place)
        for path in (place.shared / "sweep", *(place.shared / "sweep").rglob("*")):
            path.chmod(0o2775 if path.is_dir() else 0o664)

    return act


def start(place: Place) -> int:
    return local.run(place.job)


def start_by_slurm(place: Place) -> int:
    """As the batch script does, but for srun."""
    return task.main(submitted.unpack(packed(place), 0))


def run_task(place: Place) -> int:
    return task.main(place.job)


def collect(place: Place) -> object:
    found = results.stored(place.job, 0)
    return found and found._return_value


def begin_sweep(place: Place) -> object:
    return SweepDir(place.shared / "sweep", set()).find(["lr=1"])


def resubmit(place: Place) -> object:
    return Submitted(place.shared / "sweep").ids


def begin_ledger(place: Place) -> None:
    Ledger(place.job).write("start", step=0)


def write_verdict(place: Place) -> None:
    verdict.write(place.job, Verdict(Reason.finished, "finished", 0, 1))


def write_state(place: Place) -> None:
    write_atomically(forge_dir(place.job) / STATE, "{}", is_synced=True)


def open_store(place: Place) -> Store:
    return Store(place.job / "checkpoints", CheckpointConfig())


def save(place: Place) -> None:
    store = open_store(place)
    told = place.shared / "name"
    write_atomically(told, str(store._workspace._path))
    until(lambda: store._workspace._path.is_symlink(), "link")
    store.commit(store.snapshot(5, {"x": 1}, copy=False))


def dump_stacks(place: Place) -> None:
    ShutdownHandler(1.0, {}, forge_dir(place.job))._dump_stacks()


def queue_job(place: Place) -> str:
    job = QueuedJob(0, "lr=1", place.job)
    Queue([job], Slots([[]], False), Display(mode="none")).start(job)
    return job.because


# -- what the attacker does --------------------------------------------------------------------


class Payload:
    """Runs as whoever unpickles it."""

    def __init__(self, trophy: Path) -> None:
        self._trophy = trophy

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self._trophy}",)


def payload(place: Place) -> bytes:
    return pickle.dumps(Payload(place.trophy))


def harmful_plan(place: Place) -> str:
    return json.dumps(plan(["/bin/sh", "-c", f"touch {place.trophy}"]).to_json())


def own_job(place: Place) -> Path:
    """A `.forge` of the attacker's own, open to all, in the place of the victim's."""
    os.umask(0)
    folder = forge_dir(place.job)
    if folder.exists():
        folder.rename(place.job / "before")
    folder.mkdir(parents=True)
    return folder


def exchange(place: Place) -> None:
    folder = own_job(place)
    (folder / PLAN).write_text(harmful_plan(place))
    (folder / TASK).write_bytes(payload(place))
    (folder / RESULT).write_bytes(payload(place))


def link(name: str, target: str = "precious.txt") -> Callable[[Place], None]:
    """A link below the job's directory to what is the victim's."""

    def attack(place: Place) -> None:
        os.umask(0)
        path = place.job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(place.home / target)

    return attack


def links(name: str) -> Callable[[Place], None]:
    """Links under every name that a process that starts soon could choose by its number."""

    def attack(place: Place) -> None:
        folder = own_job(place)
        last = int(Path("/proc/sys/kernel/pid_max").read_text())
        for count in range(3000):  # after the last number the kernel begins again above 300
            number = 300 + (os.getpid() - 300 + count) % (last - 300)
            (folder / name.format(number)).symlink_to(place.precious)

    return attack


def pipe(name: str) -> Callable[[Place], None]:
    """A pipe that nobody writes to, where a file is expected."""

    def attack(place: Place) -> None:
        os.umask(0)
        path = place.job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)

    return attack


def write(path: Callable[[Place], Path], content: Callable[[Place], str | bytes]):
    """Into a file of the victim's, as far as that is allowed."""

    def attack(place: Place) -> None:
        data = content(place)
        path(place).write_bytes(data if isinstance(data, bytes) else data.encode())

    return attack


def sweep_of_links(place: Place) -> None:
    os.umask(0)
    folder = forge_dir(place.shared / "sweep")
    folder.mkdir(parents=True)
    (folder / LOCK).symlink_to(place.precious)


def sweep_that_leads_out(place: Place) -> None:
    os.umask(0)
    folder = forge_dir(place.shared / "sweep")
    folder.mkdir(parents=True)
    entry = {"number": 0, "subdir": "../../home", "overrides": ["lr=1"]}
    (folder / "jobs.jsonl").write_text(json.dumps(entry) + "\n")


def list_of_submissions(place: Place) -> None:
    os.umask(0)
    folder = submissions(place.shared / "sweep")
    folder.mkdir(parents=True)
    lines = [{"script": "x", "numbers": [0], "composed": ["y"]}, {"script": "x", "id": "666"}]
    (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))


def harmful_bundle(place: Place) -> bytes:
    made = replace(plan(["/bin/true"]), launch="2")
    common, data = payload(place), json.dumps(made.to_json()).encode()
    jobs = [[str(place.job), len(common), len(data), 0]]
    head = {"common": len(common), "jobs": jobs, "code": {}}
    return json.dumps(head).encode() + b"\n" + common + data


def exchanged_bundle(place: Place) -> None:
    os.umask(0o022)
    folder = packed(place).parent
    folder.parent.rename(place.shared / "sweep" / "before")
    folder.mkdir(parents=True)
    packed(place).with_name("2.bundle").write_bytes(harmful_bundle(place))
    packed(place).with_name("2.bundle").rename(packed(place))


def link_for_work(place: Place) -> None:
    """As soon as a store is open, its work directory's name is known: a link there leads out."""
    if os.fork():
        return
    signal.alarm(LIMIT_S)
    os.closerange(0, 3)  # nobody waits for what this one prints
    told = place.shared / "name"
    until(told.exists, "name")
    Path(told.read_text()).symlink_to(place.home / "other")
    os._exit(0)


def job_file(name: str) -> Callable[[Place], Path]:
    return lambda place: forge_dir(place.job) / name


NOT_YOURS = f"belongs to .*uid {ATTACKER}.*, not to .*uid {VICTIM}"
OF_GROUP = rf"can be written by the group .*gid {GROUP}\b.*chmod -R go-w"
DENIED = "Permission denied"
LINK = "is a link"

ATTACKS = [
    Attack("task.pkl is written to", write(job_file(TASK), payload), run_task, DENIED, submit),
    Attack("result.pkl is written to", write(job_file(RESULT), payload), collect, DENIED, submit),
    Attack("plan.json is written to", write(job_file(PLAN), harmful_plan), start, DENIED, submit),
    Attack(
        "the bundle is written to", write(packed, harmful_bundle), start_by_slurm, DENIED, queue
    ),
]
ATTACKS += [
    Attack(
        f"{one.name}, an earlier version's",
        one.attack,
        one.use,
        OF_GROUP,
        by_an_earlier_version(one.before),
    )
    for one in ATTACKS
]
ATTACKS += [
    Attack(".forge is exchanged, task.pkl runs", exchange, run_task, NOT_YOURS, submit),
    Attack(".forge is exchanged, result.pkl is read", exchange, collect, NOT_YOURS, submit),
    Attack(".forge is exchanged, the plan runs", exchange, start, NOT_YOURS, submit),
    Attack(
        ".forge is exchanged, the bundle runs", exchanged_bundle, start_by_slurm, NOT_YOURS, queue
    ),
    Attack("a job is there before the first start", exchange, start, NOT_YOURS),
    Attack("the sweep's lock is a link", sweep_of_links, begin_sweep, NOT_YOURS),
    Attack("the sweep's list leads out of it", sweep_that_leads_out, begin_sweep, NOT_YOURS),
    Attack("a list of submitted jobs", list_of_submissions, resubmit, NOT_YOURS),
    Attack("output.log is a link, wrapper", link(OUTPUT), start, LINK, submit),
    Attack("output.log is a link, launcher", link(OUTPUT), queue_job, LINK, submit),
    Attack("output.log is a pipe", pipe(OUTPUT), start, "is a pipe|not a regular file", submit),
    Attack("progress is a link", link(".forge/progress"), begin_ledger, LINK),
    Attack("progress is a pipe", pipe(".forge/progress"), begin_ledger, "not a regular file"),
    Attack("the ledger is a link", link(".forge/ledger", "other"), begin_ledger, LINK),
    Attack(".forge is a link", link(".forge", "other"), write_state, LINK),
    Attack("the verdict's .forge is a link", link(".forge", "other"), write_verdict, LINK),
    Attack("plan.json is a pipe", pipe(f".forge/{PLAN}"), start, NOT_YOURS),
    Attack("links at temporary names", links(".state.json.tmp-{}"), write_state, "^$"),
    Attack("links where stacks are dumped", links("stacks_{}.txt"), dump_stacks, LINK),
    Attack("the checkpoints' lock is a link", link("checkpoints/.lock"), open_store, LINK),
    Attack(
        "the fencing token is a pipe", pipe("checkpoints/.fence.json"), open_store, "regular file"
    ),
    Attack("the work directory is a link", link_for_work, save, LINK),
]
