"""Private parts of OmegaConf."""

from __future__ import annotations

from typing import Any


def value_of(node: Any) -> Any:
    """A node's unresolved value; for a container its dict or list of nodes, or a special string.

    If it goes: `OmegaConf.to_container(parent, resolve=False)[key]`, which is slower; to sort keys
    (`forge/hydra_app/frozen.py`) it has to be the container's own dict.
    """
    return node._value()


def child_of(node: Any, key: Any) -> Any:
    """The node at a key of a container, even if null, missing or an interpolation; or None.

    If it goes: see what `OmegaConf.is_interpolation(cfg, key)` calls to find the node.
    """
    return node._get_node(key, validate_access=False)


def declared_type(node: Any) -> Any:
    """The declared type of this node in the schema; Any if there is none.

    If it goes: read the annotations of the dataclass, `typing.get_type_hints(cls)`.
    """
    return node._metadata.ref_type


def element_type(container: Any) -> Any:
    """The declared type of a container's elements; None if it is not a container.

    If it goes: read the annotations of the dataclass, `typing.get_type_hints(cls)`.
    """
    return getattr(container._metadata, "element_type", None)


def full_key(node: Any) -> str:
    """The dotted key of a node, from the root.

    If it goes: pass the key along while descending; it is only used in messages.
    """
    return str(node._get_full_key(None))


def resolver_names(text: str) -> set[str]:
    """The names of the resolvers in a value: {"oc.env"} of "${oc.env:HOME}/data".

    If it goes: see how `omegaconf.grammar_visitor` walks the tree of a parsed value.
    """
    from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
    from omegaconf.grammar_parser import parse

    found = set()
    todo: list[Any] = [parse(text)]
    while todo:
        one = todo.pop()
        if isinstance(one, OmegaConfGrammarParser.InterpolationResolverContext):
            found.add(one.resolverName().getText())  # type: ignore[no-untyped-call]
        todo.extend(getattr(one, "children", None) or ())
    return found


def resolvers() -> dict[str, Any]:
    """Name -> registered resolver.

    If it goes: `Singleton.get_state()["omegaconf_resolvers"]` of Hydra has copies of them.
    """
    from omegaconf.basecontainer import BaseContainer

    return BaseContainer._resolvers


def set_resolvers(found: dict[str, Any]) -> None:
    """Replace all registered resolvers by these.

    If it goes: `OmegaConf.clear_resolvers()`, then register each again.
    """
    from omegaconf.basecontainer import BaseContainer

    BaseContainer._resolvers = found
