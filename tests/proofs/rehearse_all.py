"""Every script of tests/scripts through `forge rehearse`: is what it says right?

    python tests/proofs/rehearse_all.py [--times 2] [--seed 0] [--parallel 2] [word …]

    flat/      right scripts, and some that forget one thing; `omits.py` has many kinds of it
    planted/   one omission each, which `--fixed` repairs
    <style>/   `written.py` as such a loop is converted in a hurry, and `fixed.py`; some `plain.py`;
               `tests/support/variants.py` makes them in build/scripts, from `<style>.txt`

Prints a table, and how many lines the conversion of a plain loop adds; exits with 1 where a verdict
is not the expected one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from variants import SCRIPTS, variants, write_all

MADE = SCRIPTS.parents[1] / "build" / "scripts"
"""Where the variants of a style are."""
QUICK = str(Path(__file__).parents[1] / "support" / "quick")
"""So that starts of Python import less of torch."""


@dataclass(frozen=True)
class Case:
    """One script, perhaps with arguments."""

    command: str
    variable: str = ""
    """The variable that the script does not save, which the hints must name. Empty: a resume of
    the script is exact."""
    error: str = ""
    """A word of the error with which forge refuses the script."""

    @property
    def argv(self) -> list[str]:
        script, *arguments = self.command.split()
        folder = SCRIPTS if (SCRIPTS / script).exists() else MADE
        return [sys.executable, str(folder / script), *arguments]

    @property
    def expected(self) -> str:
        return "refused" if self.error else "differs" if self.variable else "identical"


FLAT = {
    "regression.py": "",
    "gpt.py": "",
    "augmented.py": "",
    "gan.py": "",
    "dqn.py": "",
    "dqn.py --forget-buffer": "buffer",
    "diffusion.py": "",
    "diffusion.py --forget-average": "average",
    "lbfgs.py": "",
    "amp.py": "",
    "plateau.py": "",
    "plateau.py --forget-best": "best",
    "numpy_batches.py": "rng",
    "curriculum.py": "",
    "semi_supervised.py": "others",
    "swa.py": "",
    "lora.py": "",
    "kfold.py": "",
}
"""Command → the variable that it keeps to itself."""

OMITTED = {
    "sampler": "order",
    "python-random": "rng",
    "numpy-random": "rng",
    "torch-random": "rng",
    "schedule": "schedule",
    "scaler": "scaler",
    "ema": "ema",
    "best-metric": "best",
    "prefetched-batch": "second",
    "hidden-state": "hidden",
    "replay-buffer": "buffer",
    "module-mode": "noise",
    "inner-optimizer": "inner",
    "dataset-attribute": "data.level",
}
"""What `omits.py` keeps to itself → the variable that has it."""

PLANTED = {
    "annealed": "temperatures",
    "augmented": "augment.rng",
    "averaged": "ema",
    "bandit": "baseline",
    "critic": "critic.optimizer",
    "crops": "scales",
    "curriculum": "dataset.level",
    "denoiser": "rng",
    "drop_path": "DropPath.seen",
    "early_stopping": "stopping.num_bad",
    "frozen_features": "extractor.training",
    "half_precision": "scale.value",
    "hard_examples": "hard",
    "lookahead": "ahead",
    "loss_clip": "history",
    "negatives": "generator",
    "normalised": "mean",
    "plateau": "best",
    "pseudo_labels": "soft_label",
    "recent_losses": "recent",
    "recommender": "agent.memory",
    "reshuffled": "sampler.order",
    "stream": "hidden",
    "warmup": "schedule.num_updates",
}
"""The same of each script of `planted`."""

WRITTEN = {
    "active_learning": "labelled",
    "contrastive": "bank",
    "distillation": "teacher",
    "early_stopping": "stopper.best",
    "graphs": "rng",
    "huggingface_like": "tr_loss",
    "maml": "rng",
    "prefetcher": "prefetcher.next_inputs",
    "several_optimizers": "",
    "streams": "",
    "timm_like": "num_updates",
    "two_datasets": "targets",
    "until_break": "smoothed",
    "vae_annealed": "beta",
}
"""The same of each `written.py`."""

REFUSED = {
    "bucketing": "run.state.generator",
    "gradient_accumulation": "run.state.ema",
    "metrics_window": "deque",
    "moco": "run.state.queue",
    "multitask": "cannot unpack",
    "nested_epochs": "run.epochs",
    "ppo": "run.update",
    "reinforce_with_baseline": "run.state.rng",
    "reward_model": "zip",
    "sam": "optimizer.base",
    "tbptt": "run.state.hidden",
    "unfreezing": "run.state.best",
}
"""Each `written.py` that ends with an error → a word of it."""

CASES = (
    *(Case(f"flat/{command}", name) for command, name in FLAT.items()),
    *(Case(f"flat/omits.py {kind}", name) for kind, name in OMITTED.items()),
    *(Case(f"flat/omits.py {kind} --fixed") for kind in OMITTED),
    *(Case(f"planted/{one}.py", name) for one, name in PLANTED.items()),
    *(Case(f"planted/{one}.py --fixed") for one in PLANTED),
    *(Case(f"{style}/written.py", name) for style, name in WRITTEN.items()),
    *(Case(f"{style}/written.py", error=word) for style, word in REFUSED.items()),
    *(Case(f"{style}/fixed.py") for style in [*WRITTEN, *REFUSED]),
)


def verdict(case: Case, times: int, seed: int) -> tuple[bool, str, float, str]:
    """(whether it is right, in a few words, seconds, the whole output)."""
    began = time.monotonic()
    options = ["--times", str(times), "--seed", str(seed)]
    command = [sys.executable, "-m", "forge", "rehearse", *options, "--", *case.argv]
    # Several run beside each other, each with five to nine starts of a script.
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": QUICK}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    holder, *rest = case.variable.split(".")  # or the object that has it
    name = rf"`(\w+\.)*{holder}" + "".join(rf"(\.{one})?" for one in rest) + "`"
    named = [line.strip() for line in lines if re.search(name, line)]
    refused = [line.strip("| ") for line in lines if case.error and case.error in line]
    said = {0: "identical", 1: "differs", 3: "refused"}.get(done.returncode, str(done.returncode))
    is_right = said == case.expected and bool(named or not case.variable)
    is_right &= bool(refused or not case.error)
    words = "; ".join([said, *(named if case.variable else refused[-1:])])
    return is_right, words, time.monotonic() - began, done.stdout + done.stderr


def added(made: dict[str, str]) -> int:
    """Lines of a conversion that its plain loop does not have, wherever they are indented to."""
    plain, fixed = (
        [line.strip() for line in made[name].splitlines()] for name in ("plain", "fixed")
    )
    for line in plain:
        if line in fixed:
            fixed.remove(line)
    return len([line for line in fixed if line])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the commands wanted; all by default")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    cases = [
        case for case in CASES if not options.words or any(w in case.command for w in options.words)
    ]
    write_all(MADE)
    print("| script | expected | forge rehearse says | right | s |")
    print("| --- | --- | --- | --- | --- |")
    wrong, right = [], []
    with ThreadPoolExecutor(options.parallel) as pool:
        found = pool.map(lambda case: verdict(case, options.times, options.seed), cases)
        for case, (is_right, words, took_s, output) in zip(cases, found, strict=True):
            expected = f"{case.expected} {case.variable or case.error}".strip()
            cells = [f"`{case.command}`", expected, words, "yes" if is_right else "NO"]
            print(f"| {' | '.join(cells)} | {took_s:.0f} |", flush=True)
            if is_right:
                right.append(case)
            else:
                wrong.append(output)
    for kind in ("identical", "differs", "refused"):
        num_right, num_all = (sum(c.expected == kind for c in some) for some in (right, cases))
        print(
            f"{kind}: {num_right} of {num_all} are said to be so, and what was forgotten is named"
        )
    styles = [variants(path.read_text()) for path in SCRIPTS.glob("*.txt")]
    lines = [added(made) for made in styles if "plain" in made]
    print(
        f"lines added to {len(lines)} plain loops: {statistics.median(lines)}, worst {max(lines)}"
    )
    print("".join(f"\n{output}" for output in wrong), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
