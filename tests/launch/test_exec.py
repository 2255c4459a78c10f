"""`forge exec` on one machine: programs that know nothing of forge, under the policy.

One module, since its tests share the programs, and each is one row of what the issue promises.
"""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import readme
import warm
from commands import COMMANDS, Commands, ends, wait_ready
from harness import FORGE, until
from rows import few
from sweeps import SweptJob

from forge.config import loading
from forge.errors import ConfigError, ExitCode
from forge.jobdir import rank_report
from forge.jobdir.job_dir import hydra_quoted
from forge.launch.exec import command_of, main
from forge.process import processes

CODES = {"cd": 0, "pipeline": -15, "wrapper": 0, "deaf": -9, "daemon": 0, "trap": 0}
"""The exit code of each when it is asked to stop."""
QUICK = [
    pytest.param(name, marks=[] if name in ("wrapper", "deaf") else [pytest.mark.proofs])
    for name in CODES
]
"""`make test` has a pipeline and a daemon on a cluster, in test_commands.py."""


@pytest.fixture
def commands(tmp_path):
    with contextlib.closing(Commands(tmp_path / "user's project")) as found:
        yield found


def stop(job, sweep, number=signal.SIGTERM):
    """Send the signal to the job's supervisor, as a cluster does."""
    wait_ready(job, sweep)
    assert processes.send(job.supervisor, number)


def steps(job):
    return [int(line) for line in (job.directory / "steps.txt").read_text().split()]


def run(commands, script, *overrides):
    """A script of bash to its end; (its job, what was printed)."""
    done = commands.run(*overrides, "--", "bash", "-c", script)
    return commands.job(0), done.stdout


# -- awkward programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_command_that_is_told_to_leave_runs_again_and_nothing_is_left(name, commands):
    """Most programs that save on a signal exit with 0, although they are not finished."""
    sweep = commands.begin(COMMANDS[name], "resilience.shutdown.timeout_s=3")
    job = commands.job(0)
    stop(job, sweep)
    assert sweep.wait() == 0, sweep.output + job.output
    assert ends(job) == [f"terminated signalled {CODES[name]}", "finished finished 0"], job.output
    assert job.state["counts"]["restarts"] == 1
    assert job.marked == []
    if name != "deaf":
        assert steps(job) == list(range(1, 21))  # the command resumed from its save


@pytest.mark.proofs
@pytest.mark.slow
def test_torchrun_is_told_to_leave_and_its_workers_save(commands):
    """torchrun's workers are in other sessions. torchrun forwards the signal and exits with 1."""
    sweep = commands.begin(COMMANDS["torchrun"], PYTHONPATH="")
    job = commands.job(0)
    sweep.wait_for((job.directory / "ready 1").exists, "second rank")
    stop(job, sweep)
    assert sweep.wait() == 0, sweep.output + job.output
    assert ends(job) == ["terminated signalled 1", "finished finished 0"], job.output
    assert sorted(steps(job)) == sorted([*range(1, 21)] * 2)
    assert job.marked == []


def test_the_time_limit_is_announced_by_a_signal_that_programs_know(commands):
    """The signal is SIGTERM, since SIGUSR2 (for forge's own loops) kills most other programs."""
    limit = ("hydra.launcher.timeout_min=0.1", "resilience.signal.warning_s=4")
    sweep = commands.begin(COMMANDS["trap"], *limit)
    assert sweep.wait() == 0, sweep.output
    job = commands.job(0)
    assert ends(job) == ["terminated time_limit 0", "finished finished 0"], job.output
    assert job.state["counts"]["timeouts"] == 1
    assert steps(job) == list(range(1, 21))


def test_exit_code_0_after_a_signal_is_the_end_where_that_is_declared(commands):
    """For example, a server is finished when it stops on a signal."""
    sweep = commands.begin(COMMANDS["trap"], "resilience.exec.zero_after_signal=finished")
    job = commands.job(0)
    stop(job, sweep)
    assert sweep.wait() == 0, sweep.output
    assert ends(job) == ["finished finished 0"]
    assert job.state["counts"]["restarts"] == 0


