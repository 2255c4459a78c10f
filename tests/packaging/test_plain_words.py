"""The lint of `make check` for the words that people read."""

import plain_words
import pytest

HABITS = [
    "Who is to die waits.",
    "Of several ranks one is enough.",
    "The key is ignored where there is no policy.",
    "A check may have failed.",
    "The file lies below the directory.",
    "It runs beside training.",
    "This is slower of late.",
    "It begins anew.",
    "The training goes on.",
    "The launcher goes by the files.",
    "It is asked whether the job ended.",
    "One that fails is logged.",
    "The task comes to its end.",
    "This is no error.",
    "It has an effect that nobody sees.",
]


@pytest.mark.parametrize("sentence", HABITS)
def test_the_lint_finds_a_habit(sentence, tmp_path):
    """In prose, in a docstring and in a comment of YAML; not in a block of code."""
    page, module, config = (tmp_path / f"a.{kind}" for kind in ("md", "py", "yaml"))
    page.write_text(f"# Title\n\n{sentence}\n")
    module.write_text(f'"""{sentence}"""\n')
    config.write_text(f"key: 1  # {sentence}\n")
    for path in (page, module, config):
        assert list(plain_words.find(path)), path.suffix
    page.write_text(f"```text\n{sentence}\n```\n")
    assert not list(plain_words.find(page))


def test_each_habit_has_an_example_and_plain_english_has_none(tmp_path):
    """A pattern that finds nothing holds nothing."""
    page = tmp_path / "a.md"
    page.write_text("\n\n".join(HABITS))
    found = {reason for _, _, reason in plain_words.find(page)}
    assert found == set(plain_words.HABITS.values())
    page.write_text("If a check fails during training, all ranks stop, save and leave.\n")
    assert not list(plain_words.find(page))
