"""A fixture: the results of a job that nobody interrupts."""

from slurm_apps import undisturbed  # noqa: F401 - a fixture
