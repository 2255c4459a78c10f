"""Jobs that make no progress, as true processes: found, shown, and started again or ended."""

import pytest
from hanging_apps import COMPILES, HangingApp, HangingJob, stopped, traced
from harness import assert_same_bits, made_once, until


@pytest.fixture
def make(tmp_path):
    apps = []

    def made(tasks=1, **more):
        apps.append(HangingApp(tmp_path / "app", tasks, **more))
        return apps[-1]

    yield made
    for app in apps:
        app.close()


def undisturbed(shared_folder, tasks=1, *overrides):
    """A job without a hang."""

    def run(folder):
        HangingApp(folder / "app", tasks).finish("lr=0.1", *overrides)

    name = "_".join(("undisturbed_hangs", str(tasks), *overrides))
    return HangingJob(made_once(shared_folder / name, run) / "app/sweep/0")


def assert_same_end(job, other, size=1):
    for rank in range(size):
        assert_same_bits(job.weights_of(rank), other.weights_of(rank))
    assert job.metrics == other.metrics


PLACES = [
    ("step", "lock"),
    *(
        pytest.param(where, how, marks=pytest.mark.proofs)
        for where in ("start_up", "step", "save", "evaluation")
        for how in ("lock", "pipe", "gil")
        if (where, how) != ("step", "lock")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "how"), PLACES)
def test_a_hang_names_its_line_and_the_restart_ends_with_the_same_bits(
    make, shared_folder, where, how
):
    """Nobody has to notice it, and nothing is lost but the time until it is found."""
    app = make()
    app.finish(f"hang.where={where}", f"hang.how={how}")
    job = app.job(0)
    assert_same_end(job, undisturbed(shared_folder))
    (hang,) = job.hangs
    assert (hang["rank"], hang["section"], hang["action"]) == (0, where, "restart")
    assert app.line(how) in job.output
    name = app.line(how).rpartition(" ")[2]
    assert f"in {name}" in job.stacks(0)
    assert (
        f"in {name}"
        in job.output.partition("the job hangs and is killed. The stacks of all its threads:")[2]
    )
    assert "In the kernel:\n  thread " in job.stacks(0)
    assert [one["reason"] for one in job.events("end")] == ["hung", "finished"]
    counts = job.state["counts"]
    assert (counts["hangs"], counts["restarts"], counts["failures"]) == (1, 1, 0)
    assert job.is_free()


RANKED = [
    ("step", "gil", True, 2),
    *(
        pytest.param(where, how, ddp, 4, marks=pytest.mark.proofs)
        for where in ("start_up", "step", "save", "evaluation")
        for how in ("lock", "gil")
        for ddp in (True, False)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "how", "ddp", "size"), RANKED)
def test_one_rank_of_several_hangs_and_is_the_one_that_is_named(
    make, shared_folder, where, how, ddp, size
):
    """The others wait in a collective, of torch's or of forge's: their stacks say nothing."""
    app = make(size)
    culprit = size // 2
    options = () if ddp else ("hang.ddp=false",)
    app.finish(f"hang.where={where}", f"hang.how={how}", f"hang.rank={culprit}", *options)
    job = app.job(0)
    assert_same_end(job, undisturbed(shared_folder, size, *options), size)
    (hang,) = job.hangs
    assert (hang["rank"], hang["section"]) == (culprit, where), job.summary()
    assert app.line(how) in job.output
    found = job.summary()
    assert sorted(found["ranks"]) == [str(rank) for rank in range(size)]
    for rank in range(size):
        assert "most recent call first" in job.stacks(rank)
    if not ddp:
        waiting = {one["section"] for rank, one in found["ranks"].items() if rank != str(culprit)}
        assert waiting == {"collective"}, found
    assert [one["reason"] for one in job.events("end")] == ["hung", "finished"]


