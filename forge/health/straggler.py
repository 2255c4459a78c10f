"""Whether a rank is slow, so that all the others wait for it: by times that meet in the store."""

from __future__ import annotations

import json
import socket
import statistics

from forge.errors import RankLost
from forge.health.check import Context, Finding

_KEY = "health/the pace, {}"


def straggler(context: Context) -> Finding | None:
    """Name the ranks that are slower than the threshold; beside training, all ranks together."""
    pace, ranks = context.pace, context.ranks
    if pace is None or ranks.size == 1 or not context.is_beside:
        return None
    pace.num_rounds += 1
    own = json.dumps([pace.waiting(), socket.gethostname()]).encode()
    key, before = _KEY.format(pace.num_rounds), _KEY.format(pace.num_rounds - 1)
    # Half of its time: a rank that does not come is no straggler, and the answer is to be in time.
    limit_s = context.config.timeout_s / 2
    try:
        given = ranks.gather(key, own, limit_s, unless=context.stopped.is_set)
        if given and pace.num_rounds > 1:
            ranks.forget(before)  # whoever has given this one has done with that
    except RankLost:
        return None  # it leaves, or its checks take longer: others look after that
    return found(list(map(json.loads, given)), context.config.threshold or 0.0)


def found(given: list[tuple[float | None, str]], threshold: float) -> Finding | None:
    """What the ranks' values say.

    A rank's own share of a step is what is left without its waits, those apart that even the
    slowest has: the sum itself. The slowest has the whole step. A rank that is slow in what takes
    a small part of the step is no straggler, though it were ten times as slow in that. Of an even
    number of ranks the faster one of the middle is the median, so that of two one can be slow.

    Args:
        given: By rank, the share of its time that it waits for others (None where that is not
            known), and its node.
        threshold: The least speed, as a share of the median rank's. Below that share of the
            slowest rank's time, a rank holds nobody up, however fast the others are.
    """
    known = {rank: share for rank, (share, _) in enumerate(given) if share is not None}
    if len(known) < 2:
        return None
    least = min(known.values())
    own = {rank: 1.0 - (share - least) for rank, share in known.items()}
    median = statistics.median_low(own.values())
    slow = [r for r in own if own[r] > threshold and median / own[r] < threshold]
    if not slow:
        return Finding(f"{len(given)} ranks are equally fast", culprits=())
    slow.sort(key=lambda rank: -own[rank])
    named = [f"rank {r} on {given[r][1]} has {median / own[r]:.0%}" for r in slow[:4]]
    more = f", and {len(slow) - 4} more" if slow[4:] else ""
    return Finding(
        f"{', '.join(named)}{more} of the median rank's speed",
        is_failed=True,
        remedy="All wait for it: compare its GPU's clocks, its data and what else its node does.",
        culprits=tuple(slow),
    )
