"""`hydra/launcher=slurm`: a thin plugin; the launcher itself is in forge/launch."""

from __future__ import annotations

from hydra.core.utils import JobReturn

from forge.launch.hydra_launcher import HydraLauncher, Request


class SlurmLauncher(HydraLauncher):
    """Runs the jobs of a sweep on a cluster; options: conf/hydra/launcher/slurm.yaml."""

    def run(self, request: Request) -> list[JobReturn]:
        """Run one batch of jobs to its end."""
        from forge.launch.slurm import (
            launcher,  # not at the top: every Hydra app imports this module
        )

        return launcher.launch(request)
