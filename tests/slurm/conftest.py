"""What a job ends with that nobody interrupts."""

from slurm_apps import undisturbed  # noqa: F401 - a fixture
