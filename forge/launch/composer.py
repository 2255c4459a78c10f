"""Composes the configs of a batch's jobs: a few by Hydra, the others from copies of those.

For each job, Hydra reads all YAML files and defaults lists again: 50 ms and more. Jobs that choose
the same config groups form a family. Its jobs differ only in overrides like `lr=0.1`, which do not
change what is read: Hydra assigns the values to the composed config, in order. So the family's
choices are composed once, and each job's overrides are assigned to a copy.

Two jobs of each family are also composed by Hydra and compared with their copies, down to the types
of all nodes. If there is a difference, Hydra composes every job of the family. Hydra also composes
jobs with an override of any other kind (a deletion, `hydra.…`), and small families.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_LEAST = 5
"""Jobs in a family whose configs are copied; of fewer jobs, Hydra composes all."""
_ASSIGNING = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


@dataclass
class _Family:
    """Jobs with the same choices of config groups."""

    members: list[list[str]] = field(default_factory=list)
    """The overrides of each job."""
    is_checked: bool = False
    base: bytes | None = None
    """The pickled config without the assigned values; None: Hydra composes every member."""


class Composer:
    """The composed configs of a batch.

    Args:
        loader: Hydra's config loader.
        sweep_config: The sweep's config, composed by Hydra.
        batch: The overrides of the jobs to compose.
    """

    def __init__(
        self, loader: ConfigLoader, sweep_config: DictConfig, batch: Iterable[Sequence[str]]
    ) -> None:
        self._loader, self._sweep_config = loader, sweep_config
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._families: dict[tuple[str, ...] | None, _Family] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        """Configs that Hydra has composed for a comparison, by the overrides of their jobs."""
        for overrides in map(list, batch):
            self._parse(overrides)
            family = self._families.setdefault(self._choices(overrides), _Family())
            family.members.append(overrides)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config of a job of the batch, as `ConfigLoader.load_sweep_config` composes it."""
        choices = self._choices(overrides)
        family = self._families[choices]
        if choices is not None and not family.is_checked:
            family.is_checked = True
            self._prepare(family, choices)
        ready = self._composed.pop(tuple(overrides), None)
        if ready is not None:
            return ready
        derived = None if family.base is None else self._derive(family.base, overrides)
        return self._compose(overrides) if derived is None else derived

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        return self._loader.load_sweep_config(self._sweep_config, list(overrides))

    # -- which overrides only assign values ----------------------------------------------------

    def _parse(self, overrides: list[str]) -> None:
        new = [one for one in overrides if one not in self._parsed]
        self._parsed |= zip(new, OverridesParser.create().parse_overrides(new), strict=True)

    def _choices(self, overrides: Sequence[str]) -> tuple[str, ...] | None:
        """The overrides that choose config groups; None if copies cannot be used."""
        found = []
        for text in overrides:
            one = self._parsed[text]
            if one.is_hydra_override() or one.is_sweep_override():
                return None
            if one.package is not None or self._is_group(one.key_or_group):
                found.append(text)
            elif one.type not in _ASSIGNING or one.key_or_group == "hydra":
                return None
        return tuple(found)

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            hydra: Any = self._sweep_config.hydra
            overrides: Any = OmegaConf.to_container(hydra.overrides.hydra)
            name = hydra.job.config_name
            options = self._loader.get_group_options(key, None, name, overrides)
            self._groups[key] = bool(options)
        return self._groups[key]

    # -- copies --------------------------------------------------------------------------------

    def _prepare(self, family: _Family, choices: tuple[str, ...]) -> None:
        """Compose the base of a family, and compare two of its jobs with copies."""
        if len(family.members) < _LEAST:
            return
        try:
            base = pickle.dumps(self._compose(choices))
        except HydraException:
            return  # it needs a value of the jobs
        except Exception:  # noqa: BLE001 - whatever an object of the user raises if it is pickled
            return
        for overrides in (family.members[len(family.members) // 2], family.members[-1]):
            try:
                composed = self._composed[tuple(overrides)] = self._compose(overrides)
                if not is_same(self._derive(base, overrides), composed):
                    return
            except HydraException:
                return  # a refusal of Hydra's is raised when that job is composed
        family.base = base

    def _derive(self, base: bytes, overrides: Sequence[str]) -> DictConfig | None:
        """A copy of the base with the values of a job; None if Hydra has to compose the job."""
        try:
            return self._assign(pickle.loads(base), overrides)
        except OmegaConfBaseException:
            return None  # Hydra has the message for it

    def _assign(self, cfg: Any, overrides: Sequence[str]) -> DictConfig | None:
        """The base with the values of a job, assigned as Hydra does; None if that is not known."""
        parsed = [self._parsed[one] for one in overrides]
        for one in parsed:
            key, value = one.key_or_group, one.value()
            if one.package is not None or self._is_group(key):
                continue
            is_present = one.is_add() and OmegaConf.select(cfg, key) is not None
            if is_present and not isinstance(value, (dict, list)):
                return None
            is_new = one.type is not OverrideType.CHANGE
            OmegaConf.update(cfg, key, value, merge=True, force_add=is_new)
        job, task = cfg.hydra.job, cfg.hydra.overrides.task
        task.clear()
        for text in overrides:
            task.append(text)
        if not OmegaConf.is_interpolation(job, "override_dirname"):  # as before Hydra 1.4
            form = job.config.override_dirname
            texts = [one.input_line for one in parsed if one.key_or_group not in form.exclude_keys]
            joined = form.item_sep.join(sorted(map(str, texts)))
            job.override_dirname = joined.replace("=", form.kv_sep)
        return cfg  # type: ignore[no-any-return]


class _Comparing(pickle.Pickler):
    def persistent_id(self, node: Any) -> int | None:
        """A text as a number, so that it makes no difference which equal texts are one object."""
        return int.from_bytes(b"1" + node.encode(), "big") if type(node) is str else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two configs are equal: all values, unresolved, and the types and flags of all nodes.

    Compares their pickles. If an object cannot be pickled, they count as different.
    """
    found = []
    for config in (one, other):
        buffer = io.BytesIO()
        try:
            _Comparing(buffer).dump(config)
        except Exception:  # noqa: BLE001 - whatever an object of the user raises
            return False
        found.append(buffer.getvalue())
    return found[0] == found[1]
