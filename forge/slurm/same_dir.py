"""The earlier directory of a job that Slurm has started again, if its name contains the time.

Hydra's default names contain `${now:…}`: a requeued job would start from 0 in a new directory. The
state file in the earlier directory contains the number of the job that it belongs to.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from pathlib import Path

from forge import messages
from forge.errors import Untrusted
from forge.jobdir import job_dir, job_state
from forge.jobdir.job_files import forge_dir
from forge.slurm import client


def of_start_before(written: str) -> str | None:
    """The directory that an earlier start of this job has made with the same arguments.

    Args:
        written: The directory in the config, with its interpolations.
    Returns:
        Its path; None at a first start, outside a batch job, or if there is no such directory.
    """
    is_again = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    if "SLURM_JOB_ID" not in os.environ or not is_again or job_dir.is_supervised():
        return None
    if "${" not in written:
        return None
    pattern = "*".join(glob.escape(part) for part in re.split(r"\$\{[^}]*\}", written))
    own = client.own_job(os.environ), sys.argv[1:]
    found = [Path(one) for one in glob.glob(pattern) if forge_dir(one).is_dir()]
    for path in sorted(found, key=_age, reverse=True):
        with contextlib.suppress(Untrusted):
            state = job_state.read(path)
            if state is not None and (state.job, state.argv) == own:
                messages.say(
                    f"Slurm has started this job again. It continues in its directory, {path}"
                )
                return str(path)
    return None


def _age(path: Path) -> float:
    return forge_dir(path).stat().st_mtime
