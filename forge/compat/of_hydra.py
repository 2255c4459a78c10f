"""Private parts of Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.compat import of_omegaconf

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn


def set_singletons(state: dict[str, Any]) -> None:
    """Like `Singleton.set_state`, but without importing all installed plugins.

    Importing them takes 15 ms per job, and more with large sweepers; they are found when needed.

    If it goes: `Singleton.set_state(state)`.
    """
    from hydra.core.singleton import Singleton

    Singleton._instances = state["instances"]
    of_omegaconf.set_resolvers(state["omegaconf_resolvers"])


def outcome(result: JobReturn) -> Any:
    """The return value or exception of a job; `return_value` would print and raise the exception.

    If it goes: read `return_value` within try, with stderr redirected.
    """
    return result._return_value
