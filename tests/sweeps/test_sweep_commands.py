"""`forge status`, `why`, `logs`, `verify` and `report`, as a person types them."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
import time

import pytest
from looked_at import make_older
from two_users import ATTACKER, as_user, place

from forge.cli import cancel, logs, report, resume, status, verify, why
from forge.cli.sweep_command import USAGE, pick
from forge.slurm import client
from forge.sweeps.chosen_metric import Chosen


@pytest.fixture
def run(capfd, monkeypatch):
    """Run a command; returns its output."""

    def call(command, *arguments, code=0, columns=None):
        if columns is not None:
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("NO_COLOR", "1")
        assert command.main([*map(str, arguments)]) == code
        out, err = capfd.readouterr()
        return out if code != USAGE else err

    return call


def test_status_shows_each_job_and_what_to_type_next(run, swept, monkeypatch):
    """In 80 columns: a person reads it over ssh."""
    monkeypatch.chdir(swept.parent)
    text = run(status, swept, columns=80)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])  # the first is a path
    assert "2 finished · 2 failed" in text
    assert "ValueError: planted error" in text
    assert "2 attempts: 1 crashed, 1 finished" in text
    assert "checkpoint step_10, " in text
    assert "forge why 1 " in text
    assert "forge resume  " in text


def test_the_commands_to_type_next_are_about_the_same_sweep(run, swept, tmp_path, monkeypatch):
    """Without its path, `forge resume` would start the jobs of a newer sweep."""
    old, new = tmp_path / "multirun" / "it's old", tmp_path / "multirun" / "new"
    for copy, when in ((old, 100), (new, 200)):
        shutil.copytree(swept, copy, symlinks=True)
        os.utime(copy / ".forge", (when, when))
    monkeypatch.chdir(tmp_path)
    named = f"forge resume {shlex.quote(str(old))}"
    lines = run(status, old, columns=80).splitlines()
    commands = [shlex.split(line.split("  ")[0])[1:] for line in lines if line[:6] == "forge "]
    assert [command[0] for command in commands] == ["why", "logs", "resume", "status"]
    words = [[word for word in command[1:] if word != "--csv"] for command in commands]
    assert {pick(one)[0].path for one in words} == {old}
    assert named in " ".join(run(why, old, 1).split())
    assert "forge resume`" in run(why, new, 1)
    monkeypatch.chdir(new)
    assert "forge resume  " in run(status, new, columns=80)
    monkeypatch.chdir(new / "1")  # the command would start this job alone
    assert f"forge resume {new}  " in run(status, new, columns=80)


def test_status_in_a_pipe_is_a_line_for_each_job(run, swept):
    """So that grep finds a job with all of its facts."""
    lines = run(status, swept).splitlines()
    (raised,) = [line for line in lines if "mode=raises" in line]
    assert "failed" in raised
    assert re.search(r"ValueError: planted error, at .*train\.py:\d+ in misbehave; log: ", raised)
    assert not any("forge why" in line for line in lines)


def test_status_as_json_has_all_fields_and_a_schema(run, swept):
    """For programs: the names of the dataclass."""
    content = json.loads(run(status, swept, "--json"))
    assert content["schema"] == 1
    job = content["jobs"][1]
    assert (job["state"], job["step"], job["steps"]) == ("failed", 17, 40)
    assert job["metrics"]["loss"]["last_step"] == 16
    assert job["ends"] == {"failed": 1}


def test_status_chooses_sorts_and_groups(run, swept):
    """Of a hundred jobs, those that matter."""
    failed = run(status, swept, "--failed")
    assert "mode=raises" in failed
    assert "mode=ends" not in failed
    text = run(status, swept, "--sort", "metric", "--metric", "val_acc:max")
    order = [line.split()[0] for line in text.splitlines() if line[:3].strip().isdigit()]
    assert order == ["0", "2", "1", "3"]
    groups = run(status, swept, "--group-by", "mode")
    assert "mode=raises  1 failed" in groups
    assert run(status, swept, "--running", "--group-by", "mode") == ""
    assert "expected one of: loss, val_acc" in run(status, swept, "--metric", "x", code=USAGE)
    assert "expected one of: " in run(status, swept, "--group-by", "x", code=USAGE)


@pytest.mark.parametrize(
    ("names", "is_higher"),
    [
        ("giou_loss train_f1_loss val/heatmap-loss GIoULoss acc_err score_error val_mape", False),
        ("loss wer lossless_bits", False),
        ("mIoU val_acc accuracy f1_macro mAP@50 bleu4 episode_return lossless_score", True),
    ],
)
def test_the_best_value_of_a_loss_is_its_lowest(names, is_higher):
    """Also if its name contains that of a score."""
    assert {name: Chosen(name).is_higher for name in names.split()} == dict.fromkeys(
        names.split(), is_higher
    )


def sweep_of(folder, jobs):
    """A sweep of jobs that are elsewhere: the directory and the overrides of each."""
    (folder / ".forge").mkdir(parents=True)
    lines = [
        json.dumps({"number": number, "subdir": str(path), "overrides": overrides})
        for number, (path, overrides) in enumerate(jobs)
    ]
    (folder / ".forge" / "jobs.jsonl").write_text("\n".join([*lines, ""]))
    return folder


def test_more_than_fifty_jobs_show_those_that_need_attention(run, swept, tmp_path):
    """And how many more there are."""
    jobs = [(swept / ("1" if number == 33 else "0"), [f"seed={number}"]) for number in range(60)]
    sweep = sweep_of(tmp_path / "many", jobs)
    shown = run(status, sweep, columns=80)
    assert "seed=33" in shown
    assert "seed=34" not in shown
    assert "… and 59 more" in shown
    assert "seed=34" in run(status, sweep, "--all", columns=80)


def test_watch_in_a_pipe_ends_with_the_sweep(run, swept):
    """A script can wait for a sweep in this way."""
    assert "2 finished" in run(status, swept, "--watch")


def test_watch_ends_with_the_reader_of_its_pipe(swept, tmp_path, monkeypatch):
    """`forge status --watch | head` would otherwise keep the shell until all jobs have ended."""
    copy = shutil.copytree(swept, tmp_path / "sweep", symlinks=True)
    shutil.rmtree(copy / "3")  # it waits for its start
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it looks again"))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert status.main([str(copy), "--watch"]) == 0


def test_why_names_the_line_of_the_exception_and_what_helps(run, swept):
    """Without a look into the log."""
    text = " ".join(run(why, swept, "1").split())
    assert "Your code raised an exception, at " in text
    assert "train.py:" in text
    assert "in misbehave: ValueError: planted error" in text
    assert "forge resume" in text
    answers = json.loads(run(why, swept, "3", "--json"))["jobs"][0]["answers"]
    assert answers[0]["cause"] == "exit_code"
    both = run(why, swept)
    assert "mode=raises" in both
    assert "mode=exits" in both
    assert "mode=ends" not in both


def test_logs_prints_the_output_of_a_job(run, swept):
    """All of it."""
    output = (swept / "1" / "output.log").read_text()
    assert run(logs, swept, "1") == output
    assert run(logs, swept, "mode=raises") == output
    assert run(logs, swept, "1", "-f") == output
    assert "name a job" in run(logs, swept, code=USAGE)


def test_status_as_csv_has_overrides_results_and_metrics(run, swept):
    """What main returned is there without the user's code."""
    rows = list(csv.DictReader(io.StringIO(run(status, swept, "--csv"))))
    assert [row["mode"] for row in rows] == ["ends", "raises", "dies", "exits"]
    assert [row["result"] for row in rows] == ["40", "", "40", ""]
    assert rows[0]["val_acc.best"] == "0.3"
    assert rows[0]["val_acc.best_step"] == "30"
    (first, *_) = csv.DictReader(
        io.StringIO(run(status, swept, "--csv", "--metric", "val_acc:min"))
    )
    assert first["val_acc.best"] == "0.0"
    assert "loss" not in first


