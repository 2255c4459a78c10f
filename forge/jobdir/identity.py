"""The identity of a job: the program, the Run's name, and the user's config as written.

<job dir>/.forge/start.yaml  the job's config, under `written`
<job dir>/.forge/asked/      the new config of `resilience.resume=changed`, until it is accepted

Two starts are the same job if all three are equal, wherever output and code are. The config's
`hydra` and `resilience` do not count, and interpolations (`${now:…}`, `${base.lr}`) are compared as
text, since the keys they refer to are compared as well. The config is `config=` of forge.Run, else
Hydra's; without either, the command's arguments are compared.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError
from forge.jobdir.job_dir import as_typed, hydra_config
from forge.jobdir.job_files import RESUME, forge_dir

CONFIG, START = "config.yaml", "start.yaml"
"""The files of a job's config; `forge/hydra_app/frozen.py` describes their content."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FORGE_RESTART_COUNT")
_LOCAL_RANK = ("--local-rank", "--local_rank")


@dataclass(frozen=True)
class Identity:
    """Two starts with equal identities are the same job."""

    program: str
    name: str
    """The Run's name."""
    config: dict[str, Any] | None
    """Dotted key -> value; None if it is not known."""
    words: list[str] | None = None
    """The command's arguments if the config is not known; None if they are not known either."""

    @property
    def is_known(self) -> bool:
        """Whether the config or the arguments are known, and not only program and name."""
        return self.config is not None or self.words is not None


def current(job_dir: Path, name: str, config: dict[str, Any] | None = None) -> Identity:
    """The identity of the Run with this name in the job in `job_dir`.

    Args:
        config: `config=` of forge.Run by dotted keys; None if it was not passed.
    """
    for folder in (asked(job_dir), forge_dir(job_dir)):
        config = _read(folder) if config is None else config
    return Identity(_program(), name, config, _words() if config is None else None)


def is_change_wanted() -> bool:
    """Whether the environment allows this start to resume the job with a changed config.

    An automatic restart, which has the same environment, does not count.

    Raises:
        ConfigError: If the variable is neither `same` nor `changed`.
    """
    value = os.environ.get(RESUME) or "same"
    if value not in ("same", "changed"):
        raise ConfigError([f"`{RESUME}={value}`: expected same or changed"], "The environment")
    return value == "changed" and all((os.environ.get(one) or "0") == "0" for one in _RESTARTS)


def _program() -> str:
    """The script's name without its directory; for `python -m package` the package's name."""
    path = Path(sys.argv[0] or "python")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name.removesuffix(".py")


def as_written(cfg: Any) -> dict[str, Any]:
    """The user's part of a composed config, unresolved, by dotted keys."""
    from omegaconf import OmegaConf

    from forge.jobdir import flat_config

    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return flat_config.flat({str(key): one for key, one in tree.items()})[0]


# -- the command's arguments, if there is no config ------------------------------------------------


def _words() -> list[str] | None:
    """The command's arguments, without the local rank; under Hydra the job's overrides.

    Returns:
        None if they are not the user's: in a notebook, an interactive Python, a submitit task.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        from forge.compat import of_submitit

        if spec.name == of_submitit.SUBMIT_MODULE:
            return None
    hydra = hydra_config()
    if hydra is not None:
        typed = as_typed(hydra.overrides.task)
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


# -- in the job's directory ----------------------------------------------------------------------


def asked(job_dir: Path) -> Path:
    """The folder of a requested new config, with the same files as the job's current one."""
    return forge_dir(job_dir) / "asked"


def _read(folder: Path) -> dict[str, Any] | None:
    from forge.jobdir import config_file

    try:
        written = config_file.read(folder / START, is_executed=False).get("written")
    except FileNotFoundError:
        return None
    return written if isinstance(written, dict) else None


def stored(job_dir: Path) -> dict[str, Any] | None:
    """The config as written at the job's first start; None if it is not known."""
    return _read(forge_dir(job_dir))


def forget_asked(job_dir: Path) -> None:
    """Discard a requested config: the job keeps its current one."""
    shutil.rmtree(asked(job_dir), ignore_errors=True)


def take_asked(job_dir: Path) -> None:
    """Replace the job's config by the requested one, if there is one."""
    # In this order: if a kill leaves the new config with the old identity, the next start refuses.
    for name in (CONFIG, START):
        path = asked(job_dir) / name
        if path.exists():
            path.replace(forge_dir(job_dir) / name)
    forget_asked(job_dir)
