"""Private parts of submitit."""


def submit_module() -> str:
    """The module that `python -m` runs for a submitit job; its argument is the job's folder.

    If it goes: see which command `submitit.SlurmExecutor` puts into its batch script.
    """
    return "submitit.core._submit"
