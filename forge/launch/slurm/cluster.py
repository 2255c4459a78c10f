"""The cluster's limits, checked before jobs are submitted; unchecked if Slurm does not answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from forge import messages
from forge.config.schema import Policy
from forge.errors import ConfigError, SlurmRefused
from forge.launch.slurm.slurm_options import SlurmOptions
from forge.slurm import client, job_info

_MAX_ARRAY_SIZE = 1001  # Slurm's default
_KILL_WAIT_S = 30.0


@dataclass
class Cluster:
    """The limits of the cluster."""

    max_array_size: int = _MAX_ARRAY_SIZE
    """The indices of a job array are below this, which also limits the number of its jobs."""
    kill_wait_s: float = _KILL_WAIT_S
    """Seconds from SIGTERM to SIGKILL at the end of a job."""
    preempts: bool = False
    """Whether preemption is configured."""
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    problem: str = ""
    """Why Slurm did not answer."""

    @staticmethod
    def ask() -> Cluster:
        """Query the cluster that this machine belongs to."""
        try:
            settings, partitions = client.settings(), client.partitions()
        except SlurmRefused as error:
            return Cluster(problem=str(error).splitlines()[-1])
        kill_wait = re.match(r"\d+", settings.get("KillWait", ""))
        size = settings.get("MaxArraySize", "")
        return Cluster(
            int(size) if size.isdecimal() else _MAX_ARRAY_SIZE,
            float(kill_wait[0]) if kill_wait else _KILL_WAIT_S,
            "preempt/none" not in settings.get("PreemptType", "preempt/none"),
            partitions,
        )

    def partition(self, name: str | None) -> dict[str, str]:
        """The fields of a partition (None: the default one); empty if unknown."""
        name = name or os.environ.get("SBATCH_PARTITION")
        if name is not None:
            return self.partitions.get(name, {})
        defaults = (one for one in self.partitions.values() if one.get("Default") == "YES")
        return next(defaults, {})

    def grace_s(self, name: str | None) -> float | None:
        """Seconds from the notice of a preemption to SIGTERM; None if jobs are not preempted."""
        fields = self.partition(name)
        grace = fields.get("GraceTime", "")
        can_be_preempted = self.preempts and fields.get("PreemptMode") not in ("OFF", None)
        return float(grace) if can_be_preempted and grace.isdecimal() else None

    def check(self, jobs: list[tuple[SlurmOptions, Policy | None]]) -> None:
        """Refuse jobs that could never run; warn about jobs that could not save in time.

        Raises:
            ConfigError: With every problem found.
        """
        if self.problem:
            return
        problems: dict[str, None] = {}
        warned: set[str] = set()
        for options, policy in jobs:
            for name in (options.partition or "").split(",") if options.partition else [None]:
                problem = self._problem(options, name)
                if problem:
                    problems[problem] = None
                elif policy is not None and policy.enabled and str(name) not in warned:
                    warned.add(str(name))
                    self._warn(name, policy)
        if problems:
            raise ConfigError(list(problems), "The submission")

    def _problem(self, options: SlurmOptions, name: str | None) -> str | None:
        if name is not None and name not in self.partitions:
            there = ", ".join(self.partitions)
            return f"`partition={name}`: the cluster has no such partition. It has {there}."
        fields = self.partition(name)
        most_s = job_info.seconds(fields.get("MaxTime", ""))
        if most_s is not None and options.time_limit_s > most_s:
            return (
                f"`timeout_min={options.timeout_min:g}`: the partition"
                f" {fields['PartitionName']} allows {most_s / 60:g} minutes. Lower the"
                " limit: a job that needs more time is requeued and continues. Or choose another"
                " partition."
            )
        nodes = fields.get("TotalNodes", "")
        if nodes.isdecimal() and options.nodes > int(nodes):
            return f"`nodes={options.nodes}`: the partition {fields['PartitionName']} has {nodes}."
        return None

    def _warn(self, name: str | None, policy: Policy) -> None:
        grace_s, timeout_s = self.grace_s(name), policy.stop_s
        partition = self.partition(name).get("PartitionName", "default")
        total_s = None if grace_s is None else grace_s + self.kill_wait_s
        if total_s is not None and (timeout_s == 0 or timeout_s > total_s):
            given = "unlimited time" if timeout_s == 0 else f"{timeout_s:g} s"
            messages.warn(
                f"Partition {partition} kills a preempted job after {total_s:g} s (GraceTime"
                f" {grace_s:g} s and KillWait {self.kill_wait_s:g} s), but"
                f" `resilience.shutdown.timeout_s` allows a stop {given}. A save that takes"
                f" longer than {total_s:g} s is lost, and the job resumes from the checkpoint"
                " before it. If saves take that long, lower `resilience.checkpoint.every_s`, so"
                " that less is lost."
            )
