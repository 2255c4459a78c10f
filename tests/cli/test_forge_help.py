"""`forge` by itself: its help, its version, and commands that do not exist."""

import pytest

import forge
from forge.cli import commands, main


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["forge", *arguments])
    code = main.main()
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_help_lists_each_command_in_a_group_with_an_example(monkeypatch, capsys):
    """Somebody who types `forge` wants to see what there is; in a terminal of 80 columns."""
    code, shown, error = run(monkeypatch, capsys, "--help")
    assert (code, error) == (0, "")
    assert max(map(len, shown.splitlines())) <= 80
    for group in commands.GROUPS:
        assert f"\n{group}:\n" in shown
    for name in commands.COMMANDS:
        assert f"\n  {name} " in shown
        assert f"    $ {commands.COMMANDS[name].example}" in shown
        assert f"forge {name}" in commands.COMMANDS[name].example
    assert run(monkeypatch, capsys) == (2, "", shown)  # nothing was asked for: a script's mistake


def test_the_version_is_printed(monkeypatch, capsys):
    """Whoever reports a bug needs it."""
    code, shown, _ = run(monkeypatch, capsys, "--version")
    assert (code, shown.split()[:2]) == (0, ["forge", forge.__version__])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("shw", "there is no command `shw`. Did you mean `forge show`?"),
        ("rehearsal", "Did you mean `forge rehearse`?"),
        ("train.py", "To run a script: `forge exec -- python train.py`."),
        ("--verify", "there is no option `--verify`."),
        ("frobnicate", "there is no command `frobnicate`. `forge --help` lists all commands."),
    ],
)
def test_an_unknown_command_names_the_one_that_was_probably_meant(
    word, expected, monkeypatch, capsys
):
    code, shown, error = run(monkeypatch, capsys, word, "x")
    assert (code, shown) == (2, "")
    assert error.startswith("forge: ")
    assert expected in error


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_help_of_each_command_fits_into_a_terminal(name, monkeypatch, capsys):
    """And has an example."""
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code, shown, _ = run(monkeypatch, capsys, name, "--help")
    except SystemExit as end:
        code, shown = end.code, capsys.readouterr().out
    assert code in (0, None)
    assert shown.startswith(f"usage: forge {name} ")
    assert "Example" in shown or "examples:" in shown
    assert max(map(len, shown.splitlines())) <= 80