UNSAVED = """
trap '[ "$FORGE_ATTEMPT" = 1 ] || touch "$FORGE_JOB_DIR/all done"; exit 0' TERM
echo $$ > "$FORGE_JOB_DIR/pid"
touch "$FORGE_JOB_DIR/ready $FORGE_ATTEMPT"
while true; do sleep 0.05; done
"""


def test_with_a_done_file_exit_code_0_is_the_end_if_it_is_there_also_after_a_signal(commands):
    """Lightning exits with 0, unsaved, if somebody else sends its process a SIGTERM; and a command
    that has just finished when the time limit comes would run in vain again.
    """
    sweep = commands.begin(["bash", "-c", UNSAVED], "resilience.exec.done_file=all done")
    job = commands.job(0)
    sweep.wait_for((job.directory / "ready 1").exists, "first attempt")
    assert processes.send(int((job.directory / "pid").read_text()), signal.SIGTERM)
    sweep.wait_for((job.directory / "ready 2").exists, "second attempt")
    assert processes.send(job.supervisor, signal.SIGTERM)
    assert sweep.wait() == 0, sweep.output
    assert ends(job) == ["checkpointed requested 0", "finished finished 0"]
    assert "exit code 0 without `resilience.exec.done_file=all done`" in sweep.output


GROUP = """
child() { trap 'echo child >> "$FORGE_JOB_DIR/heard"; exit' TERM; touch "$FORGE_JOB_DIR/child"
  while true; do sleep 0.05; done; }
child &
trap 'echo leader >> "$FORGE_JOB_DIR/heard"; trap "" TERM; kill $!; wait; exit 3' TERM
while [ ! -e "$FORGE_JOB_DIR/child" ]; do sleep 0.05; done
touch "$FORGE_JOB_DIR/ready"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("to", few(1, ["leader", "group"]))  # the group: test "wrapper" above
def test_signals_go_to_the_group_or_to_the_leader_alone(to, commands):
    """Some programs have to stop their children themselves, in a certain order."""
    sweep = commands.begin(
        ["bash", "-c", GROUP],
        f"resilience.exec.signal_to={to}",
        "resilience.requeue.max_preemptions=0",
    )
    job = commands.job(0)
    stop(job, sweep)
    assert sweep.wait() == 1
    heard = (job.directory / "heard").read_text().split()
    assert sorted(set(heard)) == ["child", "leader"]
    assert heard[0] == "leader" or to == "group"
    assert ends(job) == ["terminated signalled 3"]
    assert (job.state["state"], job.state["code"]) == ("terminated", 3)
    assert job.marked == []


def test_a_command_that_does_not_support_termination_is_killed_at_once(commands):
    """A signal would only make each of its workers print a traceback."""
    overrides = ("resilience.exec.supports_termination=false", "resilience.shutdown.timeout_s=100")
    sweep = commands.begin(COMMANDS["deaf"], *overrides)
    job = commands.job(0)
    stop(job, sweep)
    assert sweep.wait() == 0, sweep.output
    assert ends(job) == ["terminated signalled -9", "finished finished 0"]
    (first,) = (one for one in job.told if one["kind"] == "end" and one["code"])
    assert "took longer than" not in first["text"]


# -- what exit codes mean --------------------------------------------------------------------------


def test_exit_code_75_asks_to_be_run_again_and_each_attempt_has_its_part_of_the_log(commands):
    """The command has saved and is not finished. If it exits with 75 right after its start, each
    restart waits longer: the resource that it needs can be unavailable for hours.
    """
    script = 'printf "it is $FORGE_ATTEMPT"; [ "$FORGE_ATTEMPT" = 4 ] || exit 75'
    job, said = run(commands, script)
    assert ends(job) == [*["checkpointed requested 75"] * 3, "finished finished 0"], said
    assert job.state["counts"]["preemptions"] == 3
    begins = [one["t"] for one in job.told if one["kind"] == "attempt"][1:]
    asked = [one["t"] for one in job.told if one["kind"] == "requeue"]
    for begin, end, pause_s in zip(begins, asked, (0, 1, 2), strict=True):
        assert begin - end >= pause_s
    # Users can read the output of one attempt without that of the others.
    _, *parts = job.output.split("==== forge: attempt ")
    assert [part.partition(",")[0] for part in parts] == ["1", "2", "3", "4"]
    texts = [part.splitlines()[1] for part in parts]
    assert all(text.startswith(f"it is {number}") for number, text in enumerate(texts, 1))


RULES = (
    "resilience.requeue.rules=[{exit_codes:[3,70,143],max_restarts:3,recover:[bash,-c,"
    '\'echo "$FORGE_ATTEMPT $FORGE_RETURN_CODE" >> "$FORGE_JOB_DIR/recovered"\']}]'
)


def test_a_rule_s_recovery_command_runs_before_the_restart(commands):
    """The recovery command can remove files that would make the next attempt fail.

    A rule can name codes that mean something to forge alone: for the main of a Hydra app such a
    rule is refused, since forge sets these codes itself.
    """
    codes = "codes=(0 3 70 143 0); exit ${codes[$FORGE_ATTEMPT]}"
    job, said = run(commands, f'cat "$FORGE_JOB_DIR/recovered"; {codes}', RULES)
    assert (job.directory / "recovered").read_text() == "1 3\n2 70\n3 143\n", said
    failed = [f"failed failed {code}" for code in (3, 70, 143)]
    assert [one for one in ends(job) if one != "finished finished 0"] == failed, said
    assert job.state["state"] == "finished"
    assert job.state["counts"]["by_rule"] == {"0": 3}
    assert job.output.splitlines()[-4:-1] == ["1 3", "2 70", "3 143"]


@pytest.mark.parametrize("code", [pytest.param(9, marks=pytest.mark.proofs), 3])
def test_a_recovery_that_fails_ends_the_job_with_its_code(code, commands):
    """If the recovery fails, the job ends; a rule does not apply to its own recovery."""
    rules = f"resilience.requeue.rules=[{{exit_codes:[3],recover:[bash,-c,'exit {code}']}}]"
    job, _ = run(commands, 'echo x >> "$FORGE_JOB_DIR/runs"; exit 3', rules)
    assert (job.state["state"], job.state["code"]) == ("failed", code)
    assert job.state["because"] == f"the rule's recovery command: exit code {code}"
    assert (job.directory / "runs").read_text() == "x\n"


def test_a_recovery_whose_wrapper_is_killed_runs_again_before_the_command(commands):
    """The command must start only after a complete recovery, whichever process is killed.

    Regression test: the end of a recovery was taken for that of the command.
    """
    recover = (
        'cd "$FORGE_JOB_DIR"; echo $FORGE_ATTEMPT $FORGE_RETURN_CODE >> recovered;'
        " runs=$(grep -c 3 recovered); touch ready $runs; until [ -e go$runs ]; do sleep 0.01; done"
    )
    rules = f"resilience.requeue.rules=[{{exit_codes:[3],recover:[bash,-c,'{recover}']}}]"
    script = 'echo run >> "$FORGE_JOB_DIR/recovered"; [ "$FORGE_ATTEMPT" != 1 ] || exit 3'
    sweep = commands.begin(["bash", "-c", script], rules)
    job = commands.job(0)
    wait_ready(job, sweep)
    job.kill("wrapper")
    sweep.wait_for((job.directory / "2").exists, "second recovery")
    job.kill("wrapper", signal.SIGSTOP)
    for run in "23":
        (job.directory / f"go{run}").touch()
    sweep.wait_for(lambda: rank_report.read(job.directory, 0), "end of the second recovery")
    job.kill("wrapper")
    assert sweep.wait() == 0, sweep.output + job.output
    assert (job.directory / "recovered").read_text() == "run\n1 3\n1 3\n1 3\nrun\n"


GREEDY = """
import os, sys
os.environ["FORGE_ATTEMPT"] == "1" or sys.exit(0)
open("/proc/self/oom_score_adj", "w").write("1000")  # what is forked for tests seems larger
kept = b"x" * (200 * 2**20)
"""


@pytest.fixture
def cgroup():
    """The folder of a cgroup with 100 MB of memory (version 1) below our own."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    paths = [line.split(":", 2)[2] for line in own if "memory" in line.split(":")[1].split(",")]
    folder = Path("/sys/fs/cgroup/memory", *[path[1:] for path in paths[:1]], f"test{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a cgroup for memory: {error}")
    (folder / "memory.limit_in_bytes").write_text("100000000")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), "end of what ran in the cgroup")
    folder.rmdir()


