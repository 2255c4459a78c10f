"""Refuses what cannot be resumed exactly, by name, before the first step."""

from __future__ import annotations

import logging
from typing import NoReturn

import forge
from forge import messages


def refuse(what: str, problems: list[str]) -> NoReturn:
    """End the process with exit code 78.

    Args:
        what: What has the problems, as the first words of the message.
        problems: A sentence or more for each: what is wrong, and what to do.
    Raises:
        Exit: With all problems.
    """
    error = forge.ConfigError(problems, what)
    messages.say(str(error), logging.ERROR)
    raise forge.Exit(error.exit_code, str(error), error.reason)


def missing(name: str, packages: str, error: ImportError) -> ImportError:
    """The error of an integration whose package is not installed.

    Args:
        name: The integration.
        packages: The packages that it needs, as for pip.
        error: What importing them raised.
    """
    if not isinstance(error, ModuleNotFoundError):
        return error
    module = str(error.name).partition(".")[0]
    return ImportError(
        f"forge.integrations.{name} needs a package that is not installed ({module}). Run: pip"
        f" install {packages}"
    )
