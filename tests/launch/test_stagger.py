"""`hydra.launcher.stagger_s`: jobs start some seconds apart."""

import threading

import pytest
from sweeps import App

import forge
from forge.slurm import stagger

LIGHT = """
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        pass

    if __name__ == "__main__":
        main()
"""


def test_local_jobs_start_apart_although_there_are_free_slots(tmp_path):
    """Twenty jobs that read the same file at once take longer than twenty in a row."""
    app = App(tmp_path / "app", LIGHT, "lr: 0.1\n")
    try:
        app.finish("lr=0.1,0.2,0.3", "hydra.launcher.n_jobs=3", "hydra.launcher.stagger_s=2")
    finally:
        app.close()
    starts = sorted(job.history()[0].began for job in forge.sweep(app.sweep_dir).jobs)
    assert starts[1] - starts[0] > 1
    assert starts[2] - starts[0] > 3


def test_each_job_takes_the_next_turn(tmp_path):
    """On a cluster they start at the same time on other machines."""
    path = tmp_path / "next_start"
    assert [stagger.delay_s(path, 10, now=100.0) for _ in range(3)] == [0, 10, 20]
    assert stagger.delay_s(path, 10, now=125.0) == 5
    assert stagger.delay_s(path, 10, now=500.0) == 0


def test_two_jobs_never_take_the_same_turn(tmp_path):
    """They reach the file together."""
    path, found = tmp_path / "next_start", []
    jobs = [
        threading.Thread(target=lambda: found.append(stagger.delay_s(path, 1, now=0.0)))
        for _ in range(8)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize("content", ["", "torn", "nan", "1e12"])
def test_a_damaged_file_costs_an_hour_at_most(tmp_path, content):
    """A node whose clock is years ahead must not keep the others waiting."""
    path = tmp_path / "next_start"
    path.write_text(content)
    assert 0 <= stagger.delay_s(path, 10, now=100.0) <= 3600
