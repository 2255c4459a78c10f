"""Jobs that each end, wait or run on with a planted cause, and what `forge why` has to say of them.

Each case is a file in the config group `case`, which sets `mode` and the keys of the policy that
the case needs; a sweep over `case=a,b,c` is a sweep over causes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import FORGE
from sweeps import TRAIN, App

PLANTED = '''
    def before(cfg, out):
        if cfg.mode == "no_run":
            time.sleep(600)
        if cfg.mode == "starting":
            hold_here()
        if cfg.mode == "config":
            cfg.resilience.checkpoint.keep_last = -1

    def hold_here():
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.02)

    class Planted:
        """State whose save is slow."""

        def __init__(self, mode):
            self.mode = mode

        def state_dict(self):
            from forge.shutdown import stopping
            if self.mode == "slow_save" and stopping.is_stopping():
                time.sleep(600)
            return {}

        def load_state_dict(self, state):
            pass

'''
MISBEHAVE = """
    from forge.shutdown import stopping
    out = Path(HydraConfig.get().runtime.output_dir)
    if cfg.mode == "raises" and step == 17:
        raise ValueError("planted error")  # the line
    if cfg.mode == "edits" and step == 17:
        with Path(__file__).with_name("helper.py").open("a") as file:
            file.write("# edited\\n")
    if cfg.mode == "exits" and step == 12:
        os._exit(9)
    if cfg.mode == "killed" and step == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode == "killed_early" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode == "eats" and step == 17:
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1 << 20) * 16))
    if cfg.mode == "fills" and step == 17:
        with open(out.parents[1] / "ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass
    if cfg.mode == "damages" and step == 17:
        for path in (out / "checkpoints").glob("step_*/tensors*"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode in ("slow_step", "slow_save") and step == 17 and cfg.signal:
        os.kill(os.getpid(), signal.SIGTERM)
    if cfg.mode == "slow_step" and step == 17:
        time.sleep(600)
    if cfg.mode in ("waits", "slow_save") and step == 17:
        while not stopping.is_stopping():
            time.sleep(0.02)
    if cfg.mode == "holds" and step == cfg.at:
        while not stopping.is_stopping():
            time.sleep(0.02)
    if cfg.mode == "save_fails" and step == 5:
        fsync = os.fsync

        def failing(fd):
            if "step_" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(5, "planted: no answer")
            fsync(fd)

        os.fsync = failing
    if cfg.mode == "save_fails" and step == 12:
        while not stopping.is_stopping():
            time.sleep(0.02)
"""
_RUN = "with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:"
_NAN = "loss = model(torch.randn(3, 4)).square().mean()\n"
PLANTED_TRAIN = (
    TRAIN.replace("    import forge\n", "    import forge\n    import helper\n", 1)
    .replace("    def misbehave(", f"{PLANTED}    def misbehave(")
    .replace(
        _RUN,
        "before(cfg, out)\n        planted = Planted(cfg.mode)\n"
        "        with forge.Run(\n            cfg.resilience, model=model, optimizer=optimizer,"
        " planted=planted\n        ) as run:",
    )
    .replace(
        _NAN,
        f"{_NAN}                if cfg.mode == 'nan' and step == 17: loss = loss * float('nan')\n",
    )
)
CONF = """
    defaults: [{resilience: default}, _self_, {case: ends}]
    lr: 0.1
    seed: 3
    steps: 40
    step_s: 0
    mode: ends
    signal: true
    at: 17
    resilience:
      shutdown: {timeout_s: 20}
      checkpoint: {every_steps: 10, every_s: null}
      health: {enabled: false}
      requeue: {max_failures: 0, max_timeouts: 0}
"""


@dataclass(frozen=True)
class Case:
    """A job with a planted cause."""

    name: str
    causes: str
    """The causes that `forge why` has to find, in order, separated by spaces."""
    evidence: str
    """A regular expression that has to match in the answers: a file, a line or a number."""
    mode: str = ""
    """What the job does; empty: as the name."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Keys of `resilience`."""
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of the config."""

    def content(self) -> dict[str, Any]:
        """The file of the config group."""
        return {"mode": self.mode or self.name, "resilience": self.policy, **self.more}


class PlantedApp(App):
    """The user's folder, with a config group of cases."""

    def __init__(self, folder: Path, cases: list[Case]) -> None:
        super().__init__(folder, PLANTED_TRAIN, CONF, MISBEHAVE)
        (folder / "helper.py").touch()
        (folder / "case").mkdir()
        for case in [Case("ends", "", ""), *cases]:
            text = f"# @package _global_\n{json.dumps(case.content())}\n"
            (folder / "case" / f"{case.name}.yaml").write_text(text)

    @property
    def line(self) -> str:
        """The line of the planted exception, as `forge why` prints it."""
        lines = (self.folder / "train.py").read_text().splitlines()
        number = next(n for n, text in enumerate(lines, 1) if "# the line" in text)
        return f"train.py:{number} in misbehave"


def forge(*words: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command of forge as a person does; its output."""
    command = [sys.executable, FORGE, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr


def answers(sweep: Path, *jobs: object, env: dict[str, str] | None = None) -> dict[int, list[dict]]:
    """Number of a job -> the answers of `forge why --json`, from the directory above the sweep."""
    text = forge("why", "--json", sweep, *jobs, cwd=sweep.parent, env=env)
    assert text.startswith("{"), text
    return {one["number"]: one["answers"] for one in json.loads(text)["jobs"]}


def row(case: Case, found: list[dict]) -> tuple[list[str], bool]:
    """The row of a case in the table, and whether the answers are the right ones."""
    causes = " ".join(one["cause"] for one in found)
    text = "\n".join(
        line for one in found for line in [one["text"], *one["evidence"], *one["remedy"]]
    )
    match = re.search(case.evidence, text)
    is_right = causes == case.causes and match is not None
    shown = match[0] if match else f"not found: {case.evidence}\n{text}"
    return [case.name, causes, shown, "found" if is_right else f"WRONG: {case.causes}"], is_right
