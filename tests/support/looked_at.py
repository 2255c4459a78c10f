"""The app whose sweeps are looked at, cancelled and resumed."""

import json
import shutil
from pathlib import Path

from sweeps import TRAIN

MISBEHAVE = """
    if cfg.mode == "raises" and step == 17:
        raise ValueError("planted error")
    if cfg.mode == "dies" and step == 25 and RESTARTS == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode == "exits" and step == 12:
        os._exit(9)
"""
LOG = "run.log(loss=loss)\n"
TRAINING = TRAIN.replace(LOG, f"{LOG}{' ' * 16}if step % 10 == 0: run.log(val_acc=step / 100)\n")
CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 0.1
    seed: 3
    steps: 40
    step_s: 0
    mode: ends
    resilience:
      checkpoint: {every_steps: 10, every_s: null}
"""


def make_older(swept: Path, copy: Path) -> Path:
    """A copy of a sweep, with files of an earlier version, torn lines and a half checkpoint."""
    shutil.copytree(swept, copy, symlinks=True)
    state = copy / "1" / ".forge" / "state.json"
    content = json.loads(state.read_text())
    for name in ("version", "host", "nodes", "began", "job", "start"):
        content.pop(name, None)
    state.write_text(json.dumps(content))
    for path in copy.glob("*/.forge/ledger/attempt_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line.pop("summary", None)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path.write_text(text + '{"t": 17, "kind": "met')
    with (copy / ".forge" / "jobs.jsonl").open("a") as file:
        file.write('\n{"number": 7, "sub')
    (copy / "3" / ".forge" / "plan.json").write_text("{")
    (copy / "0" / "checkpoints" / "step_99").mkdir()
    return copy