@pytest.mark.parametrize("is_shell", [pytest.param(False, marks=pytest.mark.proofs), True])
def test_a_command_that_was_killed_for_memory_is_told_apart_from_other_kills(
    is_shell, cgroup, commands
):
    """The message must name the kernel's OOM killer, because SIGKILL can have many causes."""
    (commands.folder / "greedy.py").write_text(GREEDY)
    words = ["bash", "-c", "python greedy.py; exit $?"] if is_shell else ["python", "greedy.py"]
    commands.popen = functools.partial(commands.popen, cgroup=cgroup)
    sweep = commands.begin(words, "resilience.requeue.rules=[{exit_codes:[137]}]")
    assert sweep.wait() == 0, sweep.output
    job = commands.job(0)
    first = ends(job)[0]
    assert first == ("failed failed 137" if is_shell else "failed out_of_memory -9"), job.output
    assert "memory ran out, and the kernel killed 1 process in the task's cgroup" in job.output


def test_a_kill_without_a_count_says_only_what_is_known(commands):
    """Most SIGKILLs do not come from the OOM killer."""
    job, _ = run(commands, '[ "$FORGE_ATTEMPT" != 1 ] || kill -9 $$')
    assert ends(job) == ["failed crashed -9", "finished finished 0"]
    assert "memory" not in job.output


