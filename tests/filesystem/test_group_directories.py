"""Jobs in directories that others share or have prepared, as whole processes."""

import json
import os
import stat
import subprocess
import sys

import pytest
from forked import ForkedJob, completed
from rows import few
from sweeps import App
from two_users import ATTACKER, as_user, place

from forge.jobdir.job_files import forge_dir

PLAIN = """
    import hydra

    @hydra.main(version_base=None, config_path=None, config_name=None)
    def main(cfg):
        return cfg.get("mode")

    if __name__ == "__main__":
        main()
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users")


@pytest.fixture
def in_group():
    """An app in a directory of a group, as clusters have them, under umask 002."""
    before = os.umask(0o002)
    with place() as found:
        yield App(found.shared / "plain", train=PLAIN, conf="{}")
    os.umask(before)


@as_root
def test_a_sweep_in_a_group_s_directory_runs_and_can_be_read_but_not_changed(in_group):
    """The group must not be able to change executed files; its directories are not refused."""
    in_group.finish("+mode=a,b")
    in_group.finish("+mode=a,b")  # the files of the first sweep are trusted
    job = in_group.sweep_dir / "0"
    assert stat.S_IMODE(job.stat().st_mode) == 0o2775  # Hydra created it: the group can write to it
    files = [path for one in (job, in_group.sweep_dir) for path in forge_dir(one).rglob("*")]
    assert len(files) > 8

    def attempt():
        for path in files:
            if path.is_file():
                assert path.read_bytes() is not None
            assert not os.access(path, os.W_OK), path
            assert not os.access(path.parent, os.W_OK), path

    said = as_user(ATTACKER, attempt)
    assert said.code == 0, said.text


def prepare_sweep(app):
    os.umask(0)
    folder = forge_dir(app.sweep_dir)
    folder.mkdir(parents=True)
    (folder / "lock").symlink_to(app.folder / "train.py")


def prepare_link(app):
    os.umask(0)
    app.sweep_dir.mkdir()
    (app.sweep_dir / "0").symlink_to(app.folder.parent.parent / "home" / "other")


PREPARED = {
    "a sweep": (prepare_sweep, r"/.forge belongs to nobody (uid 65534), not to root"),
    "a link": (prepare_link, "home/other, and the link belongs to another user. Remove the link"),
}


@as_root
@pytest.mark.parametrize("case", PREPARED)
def test_a_sweep_that_somebody_else_prepared_is_refused(case, in_group):
    """Before the first job, an error names the owner and the remedy, with exit code 78."""
    prepare, complaint = PREPARED[case]
    text = (in_group.folder / "train.py").read_text()
    said = as_user(ATTACKER, lambda: prepare(in_group))
    assert said.code == 0, said.text
    done = in_group.run("+mode=a")
    assert done.returncode == 78, done.stdout
    assert complaint in done.stdout
    assert "`hydra.sweep.dir`" in done.stdout or "hydra.sweep.dir=" in done.stdout
    assert "Traceback" not in done.stdout
    assert (in_group.folder / "train.py").read_text() == text
    other = in_group.folder.parent.parent / "home" / "other"
    assert sorted(path.name for path in other.iterdir()) == ["step_5"]


@as_root
def test_a_config_that_somebody_else_stored_is_refused(in_group):
    """It can hold a `_target_` of their choice, which main would instantiate."""
    (in_group.folder / "conf.yaml").write_text("defaults: [{resilience: default}]")
    text = (in_group.folder / "train.py").read_text()
    text = text.replace("config_path=None, config_name=None", "config_path='.', config_name='conf'")
    (in_group.folder / "train.py").write_text(text + "    print('TRAINED')\n")
    folder = in_group.folder / "run"

    def prepare():
        os.umask(0)
        forge_dir(folder).mkdir(parents=True)
        (forge_dir(folder) / "config.yaml").write_text("mode: theirs\n")

    assert as_user(ATTACKER, prepare).code == 0
    command = [sys.executable, "train.py", f"hydra.run.dir={folder}"]
    done = subprocess.run(command, cwd=in_group.folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 78, done.stdout + done.stderr
    assert "/.forge belongs to nobody (uid 65534), not to root" in done.stdout + done.stderr
    assert "TRAINED" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("subdir", few(1, ["../..", "/tmp"]))
def test_the_list_of_jobs_leads_nowhere_that_the_config_does_not(subdir, tmp_path):
    """Otherwise jobs would overwrite files outside of the sweep's directory."""
    app = App(tmp_path / "plain", train=PLAIN, conf="{}")
    forge_dir(app.sweep_dir).mkdir(parents=True)
    entry = {"number": 0, "subdir": subdir, "overrides": ["+mode=a"]}
    (forge_dir(app.sweep_dir) / "jobs.jsonl").write_text(json.dumps(entry) + "\n")
    done = app.run("+mode=a")
    assert done.returncode == 78, done.stdout
    assert "outside of the sweep's directory, and `hydra.sweep.subdir` gives 0." in done.stdout
    assert not (tmp_path / ".forge").exists()
    app.finish("+mode=b")


CLOSED = """
import os, sys
os.closerange(0, 3)
for name in ("stdin", "stdout", "stderr"):
    setattr(sys, name, None)
    setattr(sys, f"__{name}__", None)
sys.argv[:] = sys.argv[1:]
exec(open(sys.argv[0]).read())
"""
"""As Python begins where all three are closed."""


@pytest.mark.parametrize(
    ("closed", "first"),
    few(1, [(None, 2), ("0<&- 1>&- 2>&-", 2), ("0<&- 1>&- 2>&-", 1), ("2>&-", 1)]),
)
def test_a_closed_stderr_becomes_no_file_of_ours(closed, first, tmp_path):
    """Messages were written into the lock, or into the ledger. From the `first` start on."""
    policy = {"nan": {"action": "warn"}}
    job = ForkedJob(tmp_path / "job", steps=6, kill_at={"3": "TERM"}, policy=policy)
    job.spec["bad_steps"] = [1, 4]
    arguments = [str(job.script), str(job.directory), json.dumps(job.spec)]
    codes = [job.run() for _ in range(1, first)]
    for _ in range(first, 3):
        if closed is None:
            command = ["-c", CLOSED, *arguments]
            codes.append(completed(command, tmp_path, FORGE_RESUME="changed").returncode)
            continue
        shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *arguments]
        codes.append(subprocess.run(shell, timeout=100).returncode)
    assert codes == [143, 0]
    for path in job.checkpoints.rglob("*"):
        if path.name.startswith(".lock"):
            assert path.read_bytes() == b"", path
        if path.suffix == ".jsonl":
            for line in path.read_text().splitlines():
                assert isinstance(json.loads(line), dict), path
    assert b"forge: " not in (forge_dir(job.checkpoints) / "progress").read_bytes()
