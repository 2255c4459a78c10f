"""torchrun above this rank: what it does not pass on, and when it ends its workers.

Source: torch.distributed.elastic (multiprocessing/api.py, agent/server/api.py), and trying it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from forge.process import processes

_PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_PATIENCE_S = "30"


def is_above(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def advice(environment: Mapping[str, str], signals: Iterable[str], stop_s: float) -> str:
    """What to start torchrun with, so that the policy holds; empty where it does.

    Args:
        environment: This process's.
        signals: Those that the policy acts on, without `SIG`.
        stop_s: Seconds that a stop may take.
    """
    passed_on = environment.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _PASSED_ON).split(",")
    deaf = [one for one in (f"SIG{name}" for name in signals) if one not in passed_on]
    patience_s = float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or _PATIENCE_S)
    found = []
    if deaf:
        every = ",".join(dict.fromkeys([*passed_on, *deaf]))
        found.append(
            f"it dies of {', '.join(deaf)} instead of passing them on: start it with"
            f" --signals-to-handle={every}"
        )
    if patience_s < stop_s:
        found.append(
            f"it kills its workers {patience_s:g} s after a signal, and a stop may take"
            f" {stop_s:g} s: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={stop_s:.0f} before it starts, or"
            " lower `resilience.shutdown.timeout_s`"
        )
    return f"torchrun: {'; '.join(found)}." if found else ""


def stop_with_agent() -> None:
    """When torchrun's agent dies nobody else ends its workers: they stop as on a SIGTERM."""
    agent = os.getppid()
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != agent:
        os.kill(os.getpid(), signal.SIGTERM)
