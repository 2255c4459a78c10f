"""What is submitted: jobs with the same options for sbatch as one array, in one batch script.

The header is submitit's, with its keys and their meaning. Below it stand the user's `setup`, the
job's wrapper, and `teardown`; the wrapper's exit code stays the job's, whatever follows it.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import submitit

from forge.compat import of_submitit
from forge.launch.plan import ROOT
from forge.launch.slurm.slurm_options import SlurmOptions

_OURS = (
    *("_target_", "submitit_folder", "timeout_min", "signal_delay_s", "max_num_timeout"),
    *("additional_parameters", "srun_args", "python", "use_srun", "teardown"),
    *("wait", "dry_run", "progress"),
)
"""Options that submitit gets in another way, or not at all."""
_LOGS = "/folder-of-the-logs"
"""Stands for it where submitit writes the header: what it makes of a % is not for our paths."""
_WRAPPER = f"import sys; sys.path.append({ROOT!r}); from forge.slurm.wrapper import main;"
_WRAPPER += " sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Group:
    """How a set of jobs is submitted: what is equal for all of them."""

    options: SlurmOptions
    signal: str | None
    """Signal that announces the time limit; None: nobody listens."""
    warning_s: float
    is_requeued: bool | None
    """Whether the policy may ever start them again; None: no policy, as the site has it."""


@dataclass
class Batch:
    """One call of sbatch; the very value that is printed, and submitted."""

    group: Group
    members: list[int]
    """Which jobs of the launch, in the order of the array."""
    folder: Path
    bundle: Path
    """Where the wrapper finds the jobs."""
    script: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.script = _script(self)


class _Executor(submitit.SlurmExecutor):
    """submitit's, for its headers; it needs no Slurm to write them."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def batches(
    groups: list[Group], folder: Path, bundles: Iterator[Path], max_array_size: int
) -> list[Batch]:
    """The fewest calls of sbatch for these jobs, one entry a job.

    Args:
        groups: The group of each job.
        folder: Of logs and scripts.
        bundles: Paths for what the wrappers read.
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


def log_folder(given: str, sweep_dir: Path) -> Path:
    """Where logs go by `hydra.launcher.submitit_folder`: down to the first part with a job's id."""
    path = Path(given or sweep_dir).expanduser().absolute()
    # Only below the sweep's own directory, whose name may hold what looks like one.
    known = sweep_dir if path.is_relative_to(sweep_dir) else Path(path.anchor)
    for part in path.relative_to(known).parts:
        if any(tag in part for tag in ("%j", "%A", "%a", "%t")):
            break
        known /= part
    return known


def _script(batch: Batch) -> str:
    options, group = batch.group.options, batch.group
    with contextlib.redirect_stderr(None):  # no advice about names that are not the user's
        executor = _Executor(folder=_LOGS)
    given = {name: value for name, value in asdict(options).items() if name not in _OURS}
    given = {name: value for name, value in given.items() if value is not None}
    parameters = of_submitit.slurm_parameters(executor, given)
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
        # Slurm's signals are for the wrapper: the shell waits for it, and keeps its exit code.
        "trap : TERM HUP INT QUIT USR1 USR2",
        "for forge_try in 1 2 3; do  # a wrapper that was killed is started again",
        "  forge_code=0",
        f"  {shlex.join(wrapper)} || forge_code=$?",
        '  [ "$forge_code" = 137 ] || break',
        "done",
        "trap 'exit \"$forge_code\"' EXIT",  # whatever the teardown ends with
    ]
    text = of_submitit.sbatch_text(executor, "\n".join(command))
    lines = [line for line in text.splitlines() if not _is_unwanted(line, group)]
    return "\n".join(_with_logs(line, batch.folder) for line in lines) + "\n"


def _with_logs(line: str, folder: Path) -> str:
    """The line, with the true folder where it names a log."""
    option, _, name = line.partition(f"={_LOGS}/")
    if option not in ("#SBATCH --output", "#SBATCH --error"):
        return line
    path = f"{str(folder).replace('%', '%%')}/{name}"
    return f"{option}={shlex.quote(path)}"


def _is_unwanted(line: str, group: Group) -> bool:
    """submitit always asks for a signal, and sets a label of its own where sites have theirs."""
    is_signal = line.startswith("#SBATCH --signal=") and group.signal is None
    return is_signal or line == "#SBATCH --wckey=submitit"