# -- stopped for good ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reason"),
    [(2, "interrupted"), pytest.param(15, "cancelled", marks=pytest.mark.proofs)],
)
def test_after_a_ctrl_c_it_is_not_run_again_until_the_sweep_is(number, reason, commands):
    """The user has stopped the command; the printed command resumes it from its last save."""
    sweep = commands.begin(COMMANDS["trap"])
    job = commands.job(0)
    wait_ready(job, sweep)
    sweep.signal(number)
    assert sweep.wait() == 128 + number, sweep.output
    assert ends(job) == [f"terminated {reason} 0"]
    assert (job.state["state"], job.state["code"]) == ("terminated", 0)
    assert commands.go_on(sweep.output).returncode == 0
    assert job.state["state"] == "finished"
    assert steps(job) == list(range(1, 21))


def test_a_second_ctrl_c_kills_it(commands):
    """The second Ctrl-C must not wait for `shutdown.timeout_s`."""
    sweep = commands.begin(COMMANDS["deaf"], "resilience.shutdown.timeout_s=100")
    job = commands.job(0)
    wait_ready(job, sweep)
    sweep.signal(signal.SIGINT)
    until(lambda: job.state["state"] == "stopping", "stop")
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130, sweep.output
    assert job.marked == []
    assert job.state["code"] == -signal.SIGKILL


# -- a command in a config -------------------------------------------------------------------------

SWEPT = """
    defaults: [{resilience: default}, _self_]
    lr: 1.0
    name: a b
    command: [printf, "%s|", "${lr}", "--name=${name}", "$HOME", "${hydra:job.num}"]
"""


OF_LAUNCHER = ["--config-name", "conf", "-m", "lr=1e-3,1e-4", "hydra.launcher.n_jobs=1"]


