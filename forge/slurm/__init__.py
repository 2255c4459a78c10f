"""A job on a cluster: Slurm's commands, the wrapper in the batch script, the steps."""
