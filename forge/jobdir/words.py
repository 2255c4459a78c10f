"""The command's arguments, which identify a job that has no config.

Under Hydra without a preset these are the overrides of the job.
"""

from __future__ import annotations

import re
import sys

from forge.compat import of_submitit
from forge.jobdir import job_dir

_LOCAL_RANK = ("--local-rank", "--local_rank")
_NUMBER = re.compile(r"-\.?\d")


def of_program() -> list[str] | None:
    """`sys.argv[1:]` without the local rank.

    Returns:
        None if they are not the user's: in a notebook, an interactive Python, a submitit task.
    """
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", "") == of_submitit.SUBMIT_MODULE:
        return None
    hydra = job_dir.hydra_config()
    if hydra is not None:
        typed = job_dir.as_typed(hydra.overrides.task)
        return [one for one in typed if not one.lstrip("+~").startswith("resilience.")]
    if getattr(main, "__file__", None) is None and sys.argv[:1] not in (["-c"], ["-"]):
        return None
    return _without_local_rank(sys.argv[1:])


def _without_local_rank(words: list[str]) -> list[str]:
    """Drop `--local-rank`, which `torch.distributed.launch` passes to each rank."""
    kept: list[str] = []
    is_value = False
    for word in words:
        name, has_value, _ = word.partition("=")
        if not is_value and name not in _LOCAL_RANK:
            kept.append(word)
        is_value = not is_value and name in _LOCAL_RANK and not has_value
    return kept


def by_option(words: list[str]) -> dict[str, object]:
    """The arguments as `--option` -> value, to show differences: `--seed: 0 before, 7 now`."""
    found: dict[str, list[str]] = {}
    option = ""
    number = 0
    for word in words:
        name, has_value, value = word.partition("=")
        is_option = word.startswith("-") and not _NUMBER.match(word)
        if is_option or (has_value and not option):  # --lr=1, and lr=1
            found.setdefault(name, []).extend([value] if has_value else [])
            option = "" if has_value else name
        elif option:
            found[option].append(word)
        else:
            number += 1
            found[f"(argument {number})"] = [word]
    return {name: " ".join(values) if values else True for name, values in found.items()}
