"""Batch scripts: one for all jobs with the same sbatch options, as a job array.

The header is submitit's, with the same keys. Then come the user's `setup`, the job's wrapper, and
`teardown`; the exit code of the job is the wrapper's, whatever `teardown` does. `dry_run` shows
the scripts, and when each signal would come.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import submitit

from forge.compat import of_submitit
from forge.filesystem.files import write_atomically
from forge.launch.planning import ROOT, ComposedJob
from forge.launch.slurm.cluster import Cluster
from forge.launch.slurm.slurm_options import SlurmOptions
from forge.messages import escape
from forge.slurm import client
from forge.slurm.submitted import Submitted

_OURS = (
    *("_target_", "submitit_folder", "timeout_min", "signal_delay_s", "max_num_timeout"),
    *("additional_parameters", "srun_args", "python", "use_srun", "teardown"),
    *("wait", "dry_run", "snapshot", "progress"),
)
"""Options that are passed to submitit in another way, or not at all."""
_LONGEST_NAME = 100
_ODD = re.compile(r"[^\w.,:=+/@-]", re.ASCII)
"""Characters such as quotes, which sbatch does not read as a shell does."""
_LOGS = "/folder-of-the-logs"
"""Placeholder while submitit writes the header, since submitit would expand a % in our paths."""
_WRAPPER = f"import sys; sys.path.append({ROOT!r}); from forge.slurm.wrapper import main;"
_WRAPPER += " sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class OptionGroup:
    """The submission options that a set of jobs has in common."""

    options: SlurmOptions
    signal: str | None
    """Signal that announces the time limit; None: nothing handles it."""
    warning_s: float
    is_requeued: bool | None
    """Whether the policy can restart the jobs; None: no policy, the site's default applies."""
    name: str = field(default="", repr=False)
    """The job's own name, which makes no other group: an array has `options.name`."""


@dataclass
class Batch:
    """One call of sbatch; `dry_run` prints the same object that is submitted."""

    group: OptionGroup
    members: list[int]
    """Indices of the jobs, in the order of the array."""
    folder: Path
    bundle: Path
    """The file from which the wrapper reads the jobs."""
    script: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.script = _script(self)

    @property
    def path(self) -> Path:
        """The file of the batch script."""
        return self.bundle.with_suffix(".sh")

    def submit(self, submitted: Submitted, numbers: list[int], composed: list[str]) -> None:
        """Write the batch script, and call sbatch; recorded before and after.

        Args:
            submitted: The record of the sweep's submissions.
            numbers: Hydra's number of each job.
            composed: The fingerprint of each job's config.
        Raises:
            SlurmRefused: If sbatch does not accept the script, or does not answer.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self.script)
        submitted.note_request(self.path, numbers, composed)
        submitted.note_answer(self.path, client.submit(self.path))


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, which writes the headers, and does not need Slurm for that."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def batches(
    groups: list[OptionGroup], folder: Path, bundles: Iterator[Path], max_array_size: int
) -> list[Batch]:
    """Group jobs into as few calls of sbatch as possible.

    Args:
        groups: The group of each job.
        folder: The folder of logs and scripts.
        bundles: Paths of the files that the wrappers read.
        max_array_size: The cluster's MaxArraySize.
    """
    by_group: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        by_group.setdefault(repr(group), []).append(number)
    size = max(max_array_size, 1)
    found: list[Batch] = []
    for members in by_group.values():
        for first in range(0, len(members), size):
            some = members[first : first + size]
            found.append(Batch(groups[some[0]], some, folder, next(bundles)))
    return found


def job_name(options: SlurmOptions, number: int, label: str) -> str:
    """`train_3:lr=0.1,seed=2`: a job's name in the queue, with its number and overrides."""
    overrides = _ODD.sub("_", ",".join(label.split()))
    return f"{options.name}_{number}{':' if overrides else ''}{overrides}"[:_LONGEST_NAME]


def log_folder(given: str, sweep_dir: Path) -> Path:
    """The folder of logs: `hydra.launcher.submitit_folder` up to the first part with a job id."""
    path = Path(given or sweep_dir).expanduser().absolute()
    # Only parts below the sweep's directory count: its own name can contain a `%j`.
    known = sweep_dir if path.is_relative_to(sweep_dir) else Path(path.anchor)
    for part in path.relative_to(known).parts:
        if any(tag in part for tag in ("%j", "%A", "%a", "%t")):
            break
        known /= part
    return known


