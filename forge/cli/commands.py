"""The commands of `forge` in groups, each with an example, and the text of `forge --help`."""

from __future__ import annotations

import difflib
import importlib
from typing import NamedTuple


class CliCommand(NamedTuple):
    """One command."""

    purpose: str
    """One phrase of at most 67 characters: the line has to fit into 80 columns."""
    example: str
    home: str
    """The module and the function that runs it, imported only then: `forge.cli.plan:main`."""

    def main(self, arguments: list[str]) -> int:
        """Run the command with the arguments after its name; returns the exit code."""
        module, _, name = self.home.partition(":")
        code: int = getattr(importlib.import_module(module), name)(arguments)
        return code


GROUPS: dict[str, dict[str, CliCommand]] = {
    "Run": {
        "exec": CliCommand(
            "supervise any command: pass it stop signals, restart it, keep logs",
            "forge exec -- python simulate.py",
            "forge.launch.exec:main",
        ),
        "plan": CliCommand(
            "show what a sweep would submit to Slurm; submit nothing",
            "forge plan train.py lr=1e-3,3e-4",
            "forge.cli.plan:main",
        ),
    },
    "Look": {
        "status": CliCommand(
            "list the jobs of a sweep: progress, metrics, restarts, problems",
            "forge status multirun/2026-01-31/12-00-00",
            "forge.cli.status:main",
        ),
        "why": CliCommand(
            "say why a job stopped, waits or restarts, and what helps",
            "forge why 3",
            "forge.cli.why:main",
        ),
        "logs": CliCommand(
            "print the output of a job, or follow it",
            "forge logs lr=0.1,seed=2 -f",
            "forge.cli.logs:main",
        ),
        "report": CliCommand(
            "write a sweep's timeline, metrics and stops into one HTML file",
            "forge report --metric val_acc:max",
            "forge.cli.report:main",
        ),
    },
    "Act": {
        "cancel": CliCommand(
            "end jobs: they save first, and do not start again by themselves",
            "forge cancel lr=0.1,seed=2",
            "forge.cli.cancel:main",
        ),
        "resume": CliCommand(
            "start the jobs of a sweep that have not finished again",
            "forge resume --dry-run",
            "forge.cli.resume:main",
        ),
    },
    "Check": {
        "rehearse": CliCommand(
            "interrupt and resume a script: are the results the same bits?",
            "forge rehearse -- python train.py",
            "forge.rehearse.command:main",
        ),
        "doctor": CliCommand(
            "check this node: disk, /dev/shm, GPUs, communication of ranks",
            "forge doctor",
            "forge.cli.doctor:main",
        ),
    },
    "Checkpoints": {
        "show": CliCommand(
            "print a checkpoint: step, time, size, is it intact, how to resume",
            "forge show outputs/2026-01-31/12-00-00",
            "forge.cli.checkpoints:show",
        ),
        "diff": CliCommand(
            "list the tensors and values in which two checkpoints differ",
            "forge diff checkpoints/step_100 checkpoints/step_200",
            "forge.cli.checkpoints:diff",
        ),
        "verify": CliCommand(
            "check the checksums of all checkpoints of a sweep or run",
            "forge verify outputs/2026-01-31/12-00-00",
            "forge.cli.verify:main",
        ),
    },
}
"""Group -> name -> command, in the order of `forge --help`."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
_HEAD = """\
usage: forge COMMAND [arguments]

forge lets a PyTorch training survive signals, preemption, time limits, NaNs
and kills, and end with the same bits as a run that nobody interrupted.
"""
_FOOT = """\
forge COMMAND --help   all arguments of a command
forge --version        the version of forge and of Python
"""


def help_text() -> str:
    """The text of `forge --help`, in at most 80 columns."""
    width = max(map(len, COMMANDS))
    lines = [_HEAD]
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        for name, command in group.items():
            lines.append(f"  {name:{width}}  {command.purpose}")
            lines.append(f"  {'':{width}}    $ {command.example}")
        lines.append("")
    return "\n".join([*lines, _FOOT])


def unknown(name: str) -> str:
    """The error for an unknown command, with the command that was probably meant."""
    close = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f" Did you mean `forge {close[0]}`?" if close else ""
    if not close and name.endswith(".py"):
        meant = f" To run a script: `forge exec -- python {name}`."
    kind = "option" if name.startswith("-") else "command"
    return f"there is no {kind} `{name}`.{meant} `forge --help` lists all commands."
