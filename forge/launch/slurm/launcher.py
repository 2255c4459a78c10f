"""`hydra/launcher=slurm`: one batch of a sweep, from its overrides to the results of its jobs.

The launcher writes each job's config, plan and sbatch options to files before it submits them.
Processes on the cluster read only these files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from forge import messages
from forge.errors import ConfigError, Exit, ExitCode, SlurmRefused
from forge.jobdir import cancel_request, job_dir, job_state, jsonl
from forge.jobdir import code as job_code
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import JobPlan, SlurmPlan
from forge.launch import opening, payload, planning, snapshot
from forge.launch.compose import compose, is_stale, start_over, use_new_config
from forge.launch.hydra_launcher import Request
from forge.launch.planning import ROOT, ComposedJob
from forge.launch.progress import display
from forge.launch.progress.observed import how_to_resume
from forge.launch.record import LaunchRecord
from forge.launch.results import result_of
from forge.launch.slurm import sbatch, slurm_options
from forge.launch.slurm.cluster import Cluster
from forge.launch.slurm.sbatch import Batch, OptionGroup, batches, job_name, log_folder
from forge.launch.slurm.slurm_options import SlurmOptions
from forge.launch.slurm.slurm_wait import QueueWatcher, SubmittedJob
from forge.launch.sweep import SweepDir
from forge.slurm import client, step
from forge.slurm.client import Queued
from forge.slurm.job_info import Stage, stage_of
from forge.slurm.submitted import Submitted, bundle_paths, submissions, write_bundle
from forge.sweeps import reader

log = logging.getLogger(__name__)
_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass
class _Job:
    """A job with its submission."""

    composed: ComposedJob
    options: SlurmOptions
    slurm_id: str | None = None
    is_finished: bool = False
    ended: JobState | None = None
    """Its end, after which a person has requeued the job by hand."""
    is_stale: bool = False
    """The job was finished, and runs again."""


def launch(request: Request) -> list[JobReturn]:
    """Run a batch on the cluster; the exit codes are those of `local.launch`."""
    with opening.exit_on_error(request.config) as directory:
        options = slurm_options.read(request.options)
        _check_sweeper(options, request.config)
        cluster = Cluster.ask()
        if options.dry_run:
            sweep = SweepDir(directory, request.taken, is_looked_at=True)
        else:
            sweep = opening.sweep_dir(directory, request)
        try:
            complete = functools.partial(slurm_options.into_policy, options)
            composed = compose(sweep, request, complete)
            jobs = _with_options(composed, options)
            cluster.check([(job.options, job.composed.policy) for job in jobs])
            submitted = Submitted(directory)
            _find(jobs, submitted, directory)
            new = [job for job in jobs if job.slurm_id is None and not job.is_finished]
            calls = _calls(new, options, directory, cluster.max_array_size)
            if options.dry_run:
                sbatch.show(calls, [job.composed for job in new], cluster)
                raise Exit(0, "nothing was submitted: hydra.launcher.dry_run=true")
            if calls and not client.can_submit():
                raise ConfigError([client.NO_COMMANDS], "The submission")
            for job in new:  # a request to cancel it that comes from now on counts
                cancel_request.clear(job.composed.directory)
                use_new_config(job.composed)
                if job.is_stale:
                    start_over(job.composed)
            sweep.add([job.place for job in composed])
            policies = ((str(one.place.number), one.policy) for one in composed)
            own = {number: dict(one.slurm) for number, one in policies if one and one.slurm}
            copy = snapshot.make(directory) if options.snapshot else None
            LaunchRecord.of("slurm", options, copy, own).write(directory)
            command = job_dir.sweep_command(directory)
            job_dir.write_resume_script(directory, command)
            try:
                shared = payload.Shared(request.function, request.context, copy)
                _submit(calls, new, shared, submitted, cluster, command)
            except KeyboardInterrupt as error:
                messages.say(
                    "Ctrl+C while jobs were being submitted. Submitted jobs stay in the"
                    f" queue. This command finds them, and submits the rest:\n  {command}"
                )
                raise Exit(ExitCode.INTERRUPTED, "stopped while submitting") from error
            _say_where(jobs, len(new), directory)
            if not options.wait:
                _say_how([_observed(job, None) for job in jobs], command)
                return [result_of(job.composed, _observed(job, None)) for job in jobs]
            logs = log_folder(options.submitit_folder, directory)
            observed = [_observed(job, logs) for job in jobs]
            title = display.title(directory, (job.place.overrides for job in composed))
            watcher = QueueWatcher(observed, options.progress, title)
            stopped_by = watcher.run()
        finally:
            sweep.close()
    if stopped_by is not None:
        messages.say("No longer waiting; the jobs keep running.")
        _say_how(observed, command)
        raise Exit(128 + stopped_by, "the launcher was asked to stop waiting")
    results = [result_of(job.composed, one) for job, one in zip(jobs, observed, strict=True)]
    if how := how_to_resume(observed, command):
        messages.say(how)
    return results


# -- before anything is submitted ------------------------------------------------------------------


def _with_options(composed: list[ComposedJob], options: SlurmOptions) -> list[_Job]:
    """The jobs, each with the launcher's options and its own."""
    jobs, problems = [], []
    for job in composed:
        try:
            jobs.append(_Job(job, options.of_job(job.policy)))
        except ConfigError as error:
            problems += [f"job {job.place.number} ({job.label}): {one}" for one in error.problems]
    if problems:
        raise ConfigError(problems, "The sweep")
    return jobs