@pytest.mark.parametrize(("given", "jobs"), [(["--", "echo", "1"], 1), (OF_LAUNCHER, 2)])
def test_without_a_launcher_it_is_the_local_one(given, jobs, tmp_path):
    """Hydra's basic launcher would run the jobs one after the other, without a policy.

    Regression test: the installed script ran a file `exec` of the current directory, as Python.
    """
    with contextlib.closing(Commands(tmp_path / "project", SWEPT)) as commands:
        (commands.folder / "exec").write_text("raise SystemExit('not the command')")
        place = f"hydra.sweep.dir={hydra_quoted(str(commands.sweep_dir))}"
        command = [sys.executable, FORGE, "exec", place, *given]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {"cwd": commands.folder, "start_new_session": True, "is_parent": True}
        done = warm.run(command, text=True, timeout=100, **both, **options)
        assert done.returncode == 0, done.stdout
        for number in range(jobs):
            assert commands.job(number).state["state"] == "finished"
            if given is OF_LAUNCHER:  # no shell reads the words
                said = commands.job(number).output.splitlines()[1]
                assert said.startswith(f"0.00{'0' * number}1|--name=a b|$HOME|{number}|")


def test_a_command_has_hydra_s_environment_and_place_and_its_own_srun_makes_ranks(commands):
    """Hydra's keys for both must also apply to commands. Tasks that the command starts by srun
    would otherwise each act as a single process and overwrite the others' checkpoints.
    """
    script = (
        "import os; from forge.process import world;"
        " step = {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': '1', 'SLURM_LOCALID': '1'};"
        " found = world.of(os.environ | step); print('rank', found.rank, 'of', found.size);"
        " print(os.environ['NAME'], 'in', os.getcwd())"
    )
    overrides = ("+hydra.job.env_set.NAME='a b'", "hydra.job.chdir=true")
    done = commands.run(*overrides, "--", sys.executable, "-c", script)
    job = commands.job(0)
    assert "rank 1 of 2" in job.output, done.stdout
    assert f"a b in {job.directory}" in job.output, done.stdout


def test_several_tasks_of_srun_are_refused_each(commands):
    """Otherwise one task would train as a single rank, and the others would be refused or wait."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    done = commands.run("--", "touch", "ran", **step)
    assert done.returncode == ExitCode.BAD_CONFIG, done.stdout
    assert "SLURM_STEP_NUM_TASKS=2, this is task 1" in done.stdout
    assert "`forge exec -- srun COMMAND…`" in done.stdout
    assert not (commands.folder / "ran").exists()
    done = commands.run("--", "touch", "ran", **step, FORGE_RANKS="1")
    assert (done.returncode, (commands.folder / "ran").exists()) == (0, True), done.stdout


def test_each_rank_runs_the_command_and_has_its_own_log(commands):
    """The command runs once per rank, as under srun with several tasks."""
    script = 'echo "$RANK of $WORLD_SIZE"; [ "$FORGE_ATTEMPT" = 2 ] || exit 75'
    job, said = run(commands, script, "hydra.launcher.tasks_per_job=2")
    assert len(ends(job)) == 2, said
    for number, end in enumerate(("", ".1")):
        log = (job.directory / f"output.log{end}").read_text()
        first, second = log.split("==== forge: attempt ")[1:]
        assert f"{number} of 2" in first
        assert f"{number} of 2" in second


def test_a_sweep_of_the_installed_script_is_resumed_by_it(commands):
    """The printed command is `forge exec`, as typed, and not `python …/bin/forge exec`."""
    script = Path(sys.executable).with_name("forge")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 100}
    command = [str(script), "exec", "--", "bash", "-c", "test -e flag || { touch flag; exit 3; }"]
    # Its first line has the kernel start Python with it.
    first = warm.run([sys.executable, *command], cwd=commands.folder, is_parent=True, **both)
    assert first.returncode == 1, first.stdout
    line = first.stdout.partition("To resume this sweep after a stop:\n")[2].partition("\n")[0]
    assert f" && {shlex.quote(str(script))} exec -m " in line
    _, folder, _, *typed = shlex.split(line)
    again = warm.run([sys.executable, *typed], cwd=folder, is_parent=True, **both)
    assert (again.returncode, "1 of 1 finished" in again.stdout) == (0, True), again.stdout


def test_a_sweep_that_resumes_keeps_the_command_it_began_with(tmp_path):
    """The saved state belongs to that command, even if the config file was edited since."""
    text = SWEPT.replace("printf", "bash, -c, 'printf x$0 >> $FORGE_JOB_DIR/ran; exit $1', 1, 1")
    with contextlib.closing(Commands(tmp_path / "project", text)) as commands:
        command = ("--config-name", "conf")
        assert commands.run(*command).returncode == 1
        conf = commands.folder / "conf.yaml"
        conf.write_text(conf.read_text().replace("1, 1", "2, 0"))
        again = commands.run(*command)
        assert again.returncode == 1
        assert "resumes with the command of its first start" in again.stdout
        assert commands.run(*command, "resilience.resume=changed").returncode == 0
        assert (commands.job(0).directory / "ran").read_text() == "x1x1x2"


PAGE_TRAIN = """
import os, sys
from pathlib import Path
lock = Path(os.environ["FORGE_JOB_DIR"], "lock")
print(sys.argv[1:])
if os.environ["FORGE_ATTEMPT"] == "1":
    lock.touch()
