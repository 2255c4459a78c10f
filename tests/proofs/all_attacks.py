"""Every attack of one user on another, and what is said: `python tests/proofs/all_attacks.py`.

It plays two users, so it needs root. It ends with 1 where something of the victim's was changed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from attempts import ATTACKS, Attack
from two_users import place


def judge(attack: Attack) -> tuple[str, str]:
    """(what became of it, what was said)."""
    with place() as found:
        tried, used = attack.run(found)
        said = f"{tried.text}{used.text}".replace(str(found.shared.parent), "")
        if not found.is_intact():
            return "SUCCEEDED", said
        if -signal.SIGALRM in (tried.code, used.code):
            return "HUNG", said
    is_told = re.search(attack.complaint, said, re.DOTALL)
    return ("refused" if said.strip() else "harmless") if is_told else "NOT TOLD", said


def main() -> int:
    """Prints the table."""
    if os.geteuid() != 0:
        sys.exit("needs root, to play two users")
    failures = 0
    for attack in ATTACKS:
        verdict, said = judge(attack)
        failures += verdict not in ("refused", "harmless")
        line = " ".join(said.split())
        print(f"{attack.name}\n    {verdict}: {line[:400]}")
    print(f"{len(ATTACKS)} attacks, {failures} of them not refused")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
