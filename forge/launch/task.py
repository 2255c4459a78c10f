"""The process that runs the user's main; the supervisor starts it.

It loads the config that was frozen at submission, calls main as Hydra would, and stores main's
return value or exception in `<job dir>/.forge/result.pkl`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from forge.compat import of_hydra
from forge.errors import Exit, ExitCode, Reason, is_disk_full
from forge.filesystem.files import exit_on_error, read_trusted, write_atomically
from forge.jobdir import verdict
from forge.jobdir.job_files import RESULT, RESULT_JSON, TASK, forge_dir, suffix
from forge.jobdir.plan import read
from forge.jobdir.verdict import Verdict
from forge.process import stacks
from forge.process.time_limit import Announcement
from forge.shutdown import interpreter_exit
from forge.sweeps import output


@exit_on_error()
def main(directory: Path) -> int:
    """Run the job once; returns the exit code."""
    try:
        return _run(directory)
    except KeyboardInterrupt:
        traceback.print_exc()
        return int(ExitCode.INTERRUPTED)
    except OSError as error:  # from Hydra's files or ours: an exception of main is in the result
        if not is_disk_full(error):
            raise
        traceback.print_exc()
        return int(ExitCode.DISK_FULL)


def _run(directory: Path) -> int:
    atexit.register(_at_exit)  # registered first, so that it runs last
    plan = read(directory)
    due_s = min(plan.timeout_s or plan.warning_s, plan.warning_s)
    announcement = Announcement(plan.signal, due_s, forge_dir(directory))
    _listen_early(
        plan.actions, announcement, os._exit
    )  # `os._exit`, since an import could catch an exception
    if stacks.ALL_SIGNAL:
        faulthandler.register(stacks.ALL_SIGNAL, file=2, all_threads=True)
    stacks.register(os.environ)
    sys.argv[:] = plan.argv
    sys.orig_argv[:] = plan.orig_argv
    sys.path[:] = [*plan.path, *(sys.path if not plan.has_whole_path else ())]

    gc.disable()  # objects of imports stay alive: collecting among them takes a tenth of the time
    from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals

    from forge.launch import payload

    if plan.main is not None:
        payload.import_main(plan.main)
    function, context, config = payload.load(read_trusted(forge_dir(directory) / TASK))
    drop_removed_keys(config)
    _set_directory(config, directory)
    if suffix():
        _leave_files_to_rank_0(config)
    setup_globals()
    gc.freeze()
    gc.enable()
    _listen_early(plan.actions, announcement, sys.exit)
    try:
        result: JobReturn = run_job(
            hydra_context=context,
            task_function=function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except SystemExit as error:
        if error.code not in (None, 0):
            if isinstance(error, Exit) and error.reason is Reason.rank_lost:
                _tell(error, directory)
            raise
        result = JobReturn(status=JobStatus.COMPLETED, overrides=plan.overrides)
    is_failed = result.status is JobStatus.FAILED
    _store(result, _show(of_hydra.outcome(result)) if is_failed else None, directory)
    if is_failed:
        _log_error(of_hydra.outcome(result), directory)
    return 1 if is_failed else int(ExitCode.FINISHED)


def _tell(error: Exit, directory: Path) -> None:
    """Say that another rank is the cause, as its end is not always noticed first."""
    said = verdict.read(directory)
    if said is None or said.pid != os.getpid():
        verdict.write(directory, Verdict(error.reason, error.text, int(error.code or 0)))


def drop_removed_keys(config: Any) -> None:
    """Ignore policy keys of an earlier forge version that submitted this job."""
    from omegaconf import DictConfig, OmegaConf, open_dict, read_write

    from forge.config import removed

    section = OmegaConf.select(config, "resilience", throw_on_missing=False)
    if not isinstance(section, DictConfig):
        return
    tree: Any = OmegaConf.to_container(section)
    if not isinstance(tree, dict):
        return
    kept, names = removed.without(tree)
    if kept != tree:
        with read_write(config), open_dict(config):
            config.resilience = kept
    if not suffix():
        removed.notify(names)


def _set_directory(config: Any, directory: Path) -> None:
    """Point Hydra to the job's directory, which can have been moved since the launch."""
    from omegaconf import open_dict, read_write

    own = config.hydra
    before = Path(str(own.runtime.output_dir))
    if before == directory:
        return
    sweep = Path(str(own.sweep.dir))
    subdir = before.relative_to(sweep) if before.is_relative_to(sweep) else Path(directory.name)
    parents = len(subdir.parts)
    with read_write(own), open_dict(own):
        own.runtime.output_dir = str(directory)
        own.sweep.dir = str(directory.parents[parents - 1])


