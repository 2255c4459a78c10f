"""Plants thirty one-line defects, spread over the layers, and prints which tests catch them.

    python tests/proofs/planted.py                    all defects
    python tests/proofs/planted.py retention requeue  defects whose names contain one of the words
    python tests/proofs/planted.py --list             check that the line of each defect exists

Each defect is made in a copy of the tree. The tests that are most likely to fail run first; if they
pass, the tests of the whole folder follow. Tests of `make proofs` do not count, since the purpose
is to show that `make test` is sufficient. Prints a row for each defect; exits with 1 if a defect
was missed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Defect(NamedTuple):
    """A line of forge, and a plausible wrong version of it."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: str
    """The tests most likely to fail; all tests of their folders run next."""


DEFECTS = [
    # -- files ---------------------------------------------------------------------------------
    Defect(
        "atomic_sync",
        "filesystem/files.py",
        "os.fsync(fd)",
        "pass",
        "after a power cut the file is empty",
        "filesystem",
    ),
    Defect(
        "foreign_world_writable",
        "filesystem/foreign.py",
        "if mode & stat.S_IWOTH:",
        "if mode & stat.S_IXOTH & 0:",
        "others may exchange what forge unpickles",
        "filesystem",
    ),
    # -- checkpoints ---------------------------------------------------------------------------
    Defect(
        "reading_checksums",
        "checkpoint/files.py",
        "if self._checksums[number] == found or not self._is_checked:",
        "if found:",
        "a damaged checkpoint is resumed from",
        "checkpoint/test_reading_damage.py checkpoint/test_store_on_disk.py",
    ),
    Defect(
        "store_damaged_counts",
        "checkpoint/store.py",
        "self._seen.damaged.update(path.name for path in damaged)",
        "pass",
        "a damaged checkpoint takes the place of a good one, which is removed",
        "checkpoint/test_retention.py checkpoint/test_store.py",
    ),
    Defect(
        "retention_rollback_goal",
        "checkpoint/retention.py",
        "if _step(path) <= first_bad - self._keep_back_steps:",
        "if _step(path) < begin:",
        "a rollback finds nothing to go back to",
        "checkpoint/test_retention.py training/nan/test_nan_rollback.py",
    ),
    Defect(
        "fence_zombie",
        "checkpoint/fence.py",
        "if is_taken and not self._supersedes(holder):",
        "if is_taken and not holder:",
        "an attempt that wakes up late writes over the newer one",
        "checkpoint/test_fence.py",
    ),
    Defect(
        "copies_shared",
        "checkpoint/staging.py",
        "self._buffer = self._views = None  # the last copy is not written yet: it keeps them",
        "pass",
        "a save that is still being written is overwritten by the next",
        "checkpoint/test_nearly_free.py checkpoint/test_busy_saves.py checkpoint/test_store.py",
    ),
    # -- state, data ---------------------------------------------------------------------------
    Defect(
        "rng_numpy",
        "state/rng.py",
        'numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))',
        "pass",
        "a resumed job draws other numbers",
        "data/test_random_states.py data/test_exact_resume.py",
    ),
    Defect(
        "optimizer_shapes",
        "state/optimizer_state.py",
        "if num_live != num_saved:",
        "if num_live > num_saved:",
        "an optimizer's averages go to other parameters",
        "state/test_optimizer_state.py",
    ),
    Defect(
        "position_taken",
        "data/position.py",
        "self.taken, self._is_waiting = taken, taken == 0\n",
        "self.taken, self._is_waiting = 0, taken == 0\n",
        "a job that is stopped twice in an epoch sees batches again",
        "data/test_position.py",
    ),
    Defect(
        "seeding_not_put_back",
        "data/seeding.py",
        "if before is not None:",
        "if before is None:",
        "what a sample draws changes what training draws",
        "data/test_exact_resume.py data/test_position.py",
    ),
    # -- training ------------------------------------------------------------------------------
    Defect(
        "session_nan_streak",
        "training/nan/update.py",
        'self._nan.load_state_dict(state["nan"])',
        "pass",
        "each restart forgets the streak of NaNs, so that none ever halts",
        "training/nan/test_nan_rollback_resumed.py training/nan",
    ),
    Defect(
        "saver_in_a_row",
        "training/saver.py",
        "        self._failures = 0\n        self.costs",
        "        self.costs",
        "a few failed saves in a week end a run",
        "training/test_saver.py",
    ),
    Defect(
        "metrics_alias",
        "training/metrics.py",
        "value.detach().clone()",
        "value.detach()",
        "a logged tensor that is reused shows another step's value",
        "training/test_logged_metrics.py",
    ),
    # -- processes, signals --------------------------------------------------------------------
    Defect(
        "limit_longest_step",
        "process/time_limit.py",
        "self._ways.add(now - self._since)",
        "self._ways.add(0.0)",
        "a job with long steps is killed at its limit, unsaved",
        "process/test_time_limit.py",
    ),
    Defect(
        "signals_ctrl_c",
        "shutdown/signal_handler.py",
        "if self._decisive is None or received is signal.SIGINT:",
        "if self._decisive is None:",
        "Ctrl+C after a preemption's signal requeues the job",
        "shutdown/test_shutdown_handler.py shutdown",
    ),
    Defect(
        "stopping_order",
        "shutdown/stopping.py",
        "_state.callbacks[::-1]",
        "_state.callbacks[:]",
        "what was opened first is closed first",
        "shutdown/test_signals.py",
    ),
    # -- the job -------------------------------------------------------------------------------
    Defect(
        "ledger_replayed",
        "jobdir/ledger.py",
        '_forget_after(run, event["step"]',
        "_forget_after(run, 1 << 62",
        "metrics of repeated steps are in the ledger twice, or with their old values",
        "jobdir/test_ledger.py",
    ),
    Defect(
        "identity_program",
        "jobdir/config_changes.py",
        "return found + changes(",
        "return changes(",
        "another script resumes from the checkpoints of this one",
        "jobdir/test_identity.py training/start/test_checkpoint_owner.py",
    ),
    Defect(
        "rules_lead",
        "config/rules.py",
        "if time_limit_s is not None and warning_s >= time_limit_s:",
        "if time_limit_s is not None and warning_s > time_limit_s + 1:",
        "a job is signalled as it starts",
        "config/test_rules.py",
    ),
    Defect(
        "requeue_progress",
        "job/requeue.py",
        "counts.no_progress = counts.early_evictions = 0",
        "counts.early_evictions = 0",
        "a job that makes progress is given up",
        "job/test_requeue.py",
    ),
    Defect(
        "supervisor_orphan",
        "job/supervisor.py",
        "self._pass_on(signal.SIGTERM, processes.descendants())",
        "pass",
        "a task whose wrapper was killed trains on, and then is killed unsaved",
        "job/test_supervisor.py launch/test_rough_ground.py",
    ),
    # -- Slurm ---------------------------------------------------------------------------------
    Defect(
        "client_requeued",
        "slurm/client.py",
        "if info.restarts > own_restarts:",
        "if info.restarts < own_restarts:",
        "a preemption without grace is taken for a crash",
        "slurm/test_reasons.py slurm/test_wrapper.py",
    ),
    Defect(
        "wrapper_killed",
        "launch/slurm/sbatch.py",
        '[ "$forge_code" = 137 ] || break',
        "break",
        "a wrapper that is killed takes its job with it",
        "slurm/test_rough_cluster.py slurm/test_disturbed.py",
    ),
    Defect(
        "step_early",
        "slurm/step.py",
        '_SIGNALS = "TERM HUP INT USR1 USR2"',
        '_SIGNALS = "TERM HUP INT USR1"',
        "a signal in the first second of a task kills it",
        "slurm/test_step.py",
    ),
    # -- launchers -----------------------------------------------------------------------------
    Defect(
        "sweep_same_overrides",
        "launch/sweep.py",
        "if place.number not in self._taken:",
        "if place.number >= 0:",
        "two jobs with equal overrides share a directory",
        "launch/test_compose.py launch/test_sweeps.py launch/test_options.py",
    ),
    Defect(
        "frozen_changed_again",
        "hydra_app/frozen.py",
        'policy["resume"] = "same"',
        "pass",
        "a change that was asked for once is made again at every requeue",
        "hydra_app/test_same_job.py hydra_app",
    ),
    Defect(
        "submitit_budgets",
        "job/last_act.py",
        "self.job.set_budgets(None if has_ended else before)",
        "self.job.set_budgets(None)",
        "budgets start anew with every requeue, so that a job never ends",
        "submitit",
    ),
    Defect(
        "rehearse_verdict",
        "rehearse/verdicts.py",
        "num_bad += 1",
        "num_bad += 0",
        "`forge rehearse` calls a script exact that is not",
        "rehearse",
    ),
    Defect(
        "cli_exit_code",
        "cli/checkpoints.py",
        "return int(error.exit_code)",
        "return 0",
        "a script that checks a checkpoint gets exit code 0 though it is damaged",
        "cli",
    ),
]


