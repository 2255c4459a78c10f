"""A job of a sweep that ends by itself: files are written, objects are let go, as anywhere."""

import gzip

from sweeps import App

TRAIN = """
    import atexit, gzip, io, os, sys
    from pathlib import Path
    import hydra

    IS_JOB = "FORGE_JOB_TOKEN" in os.environ  # the launcher imports this as well
    OUT = Path(os.environ.get("FORGE_JOB_DIR", "."))

    class Logger:
        def __init__(self):
            self.me = self  # only the collector would find it
            self.text = open(OUT / "log.txt", "w")
            self.packed = io.TextIOWrapper(gzip.open(OUT / "log.gz", "wb"))
            self.text.write("begun, ")
            self.packed.write("begun, ")

    class Trainer:
        def __init__(self):
            self.me = self

        def __del__(self):
            (OUT / "let go").touch()

    if IS_JOB:  # and the launchers freeze what there is before main runs
        logger = Logger()
        atexit.register(lambda: logger.text.write("the last word"))

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        trainer = Trainer()
        if cfg.ends == "raises":
            raise ValueError("no such luck")
        if cfg.ends == "exits":
            sys.exit(7)

    if __name__ == "__main__":
        main()
"""


def test_it_leaves_nothing_half_done(tmp_path):
    """Whether main returns, raises or exits."""
    app = App(tmp_path / "app", TRAIN, "{ends: returns}")
    try:
        done = app.run("ends=returns,raises,exits")
    finally:
        app.close()
    jobs = [app.job(number) for number in range(3)]
    assert [job.state["state"] for job in jobs] == ["finished", "failed", "failed"], done.stdout
    for job in jobs:
        assert (job.directory / "log.txt").read_text() == "begun, the last word"
        with gzip.open(job.directory / "log.gz", "rt") as file:
            assert file.read() == "begun, "
        assert (job.directory / "let go").exists()


ASKS = """
    if step == 12 and not RESTARTS:
        os.kill(os.getpid(), signal.SIGUSR1)
    if step == 20:
        raise ValueError("no such luck")
"""


def test_a_job_that_its_launcher_starts_again_tells_nobody_to_do_so(tmp_path, undisturbed):
    """A command to resume by hand, just before forge does it: two would run at once.

    `kill -USR1` is the way to move a job by hand.
    """
    app = App(tmp_path / "app", misbehave=ASKS)
    try:
        done = app.run()
    finally:
        app.close()
    assert done.returncode == 1
    assert app.job(0).state["counts"]["preemptions"] == 1
    metrics = undisturbed["0.1"].metrics
    assert app.job(0).metrics == {step: metrics[step] for step in range(20)}
    output = app.job(0).output
    asked = output.index("stopped by SIGUSR1 at step 13, exit code 75.\n")
    again = output.index("forge: a requeue was requested: restarting (restart 1)\n")
    assert asked < again < output.index("forge: failed: ValueError: no such luck\n")
    assert "train.py hydra.run.dir=" not in output
    assert "To resume this sweep after a stop:" in done.stdout


ENDS = """
    import os, signal, sys
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        Path(f"ran {cfg.ends}").touch()
        if cfg.ends == "raises":
            raise ValueError("no such luck")
        if cfg.ends == "halted":
            sys.exit(65)
        if cfg.ends == "cancelled":
            sys.exit(143)

    if __name__ == "__main__":
        main()
"""


def test_the_command_to_resume_says_which_jobs_it_starts_again(tmp_path):
    """Whoever has cancelled a job, or sees that it was halted, may not want it back."""
    app = App(tmp_path / "app", ENDS, "defaults: [{resilience: default}, _self_]\nends: returns\n")
    try:
        note = "+note='\x1b[31m'"  # what a terminal would obey is shown escaped
        done = app.run("ends=returns,raises,halted,cancelled", note)
        assert done.returncode == 1
        assert "To resume (starts again: 1 failed, 1 halted, 1 cancelled):\n" in done.stdout
        ran = set(app.folder.glob("ran *"))
        assert len(ran) == 4
        for path in ran:
            path.unlink()
        assert all(line.isprintable() for line in done.stdout.splitlines()), done.stdout
        again = app.go_on(done.stdout, in_shell=True)
        assert set(app.folder.glob("ran *")) == ran - {app.folder / "ran returns"}, again.stdout
    finally:
        app.close()
