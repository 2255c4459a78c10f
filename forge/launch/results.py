"""Returns to Hydra's sweeper the value or the exception of each job's main."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from forge.compat import of_hydra
from forge.errors import ExitCode, JobError, JobTraceback, Reason
from forge.filesystem.files import read_trusted
from forge.hydra_app import frozen
from forge.jobdir.job_files import RESULT, forge_dir, suffix
from forge.jobdir.job_state import State
from forge.launch import tracebacks
from forge.launch.planning import ComposedJob
from forge.launch.progress.observed import ObservedJob
from forge.messages import escape
from forge.sweeps import output

_TAIL_LINES, _TAIL_COLUMNS = 20, 500


class _CompactJobError(JobError, CompactHydraException):
    """Hydra prints only its text, since frames of the launcher do not explain the job's error."""

    __module__, __qualname__ = JobError.__module__, JobError.__qualname__  # as tracebacks name it


_CompactJobError.__name__ = JobError.__name__


def result_of(job: ComposedJob, queued: ObservedJob) -> JobReturn:
    """The value or the exception of the job's main; a JobError if neither is known.

    For a job that is still in the queue, only the overrides.
    """
    result: JobReturn | None = None
    if queued.state is State.finished or queued.reason in (Reason.failed, Reason.code_changed):
        result = stored(job.directory, queued.rank)
    if result is None:
        result = JobReturn(status=JobStatus.COMPLETED)
        if queued.state in (State.failed, State.stopped, State.terminated):
            text = f"job {job.place.number} ({job.label}): {queued.because}"
            text += _last_output(job.directory, queued.rank)
            result.status = JobStatus.FAILED
            result.return_value = _CompactJobError(text, queued.code)
    if job.is_done:
        result.overrides = result.overrides or list(job.place.overrides)
        return result
    result.overrides = frozen.overrides_of(job.config)
    if result.cfg is None and queued.state.is_final:
        result.cfg = frozen.task_part(job.config)
        result.hydra_cfg = OmegaConf.masked_copy(job.config, ["hydra"])
        result.working_dir = str(job.directory)
        result.task_name = job.config.hydra.job.name
    return result


def _last_output(directory: Path, rank: int) -> str:
    """The last lines that a rank of the job printed."""
    lines = output.end_of(directory, rank).splitlines()[-_TAIL_LINES:]
    shown = "\n".join(f"  {escape(line[:_TAIL_COLUMNS])}" for line in lines)
    return f"\nThe end of {output.path_of(directory, rank)}:\n{shown}" if lines else ""


def stored(directory: Path, rank: int) -> JobReturn | None:
    """The result that a rank of a job has stored; None if there is none."""
    path = forge_dir(directory) / f"{RESULT}{suffix(rank)}"
    # The job imported our `__main__` under this name, as multiprocessing does.
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    try:
        found, shown = pickle.loads(read_trusted(path))
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - unpickling runs the user's classes
        text = f"{path} cannot be read ({type(error).__name__}: {error})"
        result = JobReturn(status=JobStatus.FAILED)
        result.return_value = _CompactJobError(text, int(ExitCode.IO_ERROR))
        return result
    assert isinstance(found, JobReturn)
    if shown:
        frames, origin = shown  # the pickle of an exception has no traceback
        raised = of_hydra.outcome(found).with_traceback(tracebacks.made_again(frames))
        raised.__cause__ = JobTraceback(f"\n{origin}") if origin else None
    return found
