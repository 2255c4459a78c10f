"""`forge.sweep`: what a sweep's directory says, while its jobs run and afterwards."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
from harness import until
from looked_at import make_older

import forge
from forge.errors import NoSweep
from forge.jobdir import ledger, process_id
from forge.jobdir.job_state import State
from forge.launch.sweep import SweepDir
from forge.sweeps import find, reader, status, words
from forge.sweeps.liveness import HeldLocks


def everything_in(folder):
    """Path -> size, and the times of the last change, of each file and directory."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[path] = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return found


def test_each_job_has_its_state_its_progress_and_its_reason(swept):
    """A person who looks once a day needs no other file."""
    ended, raised, died, left = forge.sweep(swept).jobs
    states = [job.state for job in (ended, raised, died, left)]
    assert states == [State.finished, State.failed, State.finished, State.failed]
    assert [job.attempts for job in (ended, raised, died, left)] == [1, 1, 2, 1]
    assert died.ends == {"crashed": 1, "finished": 1}
    assert (raised.step, raised.steps, raised.share) == (17, 40, 17 / 40)
    assert raised.reason == "failed"
    assert raised.because == "ValueError: planted error"
    assert left.code == 9
    assert raised.checkpoint.step == 10
    assert ended.checkpoint.step == 40
    assert [job.label for job in (ended, raised)] == ["mode=ends", "mode=raises"]
    assert "lr=0.2" in forge.sweep(swept).common
    assert all(job.missing == () for job in (ended, raised, died, left))


def test_metrics_are_those_of_an_uninterrupted_run(swept):
    """A step that was repeated after a kill counts once, for the last and for the best value."""
    for job in forge.sweep(swept).jobs:
        told = ledger.read(job.directory).metrics
        for name, metric in job.metrics.items():
            values = {step: one[name] for step, one in told.items() if name in one}
            assert job.curve(name) == values
            assert metric.last == values[metric.last_step] == values[max(values)]
            assert metric.lowest == min(values.values()) == values[metric.lowest_step]
            assert metric.best(is_higher_better=True)[0] == max(values.values())
    assert set(forge.sweep(swept).jobs[0].metrics) == {"loss", "val_acc"}


def test_attempts_say_when_why_and_how_far(swept):
    """The history of a job that was killed, from both ledgers."""
    first, second = forge.sweep(swept).jobs[2].history()
    assert (first.number, first.reason, first.code) == (1, "crashed", -9)
    assert (first.start_step, first.saved_step, first.saves) == (0, 20, 2)
    assert first.end_step >= 24
    assert (second.reason, second.start_step, second.saved_step) == ("finished", 20, 40)
    assert first.began < first.ended <= second.began < second.ended


def test_looking_changes_nothing(swept, capfd, monkeypatch):
    """Neither a file nor its times: jobs run in there, on a disk that others pay for."""
    from forge.cli import logs, report, status, verify, why

    monkeypatch.chdir(swept.parent)
    before = everything_in(swept)
    assert status.main([str(swept)]) == 0
    assert status.main(["--json", str(swept / "1")]) == 0
    assert why.main([str(swept)]) == 0
    assert logs.main([str(swept), "1"]) == 0
    assert status.main(["--csv", str(swept)]) == 0
    assert verify.main([str(swept)]) == 0
    assert report.main([str(swept)]) == 0
    capfd.readouterr()
    assert everything_in(swept) == before


def test_a_running_job_shows_its_rate_and_a_killed_sweep_its_lost_jobs(app):
    """After the machine went down no process is left that could record an end."""
    locks = HeldLocks()  # of before the job began
    app.hold(0, 30)
    saves = "resilience.checkpoint.every_s=900"
    sweep = app.start("lr=0.1,0.2", "hydra.launcher.n_jobs=1", saves)
    app.job(0).wait_for_step(30)
    first, second = forge.sweep(app.sweep_dir).jobs
    assert (first.state, first.step, first.steps) == (State.running, 30, 40)
    assert first.rate > 0
    assert first.left_s > 0
    assert first.node == os.uname().nodename
    assert first.save_every_s == 900
    assert f"saves every {words.ago(900)}" in " ".join(status.notes(first, 0))
    assert second.state is State.queued
    read = reader.read_job(reader.JobPlace(0, "0", ()), first.directory, "", locks)
    assert read.state is State.running
    assert forge.sweep(app.sweep_dir).launcher == sweep.popen.pid
    sweep.signal(signal.SIGSTOP)  # it must not start another wrapper
    for pid in [app.job(0).wrapper, *app.job(0).marked]:
        os.kill(pid, signal.SIGKILL)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    until(app.job(0).is_free, "the end of the job")
    read = forge.sweep(app.sweep_dir)
    assert [job.state for job in read.jobs] == [State.lost, State.queued]
    assert read.launcher is None
    assert read.jobs[0].needs_attention


def test_a_launcher_that_starts_while_the_jobs_are_read_is_found(swept, tmp_path, monkeypatch):
    """`forge why` would advise `forge resume`, which would be refused: the sweep is in use."""
    copy = shutil.copytree(swept, tmp_path / "sweep", symlinks=True)
    read_job, launchers = reader.read_job, []

    def after_the_launcher(*arguments):
        launchers.extend([] if launchers else [SweepDir(copy, set())])
        return read_job(*arguments)

    monkeypatch.setattr(reader, "read_job", after_the_launcher)
    assert forge.sweep(copy).launcher == os.getpid()
    launchers[0].close()
    assert forge.sweep(copy).launcher is None