@pytest.mark.slow
def test_halt_ends_the_job_with_70(make):
    """With `action=halt`, a user can examine the hang before the job runs again."""
    app = make()
    done = app.run("hang.where=step", "resilience.hang.action=halt")
    job = app.job(0)
    assert done.returncode != 0
    state = job.state
    assert (state["state"], state["code"], state["reason"]) == ("failed", 70, "hung")
    assert state["counts"]["restarts"] == 0
    assert "resilience.hang.action=halt" in state["because"]
    assert app.line("lock") in state["because"]


@pytest.mark.slow
def test_the_same_hang_again_ends_the_job(make):
    """The job would hang at this step every time, so it ends after one of three restarts."""
    app = make()
    done = app.run("hang.where=step", "hang.times=9", "hang.at=15")
    job = app.job(0)
    assert done.returncode != 0
    state = job.state
    assert (state["state"], state["code"], state["reason"]) == ("failed", 70, "hung")
    assert state["counts"]["hangs"] == 1
    assert "it hung at step 15 twice" in state["because"]
    assert len(job.hangs) == 2


@pytest.mark.slow
def test_warn_logs_it_once_and_lets_the_job_go_on(make, shared_folder):
    """A job that was only slow loses nothing."""
    app = make()
    sweep = app.start("hang.where=step", "hang.how=slow", "resilience.hang.action=warn")
    job = app.job(0)
    sweep.wait_for(lambda: "rank 0 hangs" in job.state.get("hang", ""), "the hang")
    hang = job.state["hang"]
    sweep.wait_for(lambda: f"job 0: {hang} ({job.directory})" in sweep.output, "its line")
    (app.folder / "go").touch()
    assert sweep.wait() == 0, sweep.output
    assert sweep.output.count("rank 0 hangs") == 1
    assert_same_end(job, undisturbed(shared_folder))
    assert job.state["counts"]["restarts"] == 0
    assert len(job.hangs) == 1
    assert job.output.count("rank 0 hangs") == 1
    assert not list((job.directory / ".forge").glob("hang/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suspended", "size"),
    [(stopped, 2), *(pytest.param(one, 4, marks=pytest.mark.proofs) for one in (stopped, traced))],
)
def test_a_suspended_rank_is_no_hang_whatever_the_others_wait_for(
    make, shared_folder, suspended, size
):
    """Gang scheduling and debuggers stop processes, and let them go on."""
    app = make(size)
    culprit = size // 2
    where = ("hang.where=step", "hang.how=slow", f"hang.rank={culprit}")
    sweep = app.start(*where, "resilience.hang.timeout_s=5")
    job = app.job(0)
    mark = job.directory / "stands 0"
    sweep.wait_for(lambda: mark.exists() and mark.read_text(), "the rank")
    excuses = lambda: [one["because"] for one in job.events("no hang")]  # noqa: E731
    excuse = f"rank {culprit} is stopped, or in a debugger"
    with suspended(int(mark.read_text())):
        (app.folder / "go").touch()  # nothing but the suspension holds it
        # Earlier queries can name a rank that was slow to start.
        until(lambda: excuses().count(excuse) >= 2, "two queries")
    assert sweep.wait() == 0, sweep.output
    assert_same_end(job, undisturbed(shared_folder, size), size)
    assert job.hangs == []
    assert not (job.directory / "hangs").exists()


@pytest.mark.proofs
@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 4])
def test_ten_long_compilations_are_no_hang(make, shared_folder, tasks):
    """Each takes longer than a step may; the other ranks wait in a collective meanwhile."""
    app = make(tasks, misbehave=COMPILES)
    limits = ("resilience.hang.timeout_s=2", "resilience.hang.start_s=30")
    app.finish(*limits)
    job = app.job(0)
    assert_same_end(job, undisturbed(shared_folder, tasks), tasks)
    assert len(list(job.directory.glob("compiled *"))) == 10
    assert job.hangs == []
    assert job.state["counts"]["restarts"] == 0
    if tasks > 1:
        assert "has been in `compilation` for" in str(job.events("no hang"))
