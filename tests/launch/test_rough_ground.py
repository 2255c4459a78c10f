"""Unusual cases: odd command lines and streams, copied sweeps, early exits, damaged files."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm
from harness import until
from sweeps import App, assert_same_job

from forge.errors import ConfigError, Exit, JobError
from forge.jobdir.job_files import PLAN, STATE, forge_dir, read_json, write_json
from forge.process import processes

PLAIN = """
    import os, signal, sys, time
    import hydra

    @hydra.main(version_base=None, config_path=None, config_name=None)
    def main(cfg):
        print("RUN", cfg.get("mode"), flush=True)
        exec(cfg.get("code", ""))
        return cfg.get("mode")

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def plain(tmp_path):
    """An app without torch and without a policy: its jobs take a third of a second."""
    return App(tmp_path / "plain", train=PLAIN, conf="{}")


def start(command: list[str], app: App) -> subprocess.CompletedProcess:
    """Run a command with any exit code; `stdout` has both of its streams."""
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options |= {"cwd": app.folder, "start_new_session": True, "is_parent": True}
    return warm.run(command, timeout=200, **options)


def code(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"+code='{escaped}'"


def test_the_command_goes_on_where_an_option_stands_last(plain):
    """Many people write `mode=a -m`, after which argparse accepts no positionals."""
    command = [sys.executable, "train.py", "hydra/launcher=local", "hydra.launcher.progress=none"]
    first = start([*command, "+mode=a", code("sys.exit(3)"), "-m"], plain)
    assert first.returncode == 1
    again = plain.go_on(first.stdout)
    assert "unrecognized arguments" not in again.stdout
    assert len(list(plain.folder.glob("multirun/*/*/0/output.log"))) == 1
    assert again.returncode == 1


@pytest.mark.parametrize(
    "stream", [pytest.param("Tee(sys.stderr)", marks=pytest.mark.proofs), "None"]
)
def test_any_stderr_will_do(stream, plain):
    """Some sites replace sys.stderr by a tee; cron closes it."""
    script = plain.folder / "train.py"
    tee = """
    import sys
    class Tee:
        def __init__(self, inner): self.inner = inner
        def write(self, text): return self.inner.write(text)
        def flush(self): self.inner.flush()
    """
    script.write_text(textwrap.dedent(tee) + f"sys.stderr = {stream}\n" + script.read_text())
    done = start([one for one in plain.command("+mode=a") if "progress" not in one], plain)
    assert done.returncode == 0, done.stdout
    assert plain.job(0).state["state"] == "finished"


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("os._exit(0)", marks=pytest.mark.proofs),
        pytest.param("sys.exit(256)", marks=pytest.mark.proofs),
        "os.fork() and os._exit(0); time.sleep(60)",
    ],
)
def test_an_exit_code_0_before_the_end_is_not_the_end(ending, plain):
    """A library that calls os._exit(0) must not make a training that never ran look finished."""
    done = plain.run("+mode=a", code(ending))
    assert done.returncode == 1
    assert "before main had returned" in done.stdout
    assert plain.job(0).is_free()


def test_a_keyboard_interrupt_in_main_is_a_ctrl_c(plain):
    """The end does not count as a crash, so the job is not retried."""
    plain.run("+mode=a", code("raise KeyboardInterrupt"))
    assert plain.job(0).state["reason"] == "interrupted"


def test_a_copy_of_a_sweep_is_another_sweep(app, undisturbed):
    """A sweep resumed in a copy of its directory must not end the jobs of the original."""
    sweep = app.start("lr=0.1", "step_s=0.1")
    app.job(0).wait_for_step(12)
    copy, running = app.folder / "copy", app.job(0).marked
    for pid in running:  # a copy would miss files that are renamed meanwhile
        processes.send(pid, signal.SIGSTOP)
    shutil.copytree(app.sweep_dir, copy, symlinks=True)
    for pid in running:
        processes.send(pid, signal.SIGCONT)
    original, app.sweep_dir = app.sweep_dir, copy
    app.finish("lr=0.1", "step_s=0.1")
    assert sweep.wait() == 0, sweep.output
    for one in (original, copy):
        app.sweep_dir = one
        assert_same_job(app.job(0), undisturbed["0.1"])
    app.sweep_dir = original
    assert app.job(0).attempts == 1
    assert app.job(0).state["counts"]["restarts"] == 0


def test_a_sweep_that_was_moved_goes_on_with_its_config(app, undisturbed):
    """The sweep is moved to a bigger disk, say, and conf.yaml is edited meanwhile."""
    app.hold(0, 12)
    sweep = app.start("seed=3", "step_s=0")
    app.job(0).wait_for_step(12)
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130
    app.sweep_dir = app.sweep_dir.rename(app.folder / "moved")
    conf = app.folder / "conf.yaml"
    conf.write_text(conf.read_text().replace("lr: 0.1", "lr: 0.9"))
    assert "lr=0.1 (now 0.9)" in app.finish("seed=3", "step_s=0")
    assert_same_job(app.job(0), undisturbed["0.1"])


