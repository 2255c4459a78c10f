"""An attempt's files: the claimed directory, its checkpoints, ledger and verdict."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import torch

from forge import messages
from forge.checkpoint.store import Store
from forge.config.rules import directory_problem
from forge.config.schema import NanAction, Policy
from forge.errors import CheckpointError, ConfigError, ExitCode, Reason
from forge.filesystem import foreign
from forge.group.group import Coordinator
from forge.jobdir import job_dir, ledger_writer, process_id, verdict
from forge.jobdir.job_files import forge_dir, step_dirs
from forge.jobdir.ledger_writer import Ledger
from forge.jobdir.verdict import Verdict
from forge.shutdown import stopping
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy
from forge.training.saver import Saver

_PERSONAL = ("rng", "ended")
"""Keys of a state that each rank keeps for itself."""


class AttemptIO:
    """Claims the directories of a job; `release` releases them.

    Raises:
        ConfigError: If they are not writable.
        DirectoryInUse: If another running job owns them.
    """

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        nan: NanPolicy,
        job: Path,
        checkpoint_dir: Path,
        ranks: Coordinator,
    ) -> None:
        self.job = job
        self.ranks = ranks
        self._is_first = ranks.rank == 0
        """Whether this is rank 0, which writes and logs for all ranks."""
        began = time.time()
        self._name = name
        self._training = f"Training of {name}" if name else "Training"
        self.config = policy.checkpoint
        self._nan_action = policy.nan.action
        self._complete_at: int | None = None
        """The step at which the training had finished before this start."""
        self.checkpoint_dir = checkpoint_dir
        check_directory(policy, checkpoint_dir)
        if ledger_writer.has_finished(job, checkpoint_dir):
            problem = (
                f"this process has already finished a training in {checkpoint_dir}. This Run would"
                " resume from its end and train nothing. If a script has several Runs (folds,"
                ' seeds, stages), give each a name: forge.Run(policy, name="fold2", …).'
            )
            raise ConfigError([problem], "This Run")
        can_roll_back = policy.nan.action is NanAction.rollback
        self.store = Store(
            checkpoint_dir,
            policy.checkpoint,
            keep_back_steps=policy.nan.rollback.steps_back if can_roll_back else None,
            ranks=ranks,
            personal=_PERSONAL,
        )
        self.ledger = Ledger(job, checkpoint_dir)
        foreign.note_claim(job)
        self.metrics = Metrics(self.ledger)
        self.saver = Saver(self.store, policy.checkpoint, self.ledger, nan, self.metrics)
        verdict.clear(job, began)
        self.command = job_dir.resume_command(job)
        """The command that resumes this job by hand."""
        requeuer = None
        if self._is_first:
            if ranks.size > 1:
                from forge.group import secret

                secret.clear(forge_dir(job))
            if self.command:
                job_dir.write_resume_script(job, self.command)
            requeuer = stopping.requeuer(policy, job)
            self.command = self.command if requeuer is None else requeuer.command
        self._is_supervised = job_dir.is_supervised()
        self._is_judged = self._is_supervised or requeuer is not None
        """Whether another process records what happens to the job after a stop."""

    def check_not_lost(self) -> None:
        """Refuse to start at step 0 if the job has saved checkpoints, and none of them exists.

        Raises:
            CheckpointError: Names the last one, and the command that trains again from step 0.
        """
        step = ledger_writer.last_save(self.job, self.ledger.run)
        if step is None or step_dirs(self.checkpoint_dir):
            return
        ledger = forge_dir(self.job) / "ledger"
        aside = shlex.join(["mv", str(ledger), str(ledger.with_name(f"ledger_to_step_{step}"))])
        raise CheckpointError(
            f"This job has saved step {step} in {self.checkpoint_dir}, but no checkpoint is left"
            " there. If the disk is not mounted, or a purge has removed them, restore them and"
            f" start the job again. To train again from step 0:\n"
            f"  {' && '.join(filter(None, (aside, self.command)))}"
        )

    def record_start(
        self,
        step: int,
        resumed_from: str | None,
        job_id: str,
        *,
        objects: str,
        is_complete: bool,
    ) -> None:
        """Record and log the start of this attempt.

        Args:
            step: Steps done.
            resumed_from: Name of the checkpoint; None if the training begins.
            job_id: Of the job and its config.
            objects: A digest of the objects if the training begins; else empty.
            is_complete: Whether the training had finished.
        """
        self._complete_at = step if is_complete else None
        problem = self._problem_of_start(job_id, objects)
        self.ledger.write(
            "start",
            step=step,
            resumed_from=resumed_from,
            passed_over=self.store.passed_over,
            previous_step=self.ledger.previous_step,
            pid=os.getpid(),
            ticks=process_id.ticks(os.getpid()),
            host=socket.gethostname(),
            job=job_id,
            objects=objects,
            problem=problem,
            torch=torch.__version__,
            nan_action=self._nan_action.name,
            every_s=self.config.every_s,
            summary=self.metrics.summary(),
        )
        self.ledger.progress(step)
        self.saver.begin(job_id, step if resumed_from else None)
        if resumed_from:
            self.saver.tidy()  # a stop leaves old checkpoints for the next attempt to remove
        self.metrics.on_step(step)
        if problem and objects:
            messages.warn(problem[0].upper() + problem[1:])
        if not self._is_first:
            return
        begins = f"resumes at step {step}" if resumed_from else "starts at step 0"
        directory = messages.escape(str(self.checkpoint_dir))
        if is_complete:
            messages.say(
                f"{self._training} already finished at step {step}: nothing to do, unless its loop"
                f" is longer now. To train again from step 0, use another directory than"
                f" {directory}"
            )
            return
        messages.say(f"{self._training} {begins}; checkpoints in {directory}")
        if not self._is_supervised and self.command:
            messages.say(f"To resume this job after a stop:\n  {self.command}")
        elif not self._is_supervised:
            messages.say(f"To resume this job after a stop, {self._without_command()}")

    def _problem_of_start(self, job_id: str, objects: str) -> str:
        """Says that the training begins with other objects than at its first start, or began so."""
        before = ledger_writer.starts(self.job, self.ledger.run)
        if not objects:
            return str(next(before, {}).get("problem", ""))
        known = [one["objects"] for one in before if one.get("job") == job_id and one["objects"]]
        if not known or known[-1] == objects:
            return ""
        return (
            "the objects differ from those of the first start: nothing seeds them, or the script"
            " loaded a checkpoint of its own; all steps are trained from here"
        )

    def in_place(self) -> str:
        """Names the checkpoint that a later start would resume from."""
        with contextlib.suppress(OSError):
            steps = step_dirs(self.checkpoint_dir)
            return (
                f"the newest checkpoint is {steps[0].name}"
                if steps
                else "there is no checkpoint yet"
            )
        return f"{self.checkpoint_dir} cannot be read"

    def record_end(
        self, kind: str, reason: Reason, text: str, step: int, code: int, level: int, **details: Any
    ) -> None:
        """Record and log the reason of this attempt's end."""
        self._judge(reason, text, step, code)
        self.ledger.write(kind, reason=reason.name, text=text, step=step, code=int(code), **details)
        at = " at" if kind == "stop" else ". The run ended at"
        text = f"{text.removesuffix('.')}{at} step {step}, exit code {int(code)}."
        if not self._is_judged:
            text += self._how_to_resume(names_none=kind != "halt")  # a halt names it already
        if self._is_first or level >= logging.ERROR:
            messages.say(text, level)

    def record_finish(self, step: int, because: str = "") -> None:
        """Record and log that training is finished; `because` is the argument of `run.finish`."""
        self.ledger.write("finish", step=step, text=because)
        text = f"finished: {because}" if because else "finished"
        self._judge(Reason.finished, text, step, ExitCode.FINISHED)
        if not self._is_first or step == self._complete_at:
            return
        messages.say(f"{self._training} finished at step {step}{because and f': {because}'}")

    def record_error(self, error: str, step: int) -> None:
        """Record and log that the user's code raised an exception."""
        with contextlib.suppress(RuntimeError):  # values on a failed device cannot be read
            self.metrics.flush()
        self.ledger.write("error", reason=Reason.failed.name, text=error, step=step)
        kind = error.partition(":")[0]  # Python prints all of it after this, with the traceback
        text = f"{kind} in step {step}; Python shows its traceback below."
        if not self._is_supervised:
            text += self._how_to_resume()
        messages.say(text, logging.ERROR)

    def _how_to_resume(self, *, names_none: bool = True) -> str:
        """The end of a message about a stop: the command, if there is a checkpoint.

        Args:
            names_none: Whether to say that there is no checkpoint.
        """
        try:
            has_checkpoint = self.saver.is_pending or bool(step_dirs(self.checkpoint_dir))
        except OSError:  # a disk that is unreachable now can be back for the resume
            has_checkpoint = True
        if has_checkpoint and self.command:
            return f" To resume:\n  {self.command}"
        if has_checkpoint:
            return f" To resume, {self._without_command()}"
        why = "There is no checkpoint yet: the" if names_none else "The"
        return f" {why} same command starts at step 0."

    def _without_command(self) -> str:
        return f"run the same code again: no command can, since {job_dir.why_no_command()}"

    def _judge(self, reason: Reason, text: str, step: int, code: int) -> None:
        verdict.write(self.job, Verdict(reason, text, int(code), step))

    def release(self) -> None:
        """Wait for the save in progress, and release everything."""
        try:
            self.saver.finish()
        finally:
            self.store.close()
            self.ledger.close()
            foreign.forget_claim(self.job)


def check_directory(policy: Policy, checkpoint_dir: Path) -> None:
    """Raise ConfigError if the directory is not writable."""
    problem = directory_problem(checkpoint_dir)
    if problem:
        key = f"`resilience.checkpoint.dir={policy.checkpoint.dir}`"
        raise ConfigError([f"{key} ({checkpoint_dir}): {problem}"])
