"""What checkpoints cost: forge beside its peers and the limits of memory and disk.

    python benchmarks/checkpoint.py [--mib N ...] [--threads N ...] [--rounds N] [--dir FOLDER]

Lightning is installed into an environment of its own (`--peers`, below the temporary folder by
default), which then runs every variant, forge as it is here and torch included. Each size and
number of threads has a process of its own (`saving.py`, `loading.py`), whole processes are started
for the way out (`stopping.py`). Rounds are interleaved; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ["lightning==2.6.6", "safetensors==0.8.0"]

BESIDE = "forge, beside"
CASES = ("cold rollback", "warm rollback", "cold resume", "warm resume")
LIMITS = ("the bytes, read once", "the bytes, checked, then read", "load_state_dict alone")
AIMS = {
    "blocks training / memcpy": (f"{BESIDE}: blocks", "memcpy", 1.2),
    "lost / DCP async": (f"{BESIDE}: lost", "DCP async, stager reused: lost", 0.25),
    "lost / Lightning async": (f"{BESIDE}: lost", "Lightning async: lost", 0.1),
    "lost / torch.save, fsync": (f"{BESIDE}: lost", "torch.save, fsync: lost", 0.15),
    "durable, alone / disk": ("forge alone: durable", "disk", 1.25),
    **{
        f"verified load / torch.load, {case}": (
            f"load, {case}: forge, verified",
            f"load, {case}: torch.load",
            0.6 if "cold" in case else 0.2,
        )
        for case in CASES
    },
}
"""Name -> numerator, denominator, and what it is to be at most."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What checkpoints cost.")
    parser.add_argument("--mib", type=int, nargs="+", default=[100, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    parser.add_argument("--peers", type=Path, help="an environment to make, or made before")
    options = parser.parse_args()
    peers = options.peers or Path(tempfile.gettempdir()) / f"forge-benchmark-peers-{os.getuid()}"
    python = str(environment(peers))
    place = ["--rounds", str(options.rounds)] + (["--dir", options.dir] if options.dir else [])
    for mib in options.mib:
        for threads in options.threads:
            found: dict[str, float] = {}
            sizes = ["--mib", str(mib), "--threads", str(threads)]
            for script in (["saving.py"], ["loading.py", "--json"]):
                found |= run([python, str(HERE / script[0]), *script[1:], *sizes, *place])
            show(f"{mib} MiB, {threads} thread(s), medians of {options.rounds}", found)
    stopped = min(100, max(options.mib))
    found = run([python, str(HERE / "stopping.py"), "--mib", str(stopped), *place])
    print(f"SIGTERM to process gone, {stopped} MiB")
    for name, value in found.items():
        print(f"  {name:44}{value:10.1f} ms")
    ratio = found["forge"] / found["torch.save and a normal exit"]
    print(f"  {'ratio':44}{ratio:10.2f}     aim: 0.5")
    print("of which the end of the interpreter, by its kind (see ending.py)")
    for name, value in run([python, str(HERE / "ending.py"), *place[:2]]).items():
        print(f"  {name:44}{value:10.1f} ms")


def environment(folder: Path) -> Path:
    """The Python of an environment that has the peers; what runs this has all the rest."""
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        print(f"Installing {', '.join(PEERS)} into {folder}: once, some minutes", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-deps", *PEERS, "lightning-utilities",
             "torchmetrics", "pytorch-lightning==2.6.6"],
            check=True,
        )  # fmt: skip
        (folder / "done").touch()
    return python


def run(command: list[str]) -> dict[str, Any]:
    """What a script prints, as JSON on its last line."""
    path = os.pathsep.join([str(HERE.parent), *(p for p in sys.path[1:] if p)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def show(title: str, found: dict[str, float]) -> None:
    """Print what was found, and the ratios that there are aims for."""
    print(title)
    for name in sorted(found):
        print(f"  {name:44}{found[name]:10.1f} ms")
    for name, (numerator, denominator, aim) in AIMS.items():
        if numerator in found and denominator in found:
            ratio = found[numerator] / found[denominator]
            print(f"  {name:44}{ratio:10.2f}     aim: {aim:g}")
    for case in CASES:
        for limit in LIMITS:
            ratio = found[f"load, {case}: limit: {limit}"] / found[f"load, {case}: torch.load"]
            print(f"  {f'limit: {limit} / torch.load, {case}':69}{ratio:.2f}")
    print(flush=True)


if __name__ == "__main__":
    main()
