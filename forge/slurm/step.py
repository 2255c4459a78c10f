"""One task of a Slurm step: what srun starts, on every node and for every rank.

A small shell stands at the top, since it is there in a millisecond: from then on a signal is
written down, and nobody dies of it while Python starts. Below it, in a container where there is
one, runs the supervisor; it takes in what was written down, and then starts the task.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forge.filesystem.files import exit_on_error
from forge.job.command import supervisor_of
from forge.jobdir.job_files import RANK, RANKS, forge_dir, output_of, suffix
from forge.jobdir.plan import read
from forge.process import world

EARLY = "early"
"""`<job dir>/.forge/early<rank>`: names of the signals that the shell has heard."""

_SIGNALS = "TERM HUP INT USR1 USR2"
# Written down first, then passed on: the supervisor listens first, then reads, so it misses none. A
# child that is just forked dies of a signal until it has said URG (its other traps are gone, and
# the default of this one is nothing); that signal is written down, so it is forked once more.
# bash may have collected the child already where a signal ends `wait`: asked again it knows, or,
# if both come within microseconds, says -1 (the report has the code in any case). So URG, which
# takes a millisecond, is not waited for in `wait`.
_SHELL = f"""
early=$1; shift
[ "${{SLURM_PROCID:-0}}" = 0 ] || early=$early.$SLURM_PROCID
for name in {_SIGNALS}; do
  trap "echo $name >> \\"\\$early\\"; kill -$name \\$child 2> /dev/null" $name
done
trap deaf=yes URG
mask=$(umask)
umask 077  # what is written down is for nobody else to change
while :; do
  (trap '' {_SIGNALS}; umask "$mask"; kill -URG $$; exec "$@") &
  child=$! tries=0
  while [ -z "$deaf" ] && [ $((tries += 1)) -lt 20000 ]; do :; done
  while :; do
    wait $child
    code=$?
    kill -0 $child 2> /dev/null || break
  done
  wait $child 2> /dev/null
  again=$?
  case $again in 127 | -*) ;; *) code=$again ;; esac
  [ -z "$deaf" ] && [ $code -gt 128 ] || exit $code
done
"""


def command(directory: Path, start: list[str]) -> list[str]:
    """What srun has to run; `start` begins this module's `main`."""
    return ["/bin/sh", "-c", _SHELL, "forge-step", str(forge_dir(directory) / EARLY), *start]


@exit_on_error()
def main(directory: Path) -> int:
    """The supervisor of this rank; returns the task's exit code, 128 + N for signal N."""
    plan = read(directory)
    assert plan.slurm is not None
    os.environ[RANK] = os.environ.get("SLURM_PROCID", "0")
    if plan.exec is None or plan.slurm.ranks > 1:  # a command may be srun with several
        os.environ[RANKS] = str(plan.slurm.ranks)
    if plan.slurm.ranks > 1:  # for whatever knows torch's names, and not Slurm's
        os.environ.update(world.of(os.environ).variables())
    # The interpreter of this very process: in a container it is another than the launcher's.
    task = [sys.executable, *plan.command[1:]]
    output = output_of(directory) if suffix() else os.dup(1)
    early = forge_dir(directory) / f"{EARLY}{suffix()}"
    return supervisor_of(directory, plan, task, dict(os.environ), output, os.getppid(), early).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
