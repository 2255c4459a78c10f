"""The directory of a job that Slurm has started again, if its name has the time of the start.

Hydra's own are named by `${now:…}`: a requeued job would begin anew in another one. The state in
the directory of the start before says whose it is.
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
from forge.jobdir import job_dir
from forge.jobdir.job_files import STATE, forge_dir, read_json
from forge.slurm import client


def of_start_before(written: str) -> str | None:
    """The directory that an earlier start of this job, with these arguments, has made.

    Args:
        written: As the config has it, with its interpolations.
    Returns:
        Its path; None if this is a first start, or no batch job, or there is none.
    """
    is_again = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    if "SLURM_JOB_ID" not in os.environ or not is_again or job_dir.is_supervised():
        return None
    if "${" not in written:
        return None
    pattern = "*".join(glob.escape(part) for part in re.split(r"\$\{[^}]*\}", written))
    own = [client.own_job(os.environ), sys.argv[1:]]
    found = [Path(one) for one in glob.glob(pattern) if forge_dir(one).is_dir()]
    for path in sorted(found, key=_age, reverse=True):
        with contextlib.suppress(Untrusted):
            content = read_json(forge_dir(path) / STATE) or {}
            if [content.get("job"), content.get("argv")] == own:
                messages.say(f"Slurm has started this job again: it continues in {path}")
                return str(path)
    return None


def _age(path: Path) -> float:
    return forge_dir(path).stat().st_mtime
