"""What Hydra's sweeper composes for its own check of a batch, kept for the launcher.

Composing a config takes tens of milliseconds, and the sweeper throws away what it composed; a
launcher would compose everything a second time.
"""

from __future__ import annotations

from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig

_MOST = 4000
"""Configs that are kept, at about 0.2 MB each; those beyond are composed again."""


class Remembering:
    """Stands before Hydra's config loader, and is that loader in everything else."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._composed: dict[tuple[int, tuple[str, ...]], DictConfig] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __reduce__(self) -> Any:
        return _same, (self._loader,)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """As the loader does it; `take` finds the result."""
        cfg: DictConfig = self._loader.load_sweep_config(master_config, sweep_overrides)
        if len(self._composed) < _MOST:
            self._composed[id(master_config), tuple(sweep_overrides)] = cfg
        return cfg

    def take(self, master_config: DictConfig, overrides: list[str]) -> DictConfig:
        """The config for these overrides, for whoever takes it alone."""
        kept = self._composed.pop((id(master_config), tuple(overrides)), None)
        if kept is not None:
            return kept
        return self._loader.load_sweep_config(master_config, overrides)  # type: ignore[no-any-return]


def _same(loader: Any) -> Any:
    return loader


def watch(context: HydraContext) -> None:
    """Remember from now on what is composed with this context."""
    if not isinstance(context.config_loader, Remembering):
        context.config_loader = Remembering(context.config_loader)  # type: ignore[assignment]


def take(context: HydraContext, master_config: DictConfig, overrides: list[str]) -> DictConfig:
    """A job's config: remembered, or composed now."""
    loader: Any = context.config_loader
    if isinstance(loader, Remembering):
        return loader.take(master_config, overrides)
    return loader.load_sweep_config(master_config, overrides)  # type: ignore[no-any-return]