def test_files_of_an_earlier_version_and_torn_lines_are_read(swept, tmp_path):
    """The sweep of last month, on a disk that was full: what is missing is said."""
    copy = make_older(swept, tmp_path / "sweep")
    read = forge.sweep(copy)
    assert [job.state for job in read.jobs][:2] == [State.finished, State.failed]
    assert read.jobs[1].because == "ValueError: planted error"
    assert read.jobs[0].checkpoint.step == 40
    assert read.jobs[0].metrics["loss"].last_step == 39
    assert "plan.json" in read.jobs[3].missing[0]
    assert "damaged" in read.missing[0]


def test_a_directory_without_files_of_forge_is_refused(tmp_path):
    """Instead of an empty table."""
    with pytest.raises(NoSweep, match=r"found no `\.forge`"):
        forge.sweep(tmp_path)
    with pytest.raises(NoSweep, match="there is no such directory"):
        forge.sweep(tmp_path / "none")


def test_a_single_run_without_hydra_is_a_sweep_of_one_job(tmp_path, monkeypatch):
    """Its directory is `checkpoint.dir`."""
    policy = {"checkpoint": {"dir": str(tmp_path / "run"), "every_steps": 2}}
    with forge.Run(policy) as run:
        for step in run.steps(4):
            run.log(loss=step)
    read = forge.sweep(tmp_path / "run")
    (job,) = read.jobs
    assert read.is_single
    assert (job.state, job.step, job.attempts) == (State.finished, 4, 1)
    assert job.metrics["loss"].last == 3
    assert status.notes(dataclasses.replace(job, attempts=3), 0) == ["3 attempts"]
    monkeypatch.setattr(process_id, "owner", lambda: "another process")
    with forge.Run(policy) as run:
        for step in run.steps(8):
            run.log(loss=step)
    (again,) = forge.sweep(tmp_path / "run").jobs
    assert (again.step, again.attempts, again.began) == (8, 2, job.began)


def test_a_killed_run_of_many_metrics_is_lost(tmp_path):
    """Its `start` is a line of many kilobytes then: the best values of all metrics so far."""
    policy = {"checkpoint": {"dir": str(tmp_path), "every_steps": 2}}
    with forge.Run(policy) as run:
        for step in run.steps(4):
            run.log(**{f"norm_of_layer_{number}": float(step) for number in range(300)})
    pid = os.fork()
    if pid == 0:
        with forge.Run(policy) as run:
            for step in run.steps(8):
                if step == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (killed,) = forge.sweep(tmp_path).jobs
    assert (killed.state, killed.pid, killed.checkpoint.step) == (State.lost, pid, 6)
    assert killed.save_every_s == 600


# -- finding ---------------------------------------------------------------------------------------


def test_a_sweep_is_found_from_inside_and_as_the_newest(swept, tmp_path, monkeypatch):
    """People stand in the project, in the sweep, or in a job."""
    home = tmp_path / "project"
    for name, when in (("10-00-00", 100), ("11-00-00", 200)):
        place = home / "multirun" / "2026-01-31" / name
        shutil.copytree(swept, place, symlinks=True)
        os.utime(place / ".forge", (when, when))
    newest = home / "multirun" / "2026-01-31" / "11-00-00"
    monkeypatch.chdir(home)
    assert find.find(None) == (newest, "")
    monkeypatch.chdir(newest / "2" / "checkpoints")
    assert find.find(None) == (newest, str(newest / "2"))
    assert find.find(str(newest / "1" / "output.log")) == (newest, str(newest / "1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoSweep, match="there is no such path"):
        find.find("elsewhere")
    with pytest.raises(NoSweep, match=r"hydra\.sweep\.dir"):
        find.find(None)


def test_a_slurm_id_finds_its_sweep_without_slurm(swept, tmp_path, monkeypatch):
    """From any machine that has the directory, by the record of the submission."""
    copy = tmp_path / "multirun" / "a" / "b"
    shutil.copytree(swept, copy, symlinks=True)
    (copy / ".forge" / "slurm").mkdir()
    lines = [{"script": "x.sh", "numbers": [0, 1], "composed": ["", ""]}]
    lines.append({"script": "x.sh", "id": "30410"})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (copy / ".forge" / "slurm" / "jobs.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert find.find("30410_1") == (copy, "30410_1")
    assert find.find("30410") == (copy, "")


@pytest.mark.parametrize("wanted", ["1", "mode=raises", "lr=0.2,mode=raises"])
def test_a_job_is_found_by_its_number_and_by_overrides(swept, wanted):
    """Nobody remembers numbers."""
    assert forge.sweep(swept).find(wanted).number == 1


def test_a_job_is_found_by_overrides_with_commas_and_by_its_label(swept):
    """`forge status` prints the label: a person copies it."""
    read = forge.sweep(swept)
    overrides = (("layers=[1,2]",), ("layers=[1,2]", "lr=0.1"), ("layers=[1,3]", "lr=0.1"))
    jobs = [
        dataclasses.replace(read.jobs[0], number=number, overrides=own, label=" ".join(own))
        for number, own in enumerate(overrides)
    ]
    read = dataclasses.replace(read, jobs=tuple(jobs))
    assert [read.find(job.label).number for job in jobs] == [0, 1, 2]
    assert read.find("layers=[1,3]").number == 2
    assert read.find("lr=0.1,layers=[1,2]").number == 1
    with pytest.raises(NoSweep, match="more than one"):
        read.find("lr=0.1")
    with pytest.raises(NoSweep, match="no such job"):
        read.find("layers=[1]")


def test_a_name_of_no_job_or_of_several_is_refused_with_the_known_ones(swept):
    """The message names what there is."""
    read = forge.sweep(swept)
    with pytest.raises(NoSweep, match=r"no such job .* 0 \(mode=ends\)"):
        read.find("9")
    with pytest.raises(NoSweep, match="more than one job matches"):
        read.find("lr=0.2")
