"""`hydra/launcher=local`: a thin plugin; the launcher itself is in forge/launch."""

from __future__ import annotations

from hydra.core.utils import JobReturn

from forge.launch.hydra_launcher import HydraLauncher, Request


class LocalLauncher(HydraLauncher):
    """Runs the jobs of a sweep on this machine; options: conf/hydra/launcher/local.yaml."""

    def run(self, request: Request) -> list[JobReturn]:
        """Run one batch of jobs to its end."""
        from forge.launch.local import (
            launcher,  # not at the top: every Hydra app imports this module
        )

        return launcher.launch(request)
