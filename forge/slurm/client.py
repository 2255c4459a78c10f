"""Slurm's commands: questions about a job, and requests. No other module calls them.

A preempted job and a cancelled job get the same signals, SIGCONT and SIGTERM, so forge asks the
controller why. Standard library only: this runs in the batch script, outside containers.
One module, since all commands share their environment, timeouts, retries and errors.
Source: scontrol(1); the table of `why` was measured on Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge import messages
from forge.errors import NoAnswer, NoSuchJob, NotRequeueable, SlurmRefused
from forge.process import processes
from forge.slurm.job_info import STATES, JobInfo, Stage, Why, cause_of, is_held, stage_of

_CALL_S = 10.0
"""Timeout for one command; a busy controller answers within seconds."""
_SUBMIT_S = 300.0
"""sbatch itself gives up after 120 s if the queue is full, later if the controller is silent."""
_NAME_S = 2.0
_FIRST_PAUSE_S = 0.2


def own_job(environment: Mapping[str, str]) -> str:
    """The name of this process's job for scontrol.

    In every array, one task's SLURM_JOB_ID is the number of the array: with this number, scontrol
    would act on all tasks.
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def show(job: str, within_s: float) -> JobInfo:
    """Ask the controller about a job, and retry while the controller is too busy to answer.

    Args:
        job: The job's name, as from `own_job`.
        within_s: Timeout in seconds.
    Raises:
        NoAnswer: If the controller did not answer within the timeout.
        NoSuchJob: If the controller does not know the job.
    """
    return JobInfo.parse(_scontrol(["--oneliner", "show", "job", job], within_s))


def requeue(job: str, within_s: float) -> None:
    """Requeue the job, which ends now. Raises as `show` does, and NotRequeueable.

    A job that is pending already stays so: Slurm or a person has requeued it before.
    """
    said = _scontrol(["requeue", job], within_s, settled=("pending execution", *_NEVER))
    if any(words in said for words in _NEVER):
        raise NotRequeueable(said)


_NEVER = ("presently disabled", "denied", "already completing or completed")


def delay(job: str, seconds: float, within_s: float) -> None:
    """Keep a job that was just requeued in the queue for a while. Raises as `show` does."""
    _scontrol(["update", f"JobId={job}", f"StartTime=now+{math.ceil(seconds)}"], within_s)


def requeues_preempted(partition: str, within_s: float) -> bool:
    """Whether Slurm itself requeues the jobs that it preempts in this partition.

    False also if this depends on the quality of service. Raises as `show` does.
    """
    if re.search(r"PreemptType\s*=.*qos", _scontrol(["show", "config"], within_s)):
        return False
    shown = _scontrol(["--oneliner", "show", "partition", partition], within_s)
    return re.search(r"PreemptMode=\S*REQUEUE", shown) is not None


def exclude(job: str, nodes: Sequence[str], within_s: float) -> None:
    """Set the ExcNodeList of a pending job to these nodes. Raises as `show` does."""
    _scontrol(["update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"], within_s)


def hostnames(nodes: str, within_s: float) -> list[str]:
    """The names in `n[1-2],n5`. Raises SlurmRefused."""
    if "[" not in nodes:
        return [name for name in nodes.split(",") if name]
    return _ask("scontrol", "show", "hostnames", nodes, within_s=within_s).split()


def nodes_for(info: JobInfo, within_s: float) -> dict[str, bool]:
    """The nodes of a job's partitions, and whether the job could start there, now or later.

    Simple features and generic resources are compared; complex ones count as a match.
    Source: sinfo(1), "NODE STATE CODES". Raises SlurmRefused.
    """
    form = ["--noheader", "--Node", "--format=%N|%T|%f|%G"]
    answer = _ask("sinfo", *form, f"--partition={info.partition}", within_s=within_s)
    found = {}
    for line in answer.splitlines():
        name, state, features, gres = line.strip().split("|", 3)
        has_gres = info.gres <= set(re.findall(r"(\w+):", gres))
        is_up = "*" not in state and not state.startswith(_GONE)
        found[name] = is_up and has_gres and _has_features(features, info.features)
    return found


_GONE = ("down", "drain", "fail", "error", "unk", "inval", "future", "perfctrs")
"""Beginnings of the node states in which a node takes no jobs until an administrator acts."""


def _has_features(features: str, wanted: str) -> bool:
    """Whether a node has the features `a&b|c`; a form with counts or brackets is not compared."""
    if not re.fullmatch(r"[\w.:=-]+([&,|][\w.:=-]+)*", wanted):
        return True
    has = set(features.split(","))
    return any(has.issuperset(re.split("[&,]", one)) for one in wanted.split("|"))


def lost_nodes(nodes: str, within_s: float) -> list[str]:
    """Nodes of `n[1-2]` that are down or do not answer the controller. Raises as `show` does."""
    shown = _scontrol(["--oneliner", "show", "node", nodes], within_s)
    found = re.findall(r"^NodeName=(\S+).*? State=(\S+)", shown, re.MULTILINE)
    return [name for name, state in found if re.search(r"\bDOWN|NOT_RESPONDING|\*", state)]