sys.exit(3 if lock.exists() else 0)
"""


def test_the_config_of_the_page(tmp_path):
    """Both of its blocks, in one file."""
    text = "".join(readme.blocks("yaml", readme.DOCS / "how-to" / "any-command.md"))
    with contextlib.closing(Commands(tmp_path / "project", text)) as commands:
        (commands.folder / "conf.yaml").rename(commands.folder / "job.yaml")
        (commands.folder / "train.py").write_text(PAGE_TRAIN)
        done = commands.run("--config-name", "job", "-m", "lr=1e-3,1e-4")
        assert done.returncode == 0, done.stdout
        for number, rate in enumerate(("0.001", "0.0001")):
            job = commands.job(number)
            assert ends(job) == ["failed failed 3", "finished finished 0", "finished finished 0"]
            assert f"['--lr={rate}', '--out={job.directory}']" in job.output


WORDS = ["", " ", "a b", "'", '"', "\\", "\\'", "a\\", "\n", "${lr}", "\\${x}", "$(ls)", "`ls`"]
WORDS += ["1", "1e3", "true", "null", "[a,b]", "{a:b}", "a,b", "a=b", "--x=1", "é", "%", "-", "--"]


WORDS += ["???", "hydra/launcher=slurm", "-m"]


def test_the_words_after_the_dashes_come_to_the_command_as_they_are(commands):
    """Hydra's override parser would change or reject most of these words."""
    script = "import os, sys; open(os.environ['FORGE_JOB_DIR'] + '/w', 'w').write(repr(sys.argv))"
    done = commands.run("--", sys.executable, "-c", script, *WORDS)
    assert done.returncode == 0, done.stdout
    assert eval((commands.job(0).directory / "w").read_text())[1:] == WORDS


# -- bad input -------------------------------------------------------------------------------------

BAD = {
    "command: python train.py": [
        "`command=python train.py`",
        "expected a list of arguments, found a text",
        "`command: [python, train.py]`",
    ],
    "command: []": ["`command`: expected a command, found none", "after `--`"],
    "x: 1": ["`command`: expected a command, found none", "after `--`"],
    "command: [true, null]": ["`command[1]`: expected a text or a number, found null"],
    "command: [true, [a]]": ["`command[1]`: expected a text or a number, found a list"],
    "command: {a: b}": ["expected a list of arguments, found a group of keys"],
    "command: ['???']": ["`command`: expected a value for each `???`"],
    "command: ['${nowhere}']": ["`command` cannot be resolved", "nowhere"],
    "command: [no-such-program]": ["`command[0]=no-such-program`", "found none of that name"],
    "command: [./conf.yaml]": ["`command[0]=./conf.yaml`", "found none", "chmod +x"],
    "command: [./nowhere]": [
        "`command[0]=./nowhere`",
        "found none",
        "Correct the name",
    ],
    "command: [/nowhere/x]": ["`command[0]=/nowhere/x`", "found none of that name"],
    "command: [./trap.sh]\nhydra: {job: {chdir: true}}": [
        "`command[0]=./trap.sh`: expected an absolute path, since the command starts in the job's",
        "project/trap.sh",
    ],
}