def test_a_column_of_the_results_has_one_meaning(run, swept, tmp_path):
    """People sweep over `loss` and `steps`, and log the loss."""
    first = swept / "0", ["+loss=mse", "state=warm", "steps=1000"]
    sweep = sweep_of(tmp_path / "sweep", [first, (swept / "2", ["steps=9"])])
    one, other = csv.DictReader(io.StringIO(run(status, sweep, "--csv")))
    assert [one[name] for name in ("loss", "state", "steps")] == ["mse", "finished", "40"]
    assert (one["override.state"], one["override.steps"]) == ("warm", "1000")
    assert (other["loss"], other["override.state"], other["override.steps"]) == ("", "", "9")
    assert float(one["metric.loss"]) == float(other["metric.loss"]) > float(one["metric.loss.best"])
    assert one["val_acc.best"] == "0.3"


def test_verify_checks_every_checkpoint_and_names_the_damaged_one(run, swept, tmp_path):
    """Exit code 74, so that a script notices."""
    assert "0 damaged" in run(verify, swept)
    copy = tmp_path / "sweep"
    shutil.copytree(swept, copy, symlinks=True)
    (file,) = (copy / "1" / "checkpoints" / "step_10").glob("tensors*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    text = run(verify, copy / "1", code=74)
    assert "DAMAGED" in text
    assert "1 damaged" in text
    content = json.loads(run(verify, copy / "1", "--json", code=74))
    assert [one["is_intact"] for one in content["checkpoints"]] == [False]


def test_the_report_is_one_file_without_a_network(run, swept, tmp_path):
    """Every figure that has data, and no address that a browser would load."""
    file = tmp_path / "report.html"
    assert run(report, swept, "-o", file, "--metric", "val_acc:max") == f"{file}\n"
    text = file.read_text()
    for anchor in ("timeline", "goodput", "lost", "curves", "parallel", "stops", "saves", "jobs"):
        assert f'id="{anchor}"' in text, anchor
    assert "<script src" not in text
    assert "ValueError: planted error" in text
    assert len(text) < 6_000_000
    text = run(report, swept, "-o", tmp_path / "none" / "x.html", code=USAGE)
    assert "cannot be written" in text


def test_a_path_that_is_no_sweep_is_said_in_one_line(run, tmp_path):
    """By every command."""
    for command in (status, why, report, verify):
        text = run(command, tmp_path / "none", code=USAGE)
        assert "there is no such path" in text
        assert text.count("\n") == 1


def test_a_name_that_no_job_or_several_have_is_said(run, swept, monkeypatch):
    """The error is not about a path that the person did not mean."""
    monkeypatch.chdir(swept.parent)
    assert "`lr=0.2`: more than one job matches" in run(why, "lr=0.2", code=USAGE)
    assert "`mode=rises`: there is no such job" in run(why, "mode=rises", code=USAGE)
    assert "there is no such path" in run(why, "multirun/none", code=USAGE)
    for name in ("~key=x", f"layers=[{'1,' * 200}2]"):  # Hydra's own syntax, and no name of a file
        assert f"`{name}`: there is no such job" in run(why, name, code=USAGE)
        assert f"`{name}`: there is no such path" in run(verify, name, code=USAGE)


def test_a_sweep_that_others_can_write_is_read(run, swept, tmp_path, monkeypatch):
    """The sweep of a colleague, or of a group: nothing in the files is executed."""
    copy = shutil.copytree(swept, tmp_path / "sweep", symlinks=True)
    record = copy / ".forge" / "slurm" / "jobs.jsonl"
    record.parent.mkdir()
    record.write_text(
        '{"script": "x", "numbers": [3], "composed": [""]}\n{"script": "x", "id": "7"}'
    )
    shutil.rmtree(copy / "3")
    monkeypatch.setattr(client, "can_submit", lambda: True)
    monkeypatch.setattr(client, "queue", lambda within_s: {})
    for path in (copy, *copy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o022)
    shown = run(status, copy)
    assert "planted error" in shown
    assert "Slurm no longer knows it" in shown
    assert "planted error" in run(why, copy, 1)
    assert "planted error" in run(logs, copy, 1)
    assert ",ends,40," in run(status, copy, "--csv")
    assert "0 damaged" in run(verify, copy)
    assert run(report, copy, "-o", tmp_path / "report.html") == f"{tmp_path / 'report.html'}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_what_this_user_cannot_read_is_said_in_one_line(swept):
    """A closed directory next to the sweep is nobody's business: /tmp and /scratch have some."""

    def look(command, *arguments):
        os.chdir(shared.shared)
        with (
            os.fdopen(1, "w", closefd=False) as sys.stdout,
            os.fdopen(2, "w", closefd=False) as sys.stderr,
        ):
            return command.main([*map(str, arguments)])

    with place() as shared:
        copy = shutil.copytree(swept, shared.shared / "multirun" / "sweep", symlinks=True)
        (copy / "1" / "output.log").chmod(0o600)
        closed = shared.shared / "closed"
        closed.mkdir(0o700)
        assert "2 finished" in as_user(ATTACKER, lambda: look(status)).text
        for words in ((logs, 1), (status, closed)):
            said = as_user(ATTACKER, lambda words=words: look(*words)).text.splitlines()
            assert len(said) == 2, said
            assert ": Permission denied" in said[0]
            assert said[1] == str(USAGE)


def test_every_command_works_on_files_of_an_earlier_version(run, swept, tmp_path):
    """And says what is missing."""
    copy = make_older(swept, tmp_path / "sweep")
    text = run(status, copy)
    assert "2 finished · 2 failed" in text
    assert "plan.json" in text
    assert "1 damaged line" in text
    assert "ValueError: planted error" in run(why, copy, 1)
    assert "planted error" in run(logs, copy, 1)
    assert len(list(csv.DictReader(io.StringIO(run(status, copy, "--csv"))))) == 4
    assert "1 damaged" in run(verify, copy, code=74)  # the half one
    assert run(report, copy, "-o", tmp_path / "report.html") == f"{tmp_path / 'report.html'}\n"
    assert "job 1 has ended before" in run(cancel, copy, 1)
    text = run(resume, copy, "--dry-run")
    assert "job 1 (mode=raises) starts again from step_10" in text