def end_step(job: str, number: int, within_s: float) -> None:
    """Kill a step and wait until all of its processes have ended, if the step exists.

    `scancel` gets the step's number: with the job's number it would also cancel a pending job.

    Raises:
        NoAnswer: If the step does not end, or the controller does not answer.
    """
    deadline = time.monotonic() + within_s
    try:
        signal_step(job, number, "KILL", within_s)
        while f"{job}.{number}" in steps(job, within_s):
            if time.monotonic() > deadline:
                raise NoAnswer(f"the Slurm step {job}.{number} does not end")
            time.sleep(_FIRST_PAUSE_S)  # Slurm does not notify
    except SlurmRefused as error:
        raise NoAnswer(str(error)) from error


def signal_step(job: str, number: int, name: str, within_s: float) -> bool:
    """Signal every task of a step; False if there is no such step.

    Raises:
        NoAnswer: If the controller refuses, or does not answer.
    """
    step = f"{job}.{number}"
    try:
        is_there = step in steps(job, within_s)
        if is_there:
            _ask("scancel", f"--signal={name}", step, within_s=within_s)
        return is_there
    except SlurmRefused as error:
        raise NoAnswer(str(error)) from error


def steps(job: str, within_s: float) -> list[str]:
    """The running steps of a job, `<job>.<number>`. Raises SlurmRefused."""
    form = ["--noheader", "--steps", f"--jobs={job}", "--format=%i"]
    try:
        with processes.block_signals():
            return _ask("squeue", *form, within_s=within_s).split()
    except SlurmRefused as error:
        if "Invalid job id" in str(error):
            return []  # the job is gone, and its steps with it
        raise


def srun(options: list[str], output: str, command: list[str]) -> list[str]:
    """The command that starts a step; the output of its tasks is appended to a file.

    Args:
        options: More options for srun.
        output: Path of that file.
        command: The command that every task runs.
    """
    path = output.replace("%", "%%")
    fixed = ["srun", "--unbuffered", f"--output={path}", "--open-mode=append", "--input=none"]
    fixed.append("--export=ALL")  # else srun would apply sbatch's --export
    # If a task fails, the other tasks still have to save: they exit, or the wrapper kills them.
    return [*fixed, "--kill-on-bad-exit=0", "--wait=0", *options, *command]


def why(info: JobInfo, own_restarts: int, within_s: float = _CALL_S) -> Why:
    """Why the job is being stopped. Raises as `show` does, since it can ask the controller again.

    Args:
        info: The controller's current answer.
        own_restarts: SLURM_RESTART_COUNT of this start.
        within_s: Timeout in seconds for the second question.
    """
    if info.restarts > own_restarts:
        return Why.requeued  # GraceTime=0: Slurm requeued it without a notice
    if info.has_ended:
        cause = cause_of(info.state, info.reason)
        if cause not in (Why.unknown, Why.cancelled):
            return cause
        if info.is_script_killed and info.script_signal in (signal.SIGUSR1, signal.SIGUSR2):
            return Why.time_limit  # announced to the batch script alone (`--signal=B:USR1@60`)
        # A cancel in the very second of a preemption's notice looks like PreemptMode=CANCEL; but
        # if Slurm would have requeued the job, it was a cancel that ended it.
        if not info.is_preempted_at_end:
            return Why.cancelled
        is_brought_back = info.is_requeueable and requeues_preempted(info.partition, within_s)
        return Why.cancelled if is_brought_back else Why.preempted
    return Why.preempted if info.preempt_time is not None else Why.unknown


_OURS = ("SIGNAL", "REQUEUE", "NO_REQUEUE", "ARRAY_INX", "OUTPUT", "ERROR", "OPEN_MODE", "WAIT")
"""Variables that sbatch would read as options, and that the batch script sets itself."""


# -- the launcher's side ---------------------------------------------------------------------


NO_COMMANDS = (
    "sbatch was not found: no directory of PATH on this machine has Slurm's commands. Submit from"
    " a login node of the cluster (there, perhaps, after `module load slurm`), or run the jobs on"
    " this machine with `hydra/launcher=local`."
)
"""Why nothing can be submitted from here."""


def can_submit() -> bool:
    """Whether this machine has sbatch."""
    return shutil.which("sbatch") is not None