def unfit(text):
    return f"defaults: [{{resilience: default}}, _self_]\n{text}\n"


@pytest.mark.parametrize("text", BAD)
def test_a_command_that_cannot_be_run_is_told_by_its_key(text, tmp_path, monkeypatch):
    """With what was expected, what was found, and what to do."""
    with contextlib.closing(Commands(tmp_path / "project", unfit(text))) as commands:
        monkeypatch.chdir(commands.folder)
        with hydra.initialize_config_dir(str(commands.folder), version_base=None):
            given = ["hydra/launcher=local"]
            job = hydra.compose("conf", given, return_hydra_config=True)
            with pytest.raises(ConfigError) as caught:
                command_of(job)
    said = " ".join(str(caught.value).split())
    assert [part for part in BAD[text] if part not in said] == [], said


def test_a_command_that_cannot_be_run_is_told_before_anything_is_started(tmp_path):
    """The exit code and the message are those of a config error."""
    text = next(iter(BAD))
    with contextlib.closing(Commands(tmp_path / "project", unfit(text))) as commands:
        done = commands.run("--config-name", "conf", "resilience.requeue.max_failures=1")
    assert done.returncode == ExitCode.BAD_CONFIG, done.stdout
    said = " ".join(done.stdout.split())
    assert "has no `resilience`" not in said
    assert [part for part in BAD[text] if part not in said] == [], said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"exec": {"signal": "KILL"}}, "`resilience.exec.signal=KILL`: expected TERM | INT | HUP"),
        ({"exec": {"signal_to": "all"}}, "`resilience.exec.signal_to=all`: expected group | leade"),
        ({"exec": {"zero_after_signal": 0}}, "expected requeue | finished"),
        ({"exec": {"done_file": "/"}}, "expected the name of a file"),
        ({"requeue": {"rules": [{"exit_codes": [75]}]}}, "75 already has a meaning (asks to be ru"),
        (
            {"requeue": {"rules": [{"reason": "code_changed"}]}},
            "`resilience.requeue.rules[0].reason=code_changed`: forge does not know the source fil",
        ),
        (
            {"requeue": {"rules": [{"exit_codes": [3], "recover": "x"}]}},
            "expected a list of {exit_codes: [1, …]",
        ),
    ],
)
def test_a_policy_that_no_command_could_follow_is_told(policy, said):
    """The error names the key."""
    with pytest.raises(ConfigError) as caught:
        loading.load(policy, is_command=True)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra/launcher=basic", "`hydra/launcher`: expected local or slurm, found another"),
        (
            "hydra.sweep.dir=/proc/nowhere",
            "`hydra.sweep.dir=/proc/nowhere` cannot be created: ",
        ),
    ],
)
def test_what_no_command_could_run_in_is_told(override, said, commands):
    """Regression test: the basic launcher restarted forever; a bad directory was a traceback."""
    command = [sys.executable, FORGE, "exec", override, "--", "echo"]
    done = warm.run(
        command,
        cwd=commands.folder,
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == ExitCode.BAD_CONFIG, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--"], ["-m", "x=1", "--"]])
def test_a_command_line_without_a_command_ends_with_2(arguments, capsys):
    """Wrong arguments give exit code 2, as in other programs; a bad config gives 78."""
    assert main(arguments) == 2
    assert "expected a command after `--`, or a config" in capsys.readouterr().err


def test_a_command_twice_is_told(tmp_path):
    """Otherwise forge would silently ignore one of the two."""
    conf = "defaults: [{resilience: default}, _self_]\ncommand: [echo, a]\n"
    with contextlib.closing(Commands(tmp_path / "project", conf)) as commands:
        done = commands.run("--config-name", "conf", "--", "echo", "b c")
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "`command=echo a`: the config has this command, and the command line" in done.stdout
    assert "another one after `--`: echo 'b c'" in done.stdout


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("command: [echo]", "`resilience`: expected a policy, found none"),
        ("command: [echo]\nresilience: {enabled: true}", "`hydra/launcher`: expected local or"),
    ],
)
def test_a_config_without_a_preset_is_told(conf, said, tmp_path):
    """Without a preset, Hydra's basic launcher would run the jobs without a policy."""
    with contextlib.closing(Commands(tmp_path / "project", conf + "\n")) as commands:
        command = [sys.executable, FORGE, "exec", "--config-name", "conf"]
        pipe = subprocess.PIPE
        done = warm.run(
            command, cwd=commands.folder, text=True, timeout=60, stdout=pipe, stderr=pipe
        )
    assert done.returncode == ExitCode.BAD_CONFIG
    assert said in done.stdout + done.stderr


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", few(1, ["wrapper", "supervisor", "task"]))
def test_whichever_process_is_killed_the_command_comes_to_its_end_and_nothing_is_left(
    kind, commands
):
    """Without its wrapper it saves; otherwise it restarts from what it had saved before."""
    sweep = commands.begin(COMMANDS["trap"])
    job = commands.job(0)
    wait_ready(job, sweep)
    (job.directory / "state").write_text("10\n")  # the command saved step 10 earlier
    job.kill(kind)
    assert sweep.wait() == 0, sweep.output + job.output
    assert job.state["state"] == "finished"
    assert job.state["counts"]["failures"] == 1
    assert steps(job) == list(range(1, 21))
    assert job.marked == []


