"""What `help` shows of forge, and what a mistyped name says: the first words a new user reads."""

import inspect
import pydoc
import re

import pytest

import forge

LOOP = "with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:"


@pytest.mark.parametrize("thing", [forge, forge.Run], ids=["forge", "forge.Run"])
def test_help_opens_with_a_purpose_and_an_example(thing):
    """Who types help(forge) wants to see how it is used, not how names are loaded."""
    text = inspect.getdoc(thing)
    purpose, example = text.split("\n\nExample::\n\n", 1)
    assert re.fullmatch(r"[^\n]{20,100}\.", purpose)
    assert LOOP in example[:200]
    shown = pydoc.plain(pydoc.render_doc(thing))
    assert shown.index(purpose) < shown.index(LOOP) < 1000


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Runn", ". Did you mean forge.Run?"),
        ("run", ". Did you mean forge.Run?"),
        ("config_error", ". Did you mean forge.ConfigError?"),
        ("xyzzy", ""),
    ],
)
def test_a_mistyped_name_says_which_name_was_meant(name, hint):
    """The names load on first use, so Python itself does not know what to suggest."""
    with pytest.raises(AttributeError) as caught:
        getattr(forge, name)
    assert str(caught.value) == f"module 'forge' has no attribute {name!r}{hint}"
