"""The parts of a job that stay frozen or are updated when its sweep is started again."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from omegaconf import OmegaConf
from sweeps import CONF, App, SweptJob

from forge.config.schema import Policy
from forge.jobdir.job_files import PLAN, forge_dir, read_json, write_json
from forge.launch import planning
from forge.launch.sweep import SweepDir
from forge.sweeps.reader import JobPlace

LIGHT = """
    import json, os, random, signal, sys
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("dice", lambda: random.random())

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        hydra_config = HydraConfig.get()
        out = Path(hydra_config.runtime.output_dir)
        seen = {
            "lr": cfg.lr,
            "chance": [cfg.stamp, cfg.dice, list(cfg.deep.list)],
            "out": hydra_config.runtime.output_dir,
            "sweep": hydra_config.sweep.dir,
            "checkpoints": cfg.resilience.checkpoint.dir,
            "threads": os.environ["OMP_NUM_THREADS"],
            "restarts": os.environ["FORGE_RESTART_COUNT"],
        }
        with (out / "seen.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\\n")
        if cfg.trains:
            Path(cfg.resilience.checkpoint.dir, "step_00000005").mkdir(parents=True, exist_ok=True)
        starts = len((out / "seen.jsonl").read_text().splitlines())
        if starts == 1 and cfg.fails:
            os.kill(os.getpid(), signal.SIGKILL)
        if starts == 2 and cfg.fails:
            sys.exit(9)

    if __name__ == "__main__":
        main()
"""
LIGHT_CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 0.1
    stamp: ${now:%H-%M-%S-%f}
    dice: ${dice:}
    deep: {list: ["${now:%H-%M-%S-%f}", "${dice:}"]}
    trains: true
    fails: true
    resilience:
      checkpoint: {dir: "${hydra:runtime.output_dir}/ck"}
"""


def make(tmp_path, train: str = LIGHT, conf: str = LIGHT_CONF) -> App:
    return App(tmp_path / "app", train, conf)