def test_two_spellings_of_one_directory_are_one(plain):
    """Otherwise one job would never run, and both would look finished."""
    done = plain.run("hydra.sweep.subdir=${mode}", "+mode='a','./a'")
    assert done.returncode == 78
    assert "which is the directory of job 0" in done.stdout


def test_a_directory_of_other_overrides_or_another_script_is_refused(plain):
    """Otherwise its finished jobs would count as those of this sweep, with their results."""
    plain.finish("hydra.sweep.subdir=../shared/${hydra.job.num}", "+mode=a")
    plain.sweep_dir = plain.folder / "second"
    other = plain.run("hydra.sweep.subdir=../shared/${hydra.job.num}", "+mode=b")
    assert other.returncode == 78
    assert "already has a job with other overrides (+mode=a)" in other.stdout
    plain.sweep_dir = plain.folder / "sweep"
    (plain.folder / "train.py").rename(plain.folder / "eval.py")
    command = [one.replace("train.py", "eval.py") for one in plain.command("+mode=a")]
    command.append("hydra.sweep.subdir=../shared/${hydra.job.num}")
    done = start(command, plain)
    assert done.returncode == 78
    assert "contains a job of train.py:main" in done.stdout


def test_one_job_that_cannot_be_started_stops_nobody_else(plain):
    """The job's directory was removed while the job waited."""
    remove = f"__import__('shutil').rmtree('{plain.sweep_dir}/1')"
    plain.sweep_dir.mkdir()
    done = plain.run(
        "+mode=a,b,c", "hydra.launcher.n_jobs=1", code(f"cfg.mode == 'a' and {remove}")
    )
    assert done.returncode == 1
    assert "cannot be started" in done.stdout
    assert [plain.job(n).state.get("state") for n in (0, 2)] == ["finished", "finished"]


def test_a_huge_output_is_shown_by_its_end(plain):
    """A job that prints without end must not take the launcher's memory with it."""
    huge = (
        "os.write(1, b'x' * 70000 + b'\\\\n\\\\x1b[31mlast words\\\\n'); os.truncate(1, 3 * 10**9)"
    )
    done = plain.run("+mode=a", code(huge + "; os.kill(os.getpid(), 9)"))
    assert done.returncode == 1
    assert len(done.stdout) < 200_000
    assert "killed by SIGKILL" in done.stdout


def test_errors_of_ours_survive_the_way_back():
    """Results are pickled, so each exception must survive pickling."""
    for error in (ConfigError(["one", "two"], "A thing"), JobError("text", -9), Exit(75, "why")):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert back.__dict__ == error.__dict__


DAMAGED = [
    ("0/.forge/state.json", b"{}"),
    ("0/.forge/state.json", b'{"state": "finished"}'),
    ("0/.forge/plan.json", b'{"environment": null, "overrides": ["+mode=a"]}'),
    ("0/.forge/plan.json", b"[1, 2"),
    ("0/.forge/code.json", b"[]"),
    (".forge/jobs.jsonl", b'[1, 2]\n{"number": 0, "subdir": "0", "overrides": null}\n'),
    (".forge/jobs.jsonl", b"\xff\xfe\n"),
]


@pytest.mark.parametrize(
    "damaged", [DAMAGED[1::2], pytest.param(DAMAGED[::2], marks=pytest.mark.proofs)]
)
def test_damaged_files_are_no_tracebacks(plain, damaged):
    """A crash during a write, or another version of forge, can leave such files."""
    plain.finish("+mode=a")
    whole = shutil.copytree(plain.sweep_dir, plain.folder / "whole")
    for place, content in damaged:
        shutil.rmtree(plain.sweep_dir)
        shutil.copytree(whole, plain.sweep_dir)
        (plain.sweep_dir / place).write_bytes(content)
        done = plain.run("+mode=a")
        assert done.returncode == 0, (place, content, done.stdout)
        assert "Traceback" not in done.stdout, (place, content)


def test_an_unusable_directory_is_named(plain):
    """The error comes before the first job starts, and without a traceback."""
    (plain.folder / "file").touch()
    done = plain.run("+mode=a", "hydra.sweep.subdir=../file/0")
    assert done.returncode == 78
    assert "hydra.sweep.dir=" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.proofs
