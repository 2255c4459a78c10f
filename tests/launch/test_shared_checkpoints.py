"""Jobs of a sweep that would save into one directory: one's weights would become the other's."""

import pytest
from sweeps import App


@pytest.fixture
def app(tmp_path):
    return App(tmp_path / "app")


def test_a_sweep_whose_jobs_share_a_directory_is_refused_before_any_starts(app):
    """Also where they run one after the other, and where the paths only look different."""
    (app.folder / "link").symlink_to(app.folder)
    done = app.run(
        *("lr=0.1,0.2", "hydra.launcher.n_jobs=1"),
        f"resilience.checkpoint.dir={app.folder}/ck,{app.folder}/link/../app/ck",
    )
    assert done.returncode == 78, done.stdout
    for said in ("jobs 0 (lr=0.1", "3 (lr=0.2", f"save to {app.folder}/ck", "${hydra:job.num}"):
        assert said in done.stdout
    assert not (app.folder / "ck").exists()
    assert not (app.sweep_dir / "0").exists()


def test_a_directory_with_the_number_in_it_is_each_job_s_own_and_found_again(app):
    """What the refusal advises works, for a sweep that is run again, too."""
    where = f"resilience.checkpoint.dir='{app.folder}/ck/${{hydra:job.num}}'"
    overrides = ("lr=0.1,0.2", "steps=20", where)
    app.finish(*overrides)
    assert sorted(path.name for path in (app.folder / "ck").iterdir()) == ["0", "1"]
    assert "2 of 2 finished" in app.finish(*overrides)


def test_a_batch_whose_jobs_share_the_directory_of_an_earlier_one_does_not_start(app):
    """Sweepers hand the launcher one batch after the other."""
    done = app.run(
        *("lr=0.1,0.2", "steps=3", "hydra.sweeper.max_batch_size=1"),
        f"resilience.checkpoint.dir={app.folder}/ck",
    )
    assert done.returncode == 78, done.stdout
    assert "jobs 0 (an earlier batch) and 1 (" in done.stdout
    assert f"would all save to {app.folder}/ck" in done.stdout
    assert not (app.sweep_dir / "1").exists()