def seen(job: SweptJob) -> list[dict]:
    return [json.loads(line) for line in (job.directory / "seen.jsonl").read_text().splitlines()]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_job_that_trained_keeps_its_config_and_one_that_did_not_takes_the_new(
    tmp_path, monkeypatch
):
    """A training with one rate for the first half and another for the second is not repeatable."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    app = make(tmp_path)
    overrides = [
        "trains=true,false",
        "hydra.sweep.dir=relative",
        "hydra.sweep.subdir=x/${hydra.job.override_dirname}",
    ]
    first = app.run(*overrides, "hydra.launcher.cpus_per_job=2")
    assert first.returncode == 1
    edit(app.folder / "conf.yaml", "lr: 0.1", "lr: 0.2")
    second = app.run(*overrides, "hydra.launcher.cpus_per_job=3")
    assert second.returncode == 0, second.stdout

    sweep = app.folder / "relative"
    trained, untrained = (SweptJob(sweep / f"x/trains={flag}") for flag in (True, False))
    for job in (trained, untrained):
        attempts = seen(job)
        assert [one["restarts"] for one in attempts] == ["0", "1", "0"]
        assert {one["threads"] for one in attempts} == {"2"}, "the order of sums stays"
        for one in attempts:
            assert one["out"] == str(job.directory)
            assert one["sweep"] == str(sweep)
            assert one["checkpoints"] == str(job.directory / "ck")
        assert attempts[0]["chance"] == attempts[1]["chance"], "restarted by the wrapper"
    assert [one["lr"] for one in seen(trained)] == [0.1, 0.1, 0.1]
    assert [one["lr"] for one in seen(untrained)] == [0.1, 0.1, 0.2]
    assert seen(trained)[2]["chance"] == seen(trained)[0]["chance"]
    assert seen(untrained)[2]["chance"] != seen(untrained)[0]["chance"]
    said = [line for line in second.stdout.splitlines() if "resumes with the config" in line]
    assert len(said) == 1, second.stdout
    assert str(trained.directory) in said[0]
    assert "lr=0.1 (now 0.2)" in said[0]
    assert not list(app.folder.rglob("None"))
    assert not list(app.folder.rglob("*hydra:*"))


def test_finished_jobs_and_their_files_are_left_alone(tmp_path):
    """The config of a finished job documents its result, so it must not change."""
    app = make(tmp_path)
    app.finish("lr=1,2", "fails=false", "trains=false")
    kept = app.job(0).directory / ".forge/config.yaml"
    before = kept.read_text()
    edit(app.folder / "conf.yaml", "lr: 0.1", "lr: 0.1\nnew: 1")
    # They are found by their overrides: with more points, they stand elsewhere in the list.
    text = app.finish("lr=3,2,1", "fails=false", "trains=false")
    assert text.count("started") == 1
    assert kept.read_text() == before
    assert [len(seen(app.job(number))) for number in range(3)] == [1, 1, 1]
    overrides = read_json(forge_dir(app.job(2).directory) / PLAN)["overrides"]
    assert overrides == ["fails=False", "lr=3", "trains=False"]


def test_the_same_overrides_twice_are_two_jobs_and_stay_two(tmp_path):
    """A random search can draw a point twice; the two jobs must not share a directory."""
    app = make(tmp_path)
    given = ["fails=false", "hydra.launcher.n_jobs=2"]
    app.finish("lr=1,1,2", *given)
    index = app.sweep_dir / ".forge/jobs.jsonl"
    whole = index.read_text()
    assert [json.loads(line)["number"] for line in whole.split("\n") if line] == [0, 1, 2]

    # A crash truncated the last line: forge finds that job by its number, others by overrides.
    index.write_text(whole.rstrip("\n")[:-9])
    pids = [app.job(number).state["pid"] for number in range(3)]
    text = app.finish("lr=1,1,2,1", *given)
    assert [app.job(number).state["pid"] for number in range(3)] == pids
    assert text.count("started") == 1
    assert [len(seen(app.job(number))) for number in range(4)] == [1, 1, 1, 1]
    assert seen(app.job(3))[0]["lr"] == 1
    numbers = []
    for line in index.read_text().split("\n"):
        try:
            numbers.append(json.loads(line)["number"])
        except ValueError:
            assert line == "" or line in whole
    assert numbers == [0, 1, 2, 3]


def test_jobs_that_would_share_a_directory_are_refused_before_any_starts(tmp_path):
    """Otherwise the second job would resume from the checkpoints of the first."""
    app = make(tmp_path)
    done = app.run("lr=1,2,3", "fails=false", "hydra.sweep.subdir=f${fails}")
    assert done.returncode == 78
    for number, lr in ((1, 2), (2, 3)):
        assert f"job {number} (lr={lr}): its directory would be {app.sweep_dir}/f" in done.stdout
    assert "the directory of job 0 (fails=False lr=1)" in done.stdout
    assert "${hydra.job.num}" in done.stdout
    assert not (app.sweep_dir / "ffalse").exists()

    twice = app.run("lr=1,1", "fails=false", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    assert twice.returncode == 78
    assert "its directory would be" in twice.stdout

    app.finish("lr=1", "fails=false", "hydra.sweep.subdir=mine")
    later = app.run("lr=2", "fails=false", "hydra.sweep.subdir=mine")
    assert later.returncode == 78
    assert "the directory of job 0 (fails=False lr=1)" in later.stdout
    assert len(seen(app.job("mine"))) == 1

    own = app.run("lr=2", "fails=false", "hydra.sweep.subdir=.")
    assert own.returncode == 78
    assert "`hydra.sweep.subdir=.` is the sweep's own directory" in own.stdout


def test_all_problems_of_all_jobs_are_told_before_any_starts(tmp_path):
    """A typo in the fifth job must be reported before the first job starts."""
    app = make(tmp_path)
    done = app.run(
        "lr=1,2",
        "resilience.signal.warning_s=-1,50",
        "resilience.checkpoint.keep_last=0",
        "hydra.launcher.timeout_min=0.5",
    )
    assert done.returncode == 78
    assert "The sweep has" in done.stdout
    for number, lr, lead in ((0, 1, -1), (1, 1, 50), (2, 2, -1), (3, 2, 50)):
        about = f"job {number} (lr={lr} resilience.signal.warning_s={lead}"
        lines = [line for line in done.stdout.splitlines() if about in line]
        assert any("`resilience.checkpoint.keep_last=0`" in line for line in lines), done.stdout
        assert any(f"`resilience.signal.warning_s={lead}`" in line for line in lines), done.stdout
    assert "`hydra.launcher.timeout_min=0.5`" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(app.sweep_dir.glob("*/.forge/state.json"))
    assert not list(app.sweep_dir.glob("*/output.log"))


def test_changed_code_is_refused_where_something_was_trained(tmp_path):
    """A code change after the first save mixes two programs in one job; before it is harmless."""
    app = App(
        tmp_path / "app",
        conf=CONF + "    bad: 0\n",
        misbehave="""
            if step == cfg.bad:
                raise ValueError("a bug")
        """,
    )
    overrides = ["resilience.requeue.on_code_change=refuse", "bad=3,12", "steps=15"]
    overrides += ["resilience.requeue.max_failures=0"]
    assert app.run(*overrides).returncode == 1
    edit(app.folder / "train.py", "    if step == cfg.bad:", "    if False:")
    done = app.run(*overrides)
    assert done.returncode == 1
    states = [app.job(number).state for number in range(2)]
    assert [one["state"] for one in states] == ["finished", "failed"]
    assert states[1]["code"] == 78
    refused = "`resilience.requeue.on_code_change=refuse`: the code changed since this job"
    assert refused in done.stdout
    assert str(app.folder / "train.py") in done.stdout.partition(refused)[2].splitlines()[0]
    assert "the code changed" not in app.job(0).output, "nothing was trained with it"


WAITS = """
    import os, sys, time
    from pathlib import Path
    import hydra
    import helper

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        here = Path(__file__).parent
        (here / f"began {cfg.kind}").touch()
        while cfg.kind == "first" and not (here / "go").exists():
            time.sleep(0.01)
        helper.fail(cfg)

    if __name__ == "__main__":
        main()