@pytest.mark.parametrize("policy", [False, True])
def test_a_sweep_inside_a_job_saves_too(policy, plain, app, tmp_path):
    """Regression test: processes left by a job were killed one second after its end."""
    inner = App(tmp_path / "inner", misbehave="step or forge.on_stop(lambda: time.sleep(2))")
    inner.hold(0, 3)
    command = inner.command("lr=0.1", "step_s=0")
    # subprocess.run kills the inner launcher if main is interrupted; Popen leaves it running.
    run = f"__import__('subprocess').{{}}({command!r}, cwd={str(inner.folder)!r})"
    if policy:
        script = app.folder / "train.py"
        held = "    process = " + run.format("Popen") + "\n    process.wait()\n"
        script.write_text(
            script.read_text().replace("    torch.set_num", f"{held}    torch.set_num")
        )
    (plain.folder / "inner.py").write_text(run.format("run"))
    args = ("lr=0.1",) if policy else ("+mode=a", code("exec(open('inner.py').read())"))
    outer = (app if policy else plain).start(*args)
    inner.job(0).wait_for_step(3)
    outer.signal(signal.SIGINT)
    assert outer.wait() == 130
    assert inner.job(0).state["state"] == "stopped"
    assert inner.job(0).state["code"] in (130, 143)  # signal of its launcher, or launcher's end
    assert (inner.job(0).directory / "checkpoints/latest").exists()


def test_a_ctrl_c_that_comes_twice_to_a_wrapper_is_one(app):
    """Regression test: the second SIGINT, passed on by the launcher, killed the saving job."""
    app = App(
        app.folder.parent / "app",
        misbehave="""
            def linger():
                while not Path(__file__).with_name("again").exists():
                    time.sleep(0.01)
                time.sleep(1)  # in which the second one would have its effect
            step or forge.on_stop(linger)
        """,
    )
    app.hold(0, 3)
    sweep = app.start("lr=0.1", "step_s=0")
    app.job(0).wait_for_step(3)
    app.job(0).kill("wrapper", signal.SIGINT)
    until((app.job(0).directory / "checkpoints/latest").exists, "save")
    time.sleep(1.1)  # later than a second, so that it counts as a second Ctrl+C
    app.job(0).kill("wrapper", signal.SIGINT)
    (app.folder / "again").touch()
    sweep.wait()
    assert app.job(0).state["code"] == 130


@pytest.mark.proofs  # a wrapper that is killed: test_sweeps.py
@pytest.mark.parametrize("number", [signal.SIGRTMIN + 3, signal.SIGKILL])
def test_a_wrapper_that_ends_is_followed_by_another(number, app, undisturbed):
    """The wrapper is restarted whatever signal has killed it."""
    app.hold(0, 5)
    sweep = app.start("lr=0.1", "step_s=0")
    app.job(0).wait_for_step(5)
    app.job(0).kill("wrapper", number)
    assert sweep.wait() == 0, sweep.output
    assert_same_job(app.job(0), undisturbed["0.1"])


def test_shared_memory_is_removed_when_a_job_is_killed(plain):
    """A sweep of a week would fill /dev/shm."""
    name = f"forge_test_{os.getpid()}"
    make = "from multiprocessing.shared_memory import SharedMemory as S; "
    make += f"s = S('{name}', True, 64); time.sleep(100)"
    plain.run("+mode=a", "hydra.launcher.timeout_min=0.05", code(make))
    assert plain.job(0).state["state"] == "failed"
    assert not Path("/dev/shm", name).exists()


@pytest.mark.proofs
def test_a_disk_that_is_full_does_not_end_the_wrapper(tmp_path):
    """The wrapper's state is not written, but the job is restarted all the same."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a small tmpfs of its own")
    app = App(
        tmp_path / "app",
        misbehave="""
            if step == 15 and RESTARTS == 0:
                out = HydraConfig.get().runtime.output_dir
                with open(out + "/ballast", "wb", buffering=0) as ballast:
                    for size in (65536, 512, 1):
                        try:
                            while True:
                                ballast.write(b"x" * size)
                        except OSError:
                            pass
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    checkpoints = tmp_path / "checkpoints"
    policy = [f"resilience.checkpoint.dir={checkpoints}", "resilience.requeue.max_failures=1"]
    command = app.command("lr=0.1", "step_s=0", *policy)
    app.sweep_dir.mkdir()
    script = 'mount -t tmpfs -o size=2m none sweep && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],
        cwd=app.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout.replace(
        'Traceback (most recent call last):\n  File "/', "", 1
    )
    assert "restart 1" in done.stdout
    assert "job 0: failed" in done.stdout


def test_state_is_written_whole(tmp_path):
    """A reader sees either the old state or the new one, and never a part."""
    forge_dir(tmp_path).mkdir()
    write_json(forge_dir(tmp_path) / STATE, {"state": "running"})
    assert read_json(forge_dir(tmp_path) / STATE) == {"state": "running"}
    assert [path.name for path in forge_dir(tmp_path).iterdir()] == [STATE]
    assert json.loads((forge_dir(tmp_path) / STATE).read_text())
    assert read_json(forge_dir(tmp_path) / PLAN) is None
    assert processes.variable(os.getpid(), "NO_SUCH_VARIABLE") is None