def _script(batch: Batch) -> str:
    options, group = batch.group.options, batch.group
    with contextlib.redirect_stderr(None):  # hide warnings about names that the user did not choose
        executor = _Executor(folder=_LOGS)
    given = {name: value for name, value in asdict(options).items() if name not in _OURS}
    given = {name: value for name, value in given.items() if value is not None}
    parameters = of_submitit.slurm_parameters(executor, given)
    if group.name and len(batch.members) == 1:
        parameters["job_name"] = group.name
    parameters["time"] = math.ceil(options.timeout_min)
    more: dict[str, Any] = dict(options.additional_parameters)
    if group.is_requeued is not None:
        more |= {"requeue": True} if group.is_requeued else {"no-requeue": True}
    warning_s = math.ceil(group.warning_s)
    if group.signal is not None:
        more["signal"] = f"{group.signal}@{warning_s}"
    parameters |= {"additional_parameters": more, "use_srun": False}
    parameters["teardown"] = [*(options.teardown or []), 'exit "$forge_code"']
    executor.update_parameters(**parameters)
    if len(batch.members) > 1:
        executor.parameters["map_count"] = len(batch.members)
    wrapper = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(batch.bundle)]
    command = [
        # The shell ignores Slurm's signals, waits for the wrapper, and keeps its exit code.
        "trap : TERM HUP INT QUIT USR1 USR2",
        "for forge_try in 1 2 3; do  # if forge's wrapper process was killed",
        "  forge_code=0",
        f"  {shlex.join(wrapper)} || forge_code=$?",
        '  [ "$forge_code" = 137 ] || break',
        "done",
        "trap 'exit \"$forge_code\"' EXIT",  # whatever the exit code of the teardown is
    ]
    text = of_submitit.sbatch_text(executor, "\n".join(command))
    lines = [line for line in text.splitlines() if not _is_unwanted(line, group)]
    return "\n".join(_with_logs(line, batch.folder) for line in lines) + "\n"


def _with_logs(line: str, folder: Path) -> str:
    """The line, with the real folder of logs instead of the placeholder."""
    option, _, name = line.partition(f"={_LOGS}/")
    if option not in ("#SBATCH --output", "#SBATCH --error"):
        return line
    path = f"{str(folder).replace('%', '%%')}/{name}"
    return f"{option}={shlex.quote(path)}"


def _is_unwanted(line: str, group: OptionGroup) -> bool:
    """Whether to drop submitit's `--signal` (none wanted), or its own `--wckey`."""
    is_signal = line.startswith("#SBATCH --signal=") and group.signal is None
    return is_signal or line == "#SBATCH --wckey=submitit"


# -- the output of `dry_run` -----------------------------------------------------------------------


def show(calls: list[Batch], jobs: list[ComposedJob], cluster: Cluster) -> None:
    """Print the batch scripts to stdout."""
    lines = []
    for call in calls:
        count = len(call.members)
        lines.append(f"# {call.path}: {count} job{'s' * (count > 1)}")
        lines += [call.script, _timeline(call, jobs[call.members[0]], cluster), ""]
        for index, number in enumerate(call.members):
            job = jobs[number]
            lines.append(f"  {index:>4}  {escape(str(job.directory))}  {job.label}")
        lines.append("")
    if not calls:
        lines.append("Nothing to submit: every job is finished, or in the queue.")
    if cluster.problem:
        lines.append(
            "The cluster did not answer, so the partition, time limit and number of nodes were not"
            f" checked: {cluster.problem}"
        )
    sys.stdout.write(escape("\n".join(lines), "\n\t") + "\n")


def _timeline(call: Batch, job: ComposedJob, cluster: Cluster) -> str:
    """The signals to a job of this call, in seconds before its time limit."""
    group, policy = call.group, job.policy
    kill_s = f"at T+{cluster.kill_wait_s:g} s SIGKILL"
    if policy is None or not policy.enabled:
        return f"time limit T={group.options.timeout_min:g} min:  at T SIGTERM · {kill_s}"
    parts = [f"at T-{policy.signal.warning_s:g} s {group.signal}, saves and requeues"]
    if policy.stop_s > 0:
        forced_s = policy.signal.warning_s - policy.stop_s
        parts.append(f"at T-{forced_s:g} s forced exit, at the latest")
    parts.append(f"at T SIGTERM · {kill_s}")
    text = f"time limit T={group.options.timeout_min:g} min:  {' · '.join(parts)}"
    grace_s = cluster.grace_s(group.options.partition)
    if grace_s is not None:
        last = f"SIGKILL after {grace_s + cluster.kill_wait_s:g} s"
        if grace_s > 0:
            notice = f"SIGTERM at once, saves and requeues · SIGTERM after {grace_s:g} s"
            text += f"\npreemption:  {notice} · {last}"
        else:
            text += f"\npreemption, without notice:  SIGTERM at once · {last}"
    return text