"""
FAILS = """
import os, sys

def fail(cfg):
    if cfg.kind == "key":
        cfg.new_key
    elif cfg.kind == "code":
        sys.exit(7)
    elif os.environ["FORGE_RESTART_COUNT"] == "0":
        sys.exit(9)
"""


def test_the_files_edited_while_a_job_waits_are_named_if_it_fails(tmp_path):
    """Old config, new script: an edited script can fail with `Key 'new_key' is not in struct`.

    The first job runs during the edit, so it has failed with the code of the submission.
    """
    app = make(tmp_path, WAITS, "defaults: [{resilience: default}, _self_]\nkind: x\n")
    helper = app.folder / "helper.py"
    helper.write_text("def fail(cfg):\n    raise ValueError('a bug')\n")
    rule = "resilience.requeue.rules=[{exit_codes:[9],reason:code_changed}]"
    sweep = app.start("kind=first,key,code,healed", rule, "hydra.launcher.n_jobs=1")
    sweep.wait_for((app.folder / "began first").exists, "start of the first job")
    helper.write_text(FAILS)
    edit(app.folder / "train.py", "import os, sys", "import  os, sys")
    (app.folder / "go").touch()
    assert sweep.wait() == 1
    states = [app.job(number).state for number in range(4)]
    assert [(one["state"], one["reason"], one["code"]) for one in states] == [
        ("failed", "failed", 1),
        ("failed", "code_changed", 1),
        ("failed", "code_changed", 7),
        ("finished", "finished", 0),
    ]
    assert states[0]["because"] == "ValueError: a bug"
    changed = "; the code changed since the job was submitted: "
    for number, error in (
        (1, "ConfigAttributeError: Key 'new_key' is not in "),
        (2, "exit code 7"),
    ):
        because = states[number]["because"]
        assert because.startswith(error)
        assert sorted(because.partition(changed)[2].split(", ")) == ["helper.py", "train.py"]
        assert because in sweep.output, "in the launcher's table"
        assert f"forge: failed: {because}" in app.job(number).output
    ends = [one for one in app.job(3).told if one["kind"] == "end"]
    assert [one["reason"] for one in ends] == ["code_changed", "finished"]


# -- the pieces --------------------------------------------------------------------------------


def make_plan(directory: Path, threads: int = 4, policy: Policy | None = None, **environment):
    place = JobPlace(0, directory.name, ("a=1",))
    job = planning.ComposedJob(place, directory, OmegaConf.create(), policy, "a=1", "x", "y", {})
    with mock.patch.dict(os.environ, environment):
        if not environment:
            os.environ.pop("OMP_NUM_THREADS", None)
        made = planning.make(job, None, None, threads)
    forge_dir(directory).mkdir(exist_ok=True)
    made.write(directory)
    return made


def test_the_number_of_threads_is_that_of_the_first_start(tmp_path):
    """With another number of threads the order of sums, and so the bits, would change."""
    first = make_plan(tmp_path, threads=4)
    again = make_plan(tmp_path, threads=8)
    assert first.environment == again.environment == {"OMP_NUM_THREADS": "4"}
    assert first.token == again.token, "marks its processes over all starts"
    other = tmp_path / "other"
    other.mkdir()
    assert make_plan(other, OMP_NUM_THREADS="3").environment == {"OMP_NUM_THREADS": "3"}
    # From another shell, in which it is not set.
    assert make_plan(other, threads=8).environment == {"OMP_NUM_THREADS": "3"}
    assert make_plan(other, OMP_NUM_THREADS="2").environment == {"OMP_NUM_THREADS": "2"}


def test_only_a_checkpoint_makes_a_beginning(tmp_path):
    """A job that has saved no checkpoint counts as not begun, and takes a new config."""
    assert not planning.has_begun(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert not planning.has_begun(tmp_path)
    (tmp_path / "checkpoints/step_00000001").mkdir()
    assert planning.has_begun(tmp_path)
    make_plan(tmp_path)
    elsewhere = read_json(forge_dir(tmp_path) / PLAN) | {"checkpoint_dir": str(tmp_path / "ck")}
    write_json(forge_dir(tmp_path) / PLAN, elsewhere)
    assert not planning.has_begun(tmp_path)
    (tmp_path / "ck/step_7").mkdir(parents=True)
    assert planning.has_begun(tmp_path)


def test_a_job_without_a_policy_is_started_once_and_gets_no_signals(tmp_path):
    """Such a job has no signal handlers, and the default action of SIGUSR2 kills it."""
    bare = make_plan(tmp_path)
    assert (bare.actions, bare.warning_s, bare.requeue.enabled) == ({}, 0.0, False)
    switched_off = make_plan(tmp_path, policy=Policy(enabled=False))
    assert (switched_off.actions, switched_off.warning_s) == ({}, 0.0)
    whole = make_plan(tmp_path, policy=Policy())
    assert whole.warning_s == 120
    assert whole.actions["USR2"] == "requeue"
    assert whole.requeue.enabled


@pytest.mark.parametrize("cut", range(0, 70, 7))
def test_an_index_that_was_torn_anywhere_is_read_and_written_on(tmp_path, cut):
    """The power can fail during the write."""
    first = SweepDir(tmp_path, set())
    first.add([JobPlace(0, "0", ("lr=ä",)), JobPlace(1, "1", ("lr=2",))])
    first.close()
    index = tmp_path / ".forge/jobs.jsonl"
    os.truncate(index, index.stat().st_size - cut)
    again = SweepDir(tmp_path, set())
    known = again.find(["lr=2"])
    assert known in (None, JobPlace(1, "1", ("lr=2",)))
    again.add([JobPlace(2, "2", ("lr=3",))])
    again.close()
    last = SweepDir(tmp_path, set())
    assert last.find(["lr=3"]) == JobPlace(2, "2", ("lr=3",))
    assert last.find(["lr=3"]) is None, "each is taken once"
    assert last.owner("2") == JobPlace(2, "2", ("lr=3",))
    assert last.free_number(2) == 3
    assert last.free_number(2) == 4
    last.close()


def test_a_job_is_found_with_another_policy_too(tmp_path):
    """A changed key of the policy, like a budget, must not start the job from step 0."""
    old, halts = (
        JobPlace(0, "0", ("lr=1",)),
        JobPlace(2, "2", ("lr=2", "resilience.nan.action=halt")),
    )
    first = SweepDir(tmp_path, set())
    first.add([old, JobPlace(1, "1", ("lr=2", "resilience.nan.action=skip")), halts])
    first.close()
    jobs = [["resilience.resume=changed", "lr=1"], ["lr=2"], ["lr=2", "resilience.nan.action=halt"]]
    again = SweepDir(tmp_path, set(), is_looked_at=True)
    assert again.find_all(jobs) == [old, JobPlace(1, "1", first.known[1].overrides), halts]
    again = SweepDir(tmp_path, set(), is_looked_at=True)
    assert again.find_all([["lr=2"], ["lr=1"], ["lr=3"]]) == [None, old, None]
