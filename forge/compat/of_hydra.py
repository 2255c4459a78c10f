"""Private parts of Hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.compat import of_omegaconf

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn


def set_singletons(state: dict[str, Any]) -> None:
    """As `Singleton.set_state`, without importing every plugin that is installed.

    That takes 15 ms a job, and more with large sweepers; who needs a plugin looks for it then.

    If it goes: `Singleton.set_state(state)`.
    """
    from hydra.core.singleton import Singleton

    Singleton._instances = state["instances"]
    of_omegaconf.set_resolvers(state["omegaconf_resolvers"])


def outcome(result: JobReturn) -> Any:
    """What a job returned or raised; `return_value` raises and prints what was raised.

    If it goes: read `return_value` within try, with stderr redirected.
    """
    return result._return_value
