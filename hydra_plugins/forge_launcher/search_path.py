"""Lets every Hydra app choose a preset: `defaults: [resilience: default, _self_]`."""

import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import forge


class ForgeSearchPath(SearchPathPlugin):
    """Appends forge's `conf`; nothing in it is active until a config asks for it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once per app."""
        package = Path(forge.__file__).parent
        in_repository = package.parent / "conf"
        is_repository = (package.parent / "pyproject.toml").is_file() and in_repository.is_dir()
        # An editable install may hold a copy of conf inside the package: it would be stale.
        search_path.append("forge", str(in_repository if is_repository else package / "conf"))
        if any("resilience." in argument for argument in sys.argv[1:]):
            from forge.hydra_app import hints

            hints.arm(sys.argv[1:])
