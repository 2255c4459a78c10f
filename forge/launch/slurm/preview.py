"""The output of `dry_run`: the exact batch scripts, and when each signal would come."""

from __future__ import annotations

import sys

from forge.launch.planning import ComposedJob
from forge.launch.slurm.cluster import Cluster
from forge.launch.slurm.sbatch import Batch
from forge.messages import escape


def show(calls: list[Batch], jobs: list[ComposedJob], cluster: Cluster) -> None:
    """Print the batch scripts to stdout."""
    lines = []
    for call in calls:
        count = len(call.members)
        lines.append(f"# {call.bundle.with_suffix('.sh')}: {count} job{'s' * (count > 1)}")
        lines += [call.script, timeline(call, jobs[call.members[0]], cluster), ""]
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


def timeline(call: Batch, job: ComposedJob, cluster: Cluster) -> str:
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
