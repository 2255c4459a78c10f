"""`hydra/launcher=slurm`: a sweep on a cluster."""