def submit(script: Path) -> str:
    """Submit a batch script; returns the number of the job, or of the array.

    If the queue is full, sbatch itself retries for two minutes.

    Args:
        script: Path of the batch script.
    Raises:
        SlurmRefused: If sbatch refuses the script, with sbatch's message.
    """
    # If this process runs inside a job, that job's variables must not reach the new one.
    inner = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "FORGE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(inner) or k == "SLURM_CONF"}
    for name in _OURS:  # SBATCH_ACCOUNT and the like are the user's own defaults
        kept.pop(f"SBATCH_{name}", None)
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = _run(command, _SUBMIT_S, kept)
    except FileNotFoundError as error:
        raise SlurmRefused(NO_COMMANDS) from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise SlurmRefused(f"{said}\nsbatch: {error}".strip()) from error
    except OSError as error:
        raise SlurmRefused(f"sbatch: {error}") from error
    if done.returncode != 0:
        raise SlurmRefused(done.stderr.strip() or f"sbatch: exit code {done.returncode}")
    return done.stdout.strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a pending or running job.

    Raises:
        SlurmRefused: If Slurm does not answer, or does not know the job any more.
    """
    _ask("scancel", job)


def rename(job: str, name: str) -> None:
    """Name a job in the queue, if the controller answers at once: it is only for people."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        _run(["scontrol", "update", f"JobId={job}", f"JobName={name}"], _NAME_S)


@dataclass(frozen=True)
class Queued:
    """A job as squeue shows it."""

    state: str
    """A key of `STATES`, or a state that forge does not know."""
    reason: str
    script: str = ""
    """Path of its batch script."""

    @property
    def is_alive(self) -> bool:
        """Whether the job is pending, running, or between these."""
        return stage_of(self.state) is not Stage.ended

    @property
    def waits_for(self) -> str:
        """Slurm's reason; the state, if only that says that the job is held."""
        return self.state if is_held(self.state) and not is_held(self.reason) else self.reason


_unknown_states: set[str] = set()
"""Unknown states that a message has named."""
_JOB_LINE = re.compile(r"(\d+(?:_\S+?)?)\|([A-Z_]+)\|([^|]*)\|(.*)")


def queue(within_s: float = 6 * _CALL_S) -> dict[str, Queued]:
    """All of this user's jobs that the controller remembers, by number or `<array>_<task>`.

    Args:
        within_s: Timeout in seconds.
    Raises:
        SlurmRefused: If squeue does not answer.
    """
    user = f"--user={os.getuid()}"
    found = {}
    for line in _ask(
        "squeue",
        user,
        "--noheader",
        "--array",
        "--states=all",
        "--format=%i|%T|%r|%o",
        within_s=within_s,
    ).splitlines():
        # %o is the script with its arguments; those of other jobs can contain newlines, anything.
        if match := _JOB_LINE.fullmatch(line.strip()):
            name, state, reason, script = match.groups()
            found[name] = Queued(state, reason, script)
            if state not in STATES and state not in _unknown_states:
                _unknown_states.add(state)
                messages.warn(
                    f"squeue shows job {name} as {state}, a state that forge does not know: such"
                    " jobs count as alive as long as squeue lists them."
                )
    return found


def settings() -> dict[str, str]:
    """The cluster's configuration. Raises SlurmRefused if the controller does not answer."""
    lines = _ask("scontrol", "show", "config", within_s=2 * _CALL_S).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def partitions() -> dict[str, dict[str, str]]:
    """Each partition's fields, by its name. Raises SlurmRefused if there is no answer."""
    found = {}
    lines = _ask("scontrol", "--oneliner", "show", "partition", within_s=2 * _CALL_S)
    for line in lines.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[fields.get("PartitionName", "")] = fields
    return found


def _ask(*command: str, within_s: float = 6 * _CALL_S) -> str:
    try:
        done = _run(command, within_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmRefused(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmRefused(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _run(
    command: Sequence[str], within_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run with English messages, whatever the user's language; output need not be UTF-8."""
    if environment is None:
        environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=within_s,
        env={**environment, "LC_ALL": "C"},
    )


# -- retries ---------------------------------------------------------------------------------


def _scontrol(arguments: list[str], within_s: float, settled: Sequence[str] = ()) -> str:
    """Retry until there is an answer; an error that contains one of `settled` is an answer, too."""
    deadline = time.monotonic() + within_s
    pause_s, said = _FIRST_PAUSE_S, ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with processes.block_signals():  # Slurm signals all processes of the job together
                done = _run(["scontrol", *arguments], min(_CALL_S, left_s))
        except subprocess.TimeoutExpired:
            said = f"no answer within {min(_CALL_S, left_s):.1f} s"
        except OSError as error:
            raise NoAnswer(f"scontrol cannot be started: {error}") from error
        else:
            if done.returncode == 0:
                return done.stdout
            said = (done.stderr or done.stdout).strip()
            if any(words in said for words in settled):
                return said
            if "Invalid job id" in said:
                raise NoSuchJob(said)
        # With jitter: a thousand jobs that are preempted together must not ask together.
        time.sleep(min(pause_s * random.uniform(0.5, 1.5), max(deadline - time.monotonic(), 0)))
        pause_s = min(pause_s * 2, 5.0)
    raise NoAnswer(
        f"scontrol {' '.join(arguments)}: {said or 'not called, since no time was left for it'}"
    )