def _check_sweeper(options: SlurmOptions, sweep_config: DictConfig) -> None:
    sweeper = OmegaConf.select(sweep_config, "hydra.sweeper._target_", default=_BASIC)
    if not options.wait and sweeper != _BASIC:
        problem = (
            f"`hydra.launcher.wait=false`: the sweeper {sweeper.rpartition('.')[2]} chooses the"
            " next jobs from the results of earlier ones, so the launcher has to wait. Remove the"
            " option, or use the basic sweeper."
        )
        raise ConfigError([problem], "The launcher's configuration")


def _find(jobs: list[_Job], submitted: Submitted, directory: Path) -> None:
    """Find the jobs of an earlier start of this sweep that are finished, or still in the queue."""
    # Before the states, so that a job which ends meanwhile is found finished, not submitted again.
    queue = {} if submitted.is_empty else _queue()
    submitted.find_lost(queue)
    code = job_code.fingerprint()
    for job in jobs:
        state = job_state.read(job.composed.directory)
        if state is not None and state.state is State.finished:
            job.is_stale = is_stale(job.composed, code)
            job.is_finished = not job.is_stale
        number = job.composed.place.number
        slurm_id = submitted.ids.get(number, "")
        known, script = queue.get(slurm_id), submitted.scripts.get(number, "")
        if known is None or not known.is_alive or job.is_finished:
            continue
        if known.script != script or not Path(script).is_relative_to(directory):
            continue  # a job of another sweep, for example if this directory is a copy
        has_ended = state is not None and state.job == slurm_id and state.state.is_final
        if has_ended and stage_of(known.state) is not Stage.waiting:
            continue  # it is ending, and has to run again
        job.slurm_id, job.ended = slurm_id, state if has_ended else None
        if submitted.has_changed(number, job.composed.composed):
            messages.warn(
                f"Job {number} is in the queue, and will run with the config that it was submitted"
                f" with; the config has changed since. To run the job with the new config, `scancel"
                f" {slurm_id}` and run the sweep's command again."
            )


def _queue() -> dict[str, Queued]:
    try:
        return client.queue()
    except SlurmRefused as error:
        problem = (
            f"this sweep has jobs on the cluster, and the cluster does not report their state:"
            f" {error}. Run the sweep's command again when the cluster answers."
        )
        raise ConfigError([problem], "The sweep") from error


def _calls(
    jobs: list[_Job], options: SlurmOptions, directory: Path, max_array_size: int
) -> list[Batch]:
    groups = []
    for job in jobs:
        policy, signal, is_requeued = job.composed.policy, None, None
        if policy is not None and policy.enabled:
            is_main, is_requeued = job.composed.command is None, policy.requeue.enabled
            signal = policy.signal.name if is_main else policy.exec.signal
        warning_s = policy.signal.warning_s if policy is not None else 0.0
        name = job_name(job.options, job.composed.place.number, job.composed.label)
        groups.append(OptionGroup(job.options, signal, warning_s, is_requeued, name))
    folder = log_folder(options.submitit_folder, directory)
    return batches(groups, folder, bundle_paths(submissions(directory)), max_array_size)


# -- submitting ------------------------------------------------------------------------------------


def _submit(
    calls: list[Batch],
    jobs: list[_Job],
    shared: payload.Shared,
    submitted: Submitted,
    cluster: Cluster,
    command: str,
) -> None:
    """Call sbatch for each batch; each submission is recorded before the next.

    `command`: the command that resumes this sweep.
    """
    code = job_code.fingerprint() if calls else {}
    for call in calls:
        members = [jobs[number] for number in call.members]
        packed = [_pack(job, shared, cluster) for job in members]
        write_bundle(call.bundle, shared.common, packed, code)
        numbers = [job.composed.place.number for job in members]
        try:
            call.submit(submitted, numbers, [job.composed.composed for job in members])
        except SlurmRefused as error:
            _find_in_queue(submitted)
            if submitted.is_lost(call.path):
                _record_refusal(members, str(error))
                raise _not_submitted(error, call.path, _arrays(jobs), command) from error
        for job in members:
            job.slurm_id = submitted.ids[job.composed.place.number]
        _record_refusal(members, "")


