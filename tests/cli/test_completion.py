"""Completion in a real shell."""

import functools
import os
import shutil
import subprocess
import sys

import pytest
import warm
from harness import FORGE

SCRIPT = [sys.executable, FORGE, "completion"]


@functools.cache
def script(shell):
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = warm.run([*SCRIPT, shell], text=True, timeout=60, **both)
    assert done.returncode == 0, done.stdout
    return done.stdout


def completed(*words):
    """The completions of the last word in bash."""
    source = script("bash")
    line = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _forge; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{source}\n{ask}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_the_options_of_each():
    """Also options that the usage line abbreviates."""
    assert completed("forge", "st") == ["status"]
    assert {"status", "why", "--version"} <= set(completed("forge", ""))
    assert completed("forge", "logs", "--f") == ["--follow"]
    assert "--times" in completed("forge", "rehearse", "-")
    assert completed("forge", "resume", "--d") == ["--dry-run"]
    assert completed("forge", "status", "multi") == []  # then the shell completes paths


def test_a_shell_that_starts_does_not_wait_for_torch():
    """The script is in ~/.bashrc; torch takes seconds to import."""
    command = [sys.executable, "-X", "importtime", *SCRIPT[1:], "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "forge.rehearse.plan" in imported
    assert {"torch", "numpy", "submitit"}.isdisjoint(imported)
    assert [line for line in done.stderr.splitlines() if not line.startswith("import time:")] == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_names_all_commands(shell):
    """If the shell is installed, it accepts the script."""
    text = script(shell)
    assert "rehearse" in text
    assert "group-by" in text
    if shutil.which(shell):
        flags = ["-n"] if shell == "fish" else ["-f", "-n"]
        subprocess.run([shell, *flags], input=text, text=True, check=True, env=os.environ)
