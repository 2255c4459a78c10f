"""A stop that comes while the job's process still imports."""

import signal

from harness import until
from main_scripts import make

TRAIN = """
    import os, time
    from pathlib import Path
    import hydra

    here = Path(__file__).parent
    if __name__ == "__mp_main__" and not (here / "importing").exists():
        (here / "importing").touch()
        try:
            time.sleep(600)
        except BaseException:  # as libraries have it around what they could do without
            (here / "swallowed").touch()

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        return os.environ["FORGE_RESTART_COUNT"]

    if __name__ == "__main__":
        main()
"""
CONF = "defaults: [{resilience: default}, _self_]\nresilience: {health: {enabled: false}}\n"


def test_a_signal_in_the_middle_of_an_import_is_no_error_of_the_import(tmp_path):
    """It would be swallowed there, or look like a script that ends as it is imported."""
    app = make(tmp_path / "app", TRAIN, CONF)
    sweep = app.start("+x=1")
    until((app.folder / "importing").exists, "import")
    app.job(0).kill("task", signal.SIGUSR1)
    assert sweep.wait() == 0, sweep.output
    assert app.job(0).state["counts"]["preemptions"] == 1
    assert not (app.folder / "swallowed").exists()
