"""`hydra.launcher.snapshot`: jobs run from a copy of the code as it was at the launch."""

import json
import subprocess

import pytest
from sweeps import App

import forge
from forge.errors import ConfigError
from forge.jobdir.job_state import State
from forge.launch import snapshot

TRAIN = """
    from pathlib import Path
    import hydra
    import helper

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        here = Path(__file__)
        words = [helper.WORD, here.with_name("tracked.txt").read_text(), Path("data/x").read_text()]
        print(*words, Path.cwd() == here.parent)
        if cfg.fails and not Path("data/well").exists():
            raise ValueError("not well")
        while not Path("data/go").exists():
            pass

    if __name__ == "__main__":
        main()
"""
CONF = "defaults: [{resilience: default}, _self_]\ni: 0\nfails: false\n"


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path / "app", TRAIN, CONF)
    git(app.folder, "init")
    (app.folder / ".gitignore").write_text("data/\n__pycache__\n")
    (app.folder / "helper.py").write_text('WORD = "old"\n')
    (app.folder / "tracked.txt").write_text("first")
    (app.folder / "data").mkdir()
    (app.folder / "data" / "x").write_text("data")
    git(app.folder, "add", ".gitignore", "train.py", "tracked.txt")  # helper.py is new
    yield app
    app.close()


def edit(app):
    (app.folder / "helper.py").write_text('WORD = "new"\n')
    (app.folder / "tracked.txt").write_text("second")


def printed(job):
    text = (job.directory / "output.log").read_text()
    return [line for line in text.splitlines() if line.startswith(("old", "new"))]


def test_a_job_that_waits_is_not_changed_by_an_edit(app):
    """A person goes on working while two hundred jobs wait."""
    sweep = app.start("i=0,1", "hydra.launcher.n_jobs=1", "hydra.launcher.snapshot=true")
    sweep.wait_for(lambda: (app.sweep_dir / "0" / "output.log").exists(), "the first job")
    edit(app)
    (app.folder / "data" / "go").touch()
    assert sweep.wait() == 0, sweep.output
    read = forge.sweep(app.sweep_dir)
    assert [printed(job) for job in read.jobs] == [["old first data True"]] * 2
    assert read.snapshot.startswith(f"{app.sweep_dir}/.forge/code/")
    assert f"copy of the code: <code>{read.snapshot}" in report(app)


def report(app):
    app.forge("report", str(app.sweep_dir), "--output", "report.html")
    return (app.folder / "report.html").read_text()


def test_forge_resume_uses_the_same_copy_also_in_a_moved_sweep(app):
    """The job goes on as the same experiment."""
    (app.folder / "data" / "go").touch()
    assert app.run("i=0", "fails=true", "hydra.launcher.snapshot=true").returncode == 1
    edit(app)
    (app.folder / "data" / "well").touch()
    moved = app.sweep_dir.rename(app.folder / "data" / "moved")
    said = app.forge("resume", str(moved))
    (job,) = forge.sweep(moved).jobs
    assert job.state is State.finished, said
    assert printed(job) == ["old first data True"] * 2
    assert "The code has changed" not in said
    assert str(moved) in json.loads((job.directory / ".forge" / "plan.json").read_text())["cwd"]


def test_the_next_launch_copies_what_has_changed(app):
    """A corrected mistake has to reach the job that failed for it."""
    (app.folder / "data" / "go").touch()
    options = ["i=0", "fails=true", "hydra.launcher.snapshot=true"]
    assert app.run(*options).returncode == 1
    (app.folder / "data" / "well").touch()
    edit(app)
    app.finish(*options)
    (job,) = forge.sweep(app.sweep_dir).jobs
    assert printed(job) == ["old first data True", "new second data True"]


def test_only_code_is_copied(app, monkeypatch):
    """Neither what git ignores, nor the sweep, nor a file that was removed."""
    app.sweep_dir.mkdir()
    (app.sweep_dir / "result").touch()
    (app.folder / "tracked.txt").unlink()
    monkeypatch.chdir(app.folder)
    copy = snapshot.make(app.sweep_dir).copy
    assert sorted(path.name for path in copy.iterdir()) == [
        *(".gitignore", "conf.yaml", "data", "helper.py", "train.py")
    ]
    assert (copy / "data").is_symlink()
    assert snapshot.make(app.sweep_dir).copy == copy  # nothing has changed


def test_what_cannot_be_copied_is_refused_before_a_job_starts(app, monkeypatch, tmp_path):
    """With the limit, the largest files, and what to do."""
    monkeypatch.setattr(snapshot, "_MOST_MIB", 1)
    monkeypatch.chdir(app.folder)
    (app.folder / "weights.bin").write_bytes(bytes(2 * 2**20))
    with pytest.raises(ConfigError, match=r"2 MiB, and the limit is 1 MiB.*weights.bin \(2 MiB\)"):
        snapshot.make(app.sweep_dir)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="not a git repository"):
        snapshot.make(app.sweep_dir)
