"""If torchrun started this rank: which signals it forwards, and when it kills its workers.

Source: torch.distributed.elastic (multiprocessing/api.py, agent/server/api.py), and experiments.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from forge.process import children

_PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_PATIENCE_S = "30"


def advice(environment: Mapping[str, str], signals: Iterable[str], stop_s: float) -> str:
    """Options that torchrun needs for this policy; empty if it has them.

    Args:
        environment: This process's environment.
        signals: The signals in the policy, without `SIG`.
        stop_s: The longest duration of a stop, in seconds.
    """
    passed_on = environment.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _PASSED_ON).split(",")
    deaf = [one for one in (f"SIG{name}" for name in signals) if one not in passed_on]
    patience_s = float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or _PATIENCE_S)
    found = []
    if deaf:
        every = ",".join(dict.fromkeys([*passed_on, *deaf]))
        found.append(
            f"torchrun does not forward {', '.join(deaf)} to the ranks, but dies of such a signal:"
            f" start torchrun with --signals-to-handle={every}"
        )
    if patience_s < stop_s:
        found.append(
            f"torchrun kills its workers {patience_s:g} s after a signal, but a stop can take"
            f" {stop_s:g} s: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={stop_s:.0f} before torchrun"
            " starts, or lower `resilience.shutdown.timeout_s`"
        )
    return f"{'. '.join(found)}." if found else ""


def stop_with_agent() -> None:
    """Get a SIGTERM when torchrun's agent dies: no other process would end its workers."""
    agent = os.getppid()
    children.die_with_parent(signal.SIGTERM)
    if os.getppid() != agent:
        os.kill(os.getpid(), signal.SIGTERM)