def _leave_files_to_rank_0(config: Any) -> None:
    """Only rank 0 writes `.hydra`; each other rank logs to its own file."""
    from omegaconf import open_dict, read_write

    own = config.hydra
    with read_write(own), open_dict(own):
        own.output_subdir = None
        for handler in (own.job_logging.get("handlers") or {}).values():
            if handler.get("filename"):
                handler.filename = f"{handler.filename}{suffix()}"


def _at_exit() -> None:
    """Runs at the end of the job, however it ended.

    Reference cycles that main left are collected as usual. Objects created by importing main were
    frozen, and are not collected; only their files are flushed.
    """
    gc.collect()
    interpreter_exit.fast_exit()


def _listen_early(
    actions: dict[str, str], announcement: Announcement, end: Callable[[int], NoReturn]
) -> None:
    """Until the policy's handlers are registered, a stop exits immediately: nothing to save yet.

    The exception is an early warning of the time limit: there can be time to train and to save.

    The supervisor blocked signals that came even earlier; they arrive here.
    """
    for name, action in actions.items():
        number = signal.Signals[f"SIG{name}"]
        if action in ("stop", "requeue"):
            code = ExitCode.REQUEUE if action == "requeue" else 128 + number

            def exit_early(number: int, frame: FrameType | None, code: int = int(code)) -> None:
                if announcement.put_off(number):
                    return
                for other in actions:  # a repeated signal would kill the exiting interpreter
                    signal.signal(signal.Signals[f"SIG{other}"], signal.SIG_IGN)
                end(code)

            signal.signal(number, exit_early)
        elif action == "save":
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _show(error: BaseException) -> tuple[Any, str]:
    """Print the traceback to the job's log; returns the data to rebuild it in the launcher."""
    from forge.launch import tracebacks

    frames = tracebacks.shorten(error)
    sys.stderr.write(tracebacks.shown(error))
    sys.stderr.flush()
    return frames, tracebacks.origin(error)


def _log_error(error: BaseException, directory: Path) -> None:
    """Write the job's verdict, a single line, for the wrapper."""
    line = str(error).strip().split("\n")[0][:300]
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    if getattr(error, "full_key", None) == "resilience":  # OmegaConf's: main reads a missing policy
        from forge.hydra_app import hints

        text += f". The config has no policy: {hints.ADD_PRESET}"
    frame = output.last_frame("".join(traceback.format_exception(error)))
    verdict.write(directory, Verdict(Reason.failed, text, 1, frame=frame))


def _store(result: Any, shown: tuple[Any, str] | None, directory: Path) -> None:
    """Store the result for the launcher; the traceback separately, as pickles omit it."""
    import cloudpickle
    from hydra.core.utils import JobStatus

    try:
        data = cloudpickle.dumps((result, shown))
        cloudpickle.loads(data)  # some exceptions can be pickled, but not unpickled
    except Exception as error:  # noqa: BLE001 - whatever the user's object raises
        value, result.return_value = of_hydra.outcome(result), None
        if isinstance(value, BaseException):
            result.return_value = RuntimeError(f"{type(value).__name__}: {value}")
        else:
            sys.stderr.write(
                f"forge: main returned a {type(value).__name__} that cannot be sent to the"
                f" sweeper ({type(error).__name__}: {error}); the sweeper gets None\n"
            )
        data = cloudpickle.dumps((result, shown))
    if result.status is JobStatus.COMPLETED and not suffix():
        _store_as_json(result.return_value, directory)
    write_atomically(forge_dir(directory) / f"{RESULT}{suffix()}", data, is_synced=True)


def _store_as_json(value: Any, directory: Path) -> None:
    """Store a number, a text, or lists and mappings of them for `forge status --csv`.

    The pickle cannot be read there: it needs the user's code, and would execute it.
    """
    try:
        text = json.dumps({"value": value}, default=float)  # numbers of numpy and torch
    except (TypeError, ValueError, RuntimeError):
        return
    write_atomically(forge_dir(directory) / RESULT_JSON, text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
