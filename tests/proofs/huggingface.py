"""Scripts of transformers and Accelerate: disturbed at random places, do they end the same?

    python tests/proofs/huggingface.py --seed 1
    python tests/proofs/huggingface.py masked stream --times 2

Each run is hit once or twice, by SIGTERM, SIGUSR1, SIGKILL or the time limit, in a step, a batch of
an evaluation, a save of forge's or of the Trainer's own, or the last step, and started again until
it finishes. It must end with the
checkpoint, the logged values and the results of the undisturbed run, and repeat no step after a
stop. The undisturbed run itself must end as the script does without forge. Ends with 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1] / "support")

import warm  # noqa: E402
from trained import Strikes, Trained  # noqa: E402

HERE = Path(__file__).parent / "trainers"
RANKS = {"ddp": 2, "accelerated_ddp": 2}
"""Scripts that have several ranks."""
CODES = {"TERM": 143, "USR1": 75, "KILL": -9, "limit": 75}
LIMIT_S = 15.0
"""Of an attempt that ends by its time limit, from its start; it stops 10 s before."""


class Chaos:
    """The disturbed runs of one script."""

    def __init__(self, name: str, folder: Path) -> None:
        self._script = HERE / f"{name}.py"
        self._folder = folder / name
        self._ranks = RANKS.get(name, 1)
        self.whole = self._trained("whole")
        self.plain = self._trained("plain", PLAIN="1")

    def _trained(self, name: str, **env: str) -> Trained:
        imports = (*warm.TRAINERS, "trl") if "trl" in self._script.read_text() else warm.TRAINERS
        return Trained(self._folder / name, self._script, self._ranks, imports=imports, **env)

    def undisturbed(self) -> list[str]:
        """What differs between the run with forge and the run without."""
        self.plain.run_to_end()
        self.whole.run_to_end()
        return self.whole.different_ends(self.plain) + (
            ["losses"] if self.whole.losses != self.plain.losses else []
        )

    def disturbed(self, number: int, rng: random.Random) -> tuple[list[str], list[str]]:
        """The hits of one run, and what is wrong with it."""
        run = self._trained(str(number))
        hits, wrong, names = [], [], []
        for _ in range(rng.choice([1, 2])):
            rank, place = self._draw(rng, is_first=not hits)
            name = rng.choice(list(CODES))
            strikes: list[Strikes] = [{} for _ in range(self._ranks)]
            strikes[rank] = {place: name}
            env = {"FORGE_END_TIME": str(time.time() + LIMIT_S)} if name == "limit" else {}
            codes = run.attempt(*strikes, **env)
            if not any(codes):  # it ended before it came to the place
                break
            hits.append(f"{name} in {place}")
            names.append(name)
            wrong += self._wrong_codes(codes, name)
        if any(codes):
            codes = run.attempt()
        wrong += [f"exit codes {codes}"] if any(codes) else run.differences(self.whole)
        repeated = zip(names, run.repeated, strict=True)
        wrong += [f"{n} steps repeated after {one}" for one, n in repeated if n and one != "KILL"]
        if "KILL" not in names and run.losses != self.whole.losses:
            wrong.append("other losses")
        return hits, wrong + ([run.output[-3000:]] if wrong else [])

    def _draw(self, rng: random.Random, *, is_first: bool) -> tuple[int, str]:
        """A rank, and a place that it reaches; a resumed attempt reaches fewer."""
        kind = rng.choice(["step", "step", "eval", "save", "own", "last"])
        if kind == "last" and is_first:
            return rng.randrange(self._ranks), f"step {len(self.whole.losses)}"
        places = [
            (rank, number)
            for rank in range(self._ranks)
            if (number := self.whole.num_places(kind, rank))
        ]
        if not places:
            kind, places = "step", [(0, len(self.whole.losses))]
        rank, number = rng.choice(places)
        return rank, f"{kind} {rng.randint(1, number if is_first else max(1, number // 3))}"

    def _wrong_codes(self, codes: list[int], name: str) -> list[str]:
        expected = CODES[name]
        is_right = expected in codes if name == "KILL" else set(codes) == {expected}
        return [] if is_right else [f"exit codes {codes} after {name}"]


def main() -> int:
    """The drill of the scripts that are wanted."""
    names = sorted(one.stem for one in HERE.glob("*.py") if one.stem not in ("tiny", "plain"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(names))
    parser.add_argument("--times", type=int, help="8, and 20 with several ranks, unless given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or names:
            began, chaos = time.monotonic(), Chaos(name, Path(folder))
            wrong = chaos.undisturbed()
            print(f"{name}: undisturbed as without forge: {wrong or 'yes'}", flush=True)
            num_wrong += bool(wrong)
            times = options.times or (20 if name in RANKS else 8)
            exact = num_hits = 0
            for number in range(times):
                rng = random.Random(f"{name} {options.seed} {number}")
                hits, wrong = chaos.disturbed(number, rng)
                exact, num_hits = exact + (not wrong), num_hits + len(hits)
                print(f"{name} {number}, {', '.join(hits) or 'not hit'}: {wrong or 'same bits'}")
                sys.stdout.flush()
            num_wrong += times - exact
            took_s = time.monotonic() - began
            print(f"{name}: exact {exact} of {times}, {num_hits} hits, {took_s:.0f} s", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
