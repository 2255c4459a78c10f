"""Directories and values that have to be quoted for Hydra as well as for the shell."""

from hydra_apps import App


def test_a_directory_with_letters_that_hydra_does_not_know_is_resumed(tmp_path):
    """Hydra's lexer takes ASCII alone without quotes."""
    app = App(tmp_path / "app")
    stopped = app.run("hydra.run.dir='jürgen, x=1'", "signal_in=3")
    assert stopped.returncode == 143, stopped.stdout
    resumed = app.resume(stopped.stdout, in_shell=True)
    assert resumed.returncode == 0, resumed.stdout
    assert (app.folder / "jürgen, x=1/weights.pt").exists()


def test_an_override_with_an_interpolation_is_repeated_as_it_was_typed(tmp_path):
    """Resolved, its value may read as a sweep."""
    app = App(tmp_path / "app")
    config = app.folder / "train.yaml"
    config.write_text(config.read_text() + 'other: "x, y"\n')
    stopped = app.run("hydra.run.dir=job", "signal_in=3", "name=${other}")
    assert stopped.returncode == 143, stopped.stdout
    resumed = app.resume(stopped.stdout, in_shell=True)
    assert resumed.returncode == 0, resumed.stdout
    assert len(set(app.seen("job"))) == 1