def anchored(defect: Defect, root: Path) -> str:
    """The text of the file, with the defect."""
    path = root / "forge" / defect.file
    text = path.read_text() if path.exists() else ""
    assert text.count(defect.old) == 1, (
        f"{defect.name}: expected once in {path}, found {text.count(defect.old)} times:"
        f" {defect.old}"
    )
    return text.replace(defect.old, defect.new)


def run(paths: list[str], tree: Path, folder: Path, left_out: list[str]) -> str:
    """The first test of `make test` that fails; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    if "proofs:" in (tree / "pyproject.toml").read_text():  # an older tree has no such marker
        command += ["-m", "not proofs"]
    command += ["--basetemp", str(folder / "tmp"), *paths]
    command += [f"--deselect={one}" for one in left_out]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    match = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return match[1] if match else ""


def catch(defect: Defect, root: Path, keep: list[str]) -> str:
    """A test that fails with the defect and passes without it; empty if there is none."""
    with tempfile.TemporaryDirectory(prefix="forge-planted-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # some tests act as another user
        tree = folder / "tree"
        for file in keep:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, tree / file)
        path = tree / "forge" / defect.file
        good, bad = path.read_text(), anchored(defect, tree)
        likely = [f"tests/{one}" for one in defect.tests.split()]
        folders = {str(Path(one).parent if one.endswith(".py") else one) for one in likely}
        left_out: list[str] = []
        for paths in (likely, sorted(folders)):
            path.write_text(bad)
            while caught := run(paths, tree, folder, left_out):
                path.write_text(good)
                if not run([caught], tree, folder, []):
                    return caught
                left_out.append(caught)  # it fails without the defect, too
                path.write_text(bad)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="of the names of defects")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (this one)")
    parser.add_argument("--list", action="store_true", help="only look for the lines")
    options = parser.parse_args()
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=options.root, capture_output=True, text=True, check=True)
    keep = [file for file in listed.stdout.splitlines() if (options.root / file).is_file()]
    wanted = [
        one
        for one in DEFECTS
        if not options.words or any(word in one.name for word in options.words)
    ]
    missed = 0
    for defect in wanted:
        began = time.monotonic()
        try:
            anchored(defect, options.root)
        except AssertionError as error:
            print(f"LOST    {error}", flush=True)
            missed += 1
            continue
        if options.list:
            continue
        caught = catch(defect, options.root, keep)
        missed += not caught
        took_s = time.monotonic() - began
        verdict = "caught" if caught else "MISSED"
        print(f"{verdict}  {defect.name:<24} {took_s:5.0f} s  {caught or defect.why}", flush=True)
    print(f"{len(wanted) - missed} of {len(wanted)} {'found' if options.list else 'caught'}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
