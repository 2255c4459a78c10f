"""One task of a Slurm step: what srun starts, on every node and for every rank.

srun starts a small shell script first, since it is ready within a millisecond: it writes signals
into a file, so that no process dies of them while Python starts. The shell starts the supervisor,
in the container if there is one. The supervisor reads the file and then starts the task.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from forge.filesystem.files import exit_on_error
from forge.job.task import Task
from forge.jobdir.job_files import RANK, forge_dir, output_of, suffix
from forge.jobdir.plan import read
from forge.process import world

EARLY = "early"
"""`<job dir>/.forge/early<rank>`: names of the signals that the shell has received."""

_SIGNALS = "TERM HUP INT USR1 USR2"
# The shell writes a signal down and then passes it on; the supervisor sets its handlers and then
# reads the file, so it misses none. A new child dies of a signal until it has sent URG (a fork
# resets the traps, and URG is ignored by default); the signal is in the file, so the shell forks
# again. If a signal ends `wait`, bash can have collected the child already: a second `wait` returns
# its code or, if both come within microseconds, -1 (the report has the code in any case). So the
# shell does not wait for URG, which takes a millisecond, with `wait`.
_SHELL = f"""
early=$1; shift
[ "${{SLURM_PROCID:-0}}" = 0 ] || early=$early.$SLURM_PROCID
for name in {_SIGNALS}; do
  trap "echo $name >> \\"\\$early\\"; kill -$name \\$child 2> /dev/null" $name
done
trap deaf=yes URG
mask=$(umask)
umask 077  # other users must not change the file
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
    """The command for srun; `start` is what the launcher has put into the plan (`start` below)."""
    return ["/bin/sh", "-c", _SHELL, "forge-step", str(forge_dir(directory) / EARLY), *start]


def start(python: list[str], root: str, directory: Path) -> list[str]:
    """The command that runs `main`, for the plan of a job; `root`: where `python` finds forge."""
    code = f"import sys; sys.path.append({root!r}); from pathlib import Path;"
    code += " from forge.slurm.step import main; sys.exit(main(Path(sys.argv[1])))"
    return [*python, "-c", code, str(directory)]


@exit_on_error()
def main(directory: Path) -> int:
    """The supervisor of this rank; returns the task's exit code, 128 + N for signal N."""
    plan = read(directory)
    assert plan.slurm is not None
    number = os.environ[RANK] = os.environ.get("SLURM_PROCID", "0")
    task = Task.in_environment(directory, plan, os.environ, int(number))
    if task.is_main:  # the interpreter of this process: in a container it is not the launcher's
        task = replace(task, words=[sys.executable, *task.words[1:]])
    os.environ.update(task.rank_variables(plan.slurm.ranks, {}))
    if plan.slurm.ranks > 1:  # for programs that read torch's variables, not Slurm's
        os.environ.update(world.of(os.environ).variables())
    output = output_of(directory) if suffix() else os.dup(1)
    early = forge_dir(directory) / f"{EARLY}{suffix()}"
    environment, parent = dict(os.environ), os.getppid()
    return task.supervisor(int(number), environment, output, parent, early).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
