"""Adds forge's presets to every Hydra app: `defaults: [resilience: default, _self_]`."""

import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import forge


class ForgeSearchPath(SearchPathPlugin):
    """Appends forge's `conf` to the search path; a config has to select its presets."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once per app."""
        package = Path(forge.__file__).parent
        in_repository = package.parent / "conf"
        is_repository = (package.parent / "pyproject.toml").is_file() and in_repository.is_dir()
        # Prefer the repository's: an editable install can have a stale copy of conf.
        search_path.append("forge", str(in_repository if is_repository else package / "conf"))
        if any("=" in argument for argument in sys.argv[1:]):
            from forge.hydra_app import hints

            hints.arm(sys.argv[1:])