def test_a_killed_launcher_has_its_commands_save_and_the_next_start_resumes_them(commands):
    """Otherwise the commands would continue to run, and no user would see them."""
    sweep = commands.begin(COMMANDS["trap"])
    job = commands.job(0)
    wait_ready(job, sweep)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    until(job.is_free, "end of the job")
    assert ends(job) == ["terminated orphaned 0"]
    assert commands.go_on(sweep.output).returncode == 0
    assert steps(job) == list(range(1, 21))


@pytest.mark.proofs  # as of each sweep: test_sweeps.py
def test_two_at_once_of_the_same_directory(commands):
    """The second is refused, and the first is not disturbed."""
    sweep = commands.begin(COMMANDS["trap"])
    job = commands.job(0)
    wait_ready(job, sweep)
    second = commands.run("--", *COMMANDS["trap"])
    assert second.returncode == ExitCode.IN_USE
    assert "belongs to a sweep that is running" in second.stdout
    stop(job, sweep)
    assert sweep.wait() == 0
    assert steps(job) == list(range(1, 21))


def test_another_command_in_the_same_directory_is_another_job(commands):
    """The second command must not resume from the files of the first."""
    run(commands, "echo one")
    run(commands, "echo two")
    assert "one" in commands.job(0).output
    assert "two" in commands.job(1).output
    assert "two" not in commands.job(0).output


def test_a_disk_without_room_for_logs_ends_no_command(disk, tmp_path):
    """The log itself can have filled the disk."""
    commands = Commands(tmp_path / "app")
    commands.popen = functools.partial(commands.popen, disk=(disk, "1m"))
    commands.sweep_dir = disk / "sweep"
    script = 'yes "$FORGE_ATTEMPT" | head -c 2000000; [ "$FORGE_ATTEMPT" != 1 ] || exit 75'
    sweep = commands.begin(["bash", "-c", script])
    its = warm.own_disk(sweep.popen, disk, "sweep")
    assert sweep.wait() == 0, sweep.output
    job = SweptJob(its / "sweep" / "0")
    assert (job.state["state"], job.state["counts"]["restarts"]) == ("finished", 1)