def _record_refusal(jobs: list[_Job], text: str) -> None:
    """Record in the ledgers of jobs that sbatch refused them; an empty text: not any more."""
    for job in jobs:
        path = job_ledger(job.composed.directory)
        if text or reader.refusal(list(jsonl.events(path))):
            jsonl.append(path, "refused", text=text)


def _find_in_queue(submitted: Submitted) -> None:
    """Find jobs that a busy controller accepted without answering, to not submit them twice."""
    with contextlib.suppress(SlurmRefused):
        submitted.find_lost(client.queue())


def _not_submitted(
    error: SlurmRefused, script: Path, before: list[str], command: str
) -> ConfigError:
    hint = f"Already submitted, and still in the queue: {' '.join(before)}.\n" if before else ""
    problem = (
        f"sbatch did not accept the batch script {script}:\n{error}\n{hint}If sbatch names an"
        " option above, correct that option. If it names a full queue, a limit, or a controller"
        " that does not answer, run the command below later. It submits the missing jobs, and waits"
        f" for all jobs:\n  {command}"
    )
    return ConfigError([problem], "The submission")


def step_plan(options: SlurmOptions, directory: Path, cluster: Cluster, name: str) -> SlurmPlan:
    """How to start the step of the job in a directory; `name` is the job's in the queue."""
    python = shlex.split(options.python) if options.python else [sys.executable, "-I", "-S"]
    srun_args = list(options.srun_args or ())
    if options.cpus_per_task is not None:  # since Slurm 22.05 srun does not inherit it
        srun_args.append(f"--cpus-per-task={options.cpus_per_task}")
    return SlurmPlan(
        ranks=options.ranks,
        start=step.start(python, ROOT, directory),
        srun_args=srun_args,
        kill_wait_s=cluster.kill_wait_s,
        name=name,
    )


def _pack(job: _Job, shared: payload.Shared, cluster: Cluster) -> tuple[Path, JobPlan, bytes]:
    composed, options = job.composed, job.options
    data, main = shared.dump(composed.config)
    made = planning.make(composed, main, options.time_limit_s, options.cpus_per_task or 1)
    made = shared.snapshot.apply(made) if shared.snapshot else made
    name = job_name(options, composed.place.number, composed.label)
    slurm = step_plan(options, composed.directory, cluster, name)
    requeue = replace(made.requeue, is_up_to_site=not composed.is_active)
    if composed.policy is not None:
        health = composed.policy.health
        most = health.max_excluded_nodes
        requeue = replace(requeue, has_other_nodes=True, max_excluded_nodes=most)
        slurm = replace(slurm, exclude_h=health.exclude_h)
    made = replace(made, slurm=slurm, requeue=requeue)
    if options.python:  # it has its own packages
        ours = (sys.prefix, sys.base_prefix)
        own = [entry for entry in made.path if not entry.startswith(ours)]
        made = replace(made, path=own, has_whole_path=False)
    return composed.directory, made, data


# -- afterwards ------------------------------------------------------------------------------------


def _observed(job: _Job, logs: Path | None) -> SubmittedJob:
    composed = job.composed
    found = SubmittedJob(composed.place.number, composed.label, composed.directory)
    found.slurm_id = job.slurm_id or ""
    found.logs = logs
    if job.is_finished:
        found.state, found.because = State.finished, "finished before"
    if job.ended is not None:
        found.forget(job.ended)
    return found


def _arrays(jobs: Sequence[_Job | SubmittedJob]) -> list[str]:
    names = (job.slurm_id.partition("_")[0] for job in jobs if job.slurm_id)
    return list(dict.fromkeys(names))


def _say_where(jobs: list[_Job], new: int, directory: Path) -> None:
    ids = " ".join(_arrays(jobs)) or "none"
    before = sum(job.is_finished for job in jobs)
    text = (
        f"Submitted {new} of {len(jobs)} jobs (Slurm: {ids}), in {messages.escape(str(directory))}"
    )
    log.info(f"{text}; {before} were finished before" if before else text)


def _say_how(jobs: list[SubmittedJob], command: str) -> None:
    queued: list[SubmittedJob] = []
    rest: list[SubmittedJob] = []
    for job in jobs:
        (rest if job.state.is_final else queued).append(job)
    ids = _arrays(queued)
    if ids:
        messages.say(
            f"To check on them: squeue --jobs={','.join(ids)}\n"
            f"To cancel them:   scancel {' '.join(ids)}"
        )
    if how := how_to_resume(rest, command, in_queue=len(queued)):
        messages.say(how)
