"""`forge resume` after six things that happen to sweeps: the same bits, or a plain statement.

    python tests/proofs/resumed_sweeps.py [ROW…]

The launcher is killed; slurmctld is restarted; 3 of 20 jobs fail; the config is edited; the code is
edited; the directory is moved. Each time `forge resume` has to finish the sweep with the weights
and metrics of a sweep that nothing disturbed, and to print what it does. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from harness import until
from looked_at import CONF, TRAINING
from planted_jobs import forge
from showcase_jobs import table
from slurm_apps import CONF as CLUSTER_CONF
from slurm_apps import TRAIN as CLUSTER_TRAIN
from slurm_apps import SlurmApp
from started import ended_here
from sweeps import App, SweptJob, assert_same_job

import forge as library
from forge.jobdir.job_state import State

HEAD = ["what happened", "jobs", "started again", "what forge resume says", ""]
FAILS = """
    if cfg.seed in (3, 8, 13) and step == 17 and not Path(__file__).with_name("fixed").exists():
        raise ValueError("planted error")
"""
Result = tuple[App, list[SweptJob], str, str]
"""The app, its jobs undisturbed, the output of `forge resume`, and what has to be in it."""


class Sweeps:
    """Makes the apps, and the undisturbed sweeps to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undisturbed: dict[str, list[SweptJob]] = {}

    @contextlib.contextmanager
    def app(self, name: str, misbehave: str = "") -> Iterator[App]:
        """An app, whose processes end with it."""
        app = App(self.folder / name, TRAINING, CONF, misbehave)
        with contextlib.closing(app):
            yield app

    def undisturbed(self, overrides: str, number: int) -> list[SweptJob]:
        """The jobs of a sweep that nothing disturbed."""
        if overrides not in self._undisturbed:
            with self.app(f"undisturbed {len(self._undisturbed)}") as app:
                app.finish(overrides, "hydra.launcher.n_jobs=2")
                self._undisturbed[overrides] = [app.job(one) for one in range(number)]
        return self._undisturbed[overrides]


def states(app: App) -> list[State]:
    """The states of all jobs as `forge status` has them."""
    return [job.state for job in library.sweep(app.sweep_dir).jobs]


def resume(app: App, *words: str, env: dict[str, str] | None = None) -> str:
    """Run `forge resume` on the app's sweep; its output."""
    return forge("resume", app.sweep_dir, *words, cwd=app.folder, env=env)


def kill_launcher(app: App) -> None:
    """Start two jobs, one at a time, and kill the launcher while the first one trains."""
    app.hold(0, 12)
    sweep = app.start("lr=0.1,0.2", "hydra.launcher.n_jobs=1")
    app.job(0).wait_for_step(12)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    until(lambda: states(app) == [State.stopped, State.queued], "end of the orphan")
    (app.folder / "hold 0").unlink()


# -- the rows --------------------------------------------------------------------------------------


def launcher_killed(sweeps: Sweeps) -> Result:
    with sweeps.app("killed") as app:
        kill_launcher(app)
        text = resume(app)
        return app, sweeps.undisturbed("lr=0.1,0.2", 2), text, "starts again from step_13"


def slurmctld_restarted(sweeps: Sweeps) -> Result:
    cluster = Cluster(sweeps.folder / "slurm")
    try:
        reference = App(sweeps.folder / "here", CLUSTER_TRAIN, CLUSTER_CONF)
        (reference.folder / "places").mkdir()
        reference.finish(f"gates={reference.folder / 'places'}")
        with contextlib.closing(SlurmApp(cluster, sweeps.folder / "cluster")) as app:
            options = ("hydra.launcher.wait=false", "resilience.requeue.max_failures=0")
            app.start("kind=one", "+holds={one:1}", *options).wait()
            wait_for((app.gates / "one 0").exists, "step of the job")
            with cluster.controller_away():
                pass
            (job,) = app.jobs_by_place()
            before = resume(app, "--dry-run", env=app.environment)
            job.kill("task")
            wait_for(lambda: states(app) == [State.failed], "end of the job")
            text = before + resume(app, env=app.environment)
            wait_for(lambda: states(app) == [State.finished], "end of the resumed job", 250)
            return app, [reference.job(0)], text, "job 0: submitted as "
    finally:
        cluster.stop()


def three_of_twenty_failed(sweeps: Sweeps) -> Result:
    with sweeps.app("failed", FAILS) as app:
        app.run("seed=range(20)", "hydra.launcher.n_jobs=2")
        assert states(app).count(State.failed) == 3
        (app.folder / "fixed").touch()
        text = resume(app, "--failed", "n_jobs=2")
        return app, sweeps.undisturbed("seed=range(20)", 20), text, "17 jobs finished"


def config_edited(sweeps: Sweeps) -> Result:
    with sweeps.app("edited") as app:
        kill_launcher(app)
        conf = app.folder / "conf.yaml"
        conf.write_text(conf.read_text().replace("seed: 3", "seed: 4"))
        text = resume(app)
        return app, sweeps.undisturbed("lr=0.1,0.2", 2), text, "starts again from step_13"


def code_edited(sweeps: Sweeps) -> Result:
    with sweeps.app("code") as app:
        kill_launcher(app)
        script = app.folder / "train.py"
        script.write_text(script.read_text() + "\n# edited\n")
        text = resume(app)
        said = "The code has changed since job 0, 1 was launched: train.py"
        return app, sweeps.undisturbed("lr=0.1,0.2", 2), text, said


def directory_moved(sweeps: Sweeps) -> Result:
    with sweeps.app("moved") as app:
        kill_launcher(app)
        app.sweep_dir = app.sweep_dir.rename(app.folder / "elsewhere")
        text = resume(app)
        assert not (app.folder / "sweep").exists()
        return app, sweeps.undisturbed("lr=0.1,0.2", 2), text, "starts again from step_13"


ROWS: dict[str, Callable[[Sweeps], Result]] = {
    one.__name__: one
    for one in (
        *(launcher_killed, slurmctld_restarted, three_of_twenty_failed),
        *(config_edited, code_edited, directory_moved),
    )
}


def row(name: str, sweeps: Sweeps) -> tuple[list[str], bool]:
    """Run a row; its cells, and whether all jobs have the bits of the undisturbed ones."""
    app, undisturbed, text, said = ROWS[name](sweeps)
    jobs = library.sweep(app.sweep_dir).jobs
    problem = "" if said in text else f"did not say {said!r}:\n{text}"
    for job, other in zip(jobs, undisturbed, strict=True):
        try:
            assert_same_job(SweptJob(job.directory), other)
        except (AssertionError, OSError) as error:
            problem += f" job {job.number}: {error!r}"
    again = sum(job.attempts > 1 for job in jobs)
    line = next((one for one in text.splitlines() if said in one), "")
    cells = [name.replace("_", " "), str(len(jobs)), str(again), line[:90].replace(os.sep, "/")]
    return [*cells, problem or "same bits"], not problem


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    if problem := missing():
        print(problem)
        return 2
    with tempfile.TemporaryDirectory(prefix="forge-resumed-") as folder, ended_here():
        sweeps = Sweeps(Path(folder))
        rows = []
        for name in options.rows or ROWS:
            rows.append(row(name, sweeps))
            print(" | ".join(rows[-1][0]), flush=True)
        num_right = sum(is_right for _, is_right in rows)
        print(f"\n{table([cells for cells, _ in rows], HEAD)}\n\n{num_right} of {len(rows)}")
        return int(num_right < len(rows))


if __name__ == "__main__":
    sys.exit(main())
