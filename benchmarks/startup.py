"""What forge adds to the start of an interpreter and of Hydra apps.

    python benchmarks/startup.py [--rounds N]

Each round starts every variant once, in an order of its own, so that what else the machine does
meanwhile hits them alike. All run in one environment, with everything that forge requires; "with
forge" and "without" differ in one folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from environments import Environment  # noqa: E402 - where the tests have it

IMPORT_AIM_MS = 40
HYDRA_AIM_MS = 25

APP = """
import hydra

@hydra.main(version_base=None, config_path=".", config_name="{config}")
def main(cfg):
    pass

main()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What forge adds to a start.")
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(variants(Path(folder)), Path(folder), rounds)
    bare, hydra = medians["bare interpreter"], medians["Hydra app, without forge"]
    print(f"medians of {rounds} interleaved rounds, Python {sys.version.split()[0]}\n")
    print(f"{'':40}{'ms':>8}{'more ms':>10}{'ratio':>8}   aim")
    rows = [
        ("bare interpreter", bare, ""),
        ("import forge", bare, f"at most {IMPORT_AIM_MS} more"),
        ("import forge; forge.config.load", bare, ""),
        ("Hydra app, without forge", hydra, ""),
        ("Hydra app, with forge", hydra, f"at most {HYDRA_AIM_MS} more"),
        ("Hydra app, with resilience=default", hydra, ""),
    ]
    for name, base, aim in rows:
        ms = medians[name]
        print(f"{name:40}{ms:8.1f}{ms - base:10.1f}{ms / base:8.2f}   {aim}")


def variants(folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> (command, environment)."""
    with_forge, without = folder / "with", folder / "without"
    without.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "forge", with_forge / "forge", ignore=ignore)
    shutil.copytree(ROOT / "conf", with_forge / "forge" / "conf")
    shutil.copytree(ROOT / "hydra_plugins", with_forge / "hydra_plugins", ignore=ignore)
    (folder / "plain.yaml").write_text("lr: 0.1\nhydra: {output_subdir: null, run: {dir: .}}\n")
    (folder / "resilient.yaml").write_text("defaults: [resilience: default, plain, _self_]\n")
    for name in ("plain", "resilient"):
        (folder / f"{name}.py").write_text(APP.format(config=name))
    python = Environment.make(folder / "env", metadata.requires("hydra-forge") or []).python
    commands = {
        "bare interpreter": ([python, "-c", "pass"], without),
        "import forge": ([python, "-c", "import forge"], with_forge),
        "import forge; forge.config.load": (
            [python, "-c", "import forge; forge.config.load(None)"],
            with_forge,
        ),
        "Hydra app, without forge": ([python, str(folder / "plain.py")], without),
        "Hydra app, with forge": ([python, str(folder / "plain.py")], with_forge),
        "Hydra app, with resilience=default": ([python, str(folder / "resilient.py")], with_forge),
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return {
        name: (command, {**environment, "PYTHONPATH": str(path)})
        for name, (command, path) in commands.items()
    }


def measure(
    variants: dict[str, tuple[list[str], dict[str, str]]], folder: Path, rounds: int
) -> dict[str, float]:
    """Name -> median in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1 if rounds > 1 else 0, rounds):
        names = list(variants)
        random.Random(number).shuffle(names)
        for name in names:
            command, environment = variants[name]
            begin = time.perf_counter()
            subprocess.run(command, env=environment, cwd=folder, check=True)
            if number >= 0:  # round -1 only fills caches, bytecode among them
                found[name].append(1000 * (time.perf_counter() - begin))
    return {name: statistics.median(times) for name, times in found.items()}


if __name__ == "__main__":
    main()
