"""Private parts of OmegaConf."""

from __future__ import annotations

from typing import Any


def value_of(node: Any) -> Any:
    """What a node holds, unresolved: of a container its dict or list of nodes, or a special text.

    If it goes: `OmegaConf.to_container(parent, resolve=False)[key]`, which is slower; to put keys
    in order (`forge/hydra_app/frozen.py`) it has to be the container's own dict.
    """
    return node._value()


def child_of(node: Any, key: Any) -> Any:
    """The node at a key of a container, though it be null, missing or an interpolation; or None.

    If it goes: see what `OmegaConf.is_interpolation(cfg, key)` calls to find the node.
    """
    return node._get_node(key, validate_access=False)


def declared_type(node: Any) -> Any:
    """The type that the schema gives to the place of this node; Any where there is none.

    If it goes: read the annotations of the dataclass, `typing.get_type_hints(cls)`.
    """
    return node._metadata.ref_type


def element_type(container: Any) -> Any:
    """The type that the schema gives to the elements of a container; None: it is no container.

    If it goes: read the annotations of the dataclass, `typing.get_type_hints(cls)`.
    """
    return getattr(container._metadata, "element_type", None)


def full_key(node: Any) -> str:
    """The dotted key of a node, from the root.

    If it goes: pass the key along on the way down; it is for messages alone.
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
    """Every resolver that is registered, by name.

    If it goes: `Singleton.get_state()["omegaconf_resolvers"]` of Hydra has copies of them.
    """
    from omegaconf.basecontainer import BaseContainer

    return BaseContainer._resolvers


def set_resolvers(found: dict[str, Any]) -> None:
    """Make these all the resolvers that there are.

    If it goes: `OmegaConf.clear_resolvers()`, then register each anew.
    """
    from omegaconf.basecontainer import BaseContainer

    BaseContainer._resolvers = found
