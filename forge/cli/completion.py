"""`forge completion`: a script that completes the commands and options of forge in a shell."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import NoReturn
from unittest import mock

from forge.cli import sweep_command
from forge.compat import of_stdlib

_WHAT = """\
Print a script that completes the commands and options of forge in a shell. Other words are
completed as paths."""
_EXAMPLES = """\
  source <(forge completion bash)          in ~/.bashrc
  source <(forge completion zsh)           in ~/.zshrc, after compinit
  forge completion fish | source           in ~/.config/fish/config.fish"""
_BASH = """\
_forge() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case "$word" in -*)
      case "${{COMP_WORDS[1]}} " in
{cases}
      esac
    esac
  fi
  [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _forge forge
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(arguments: list[str]) -> int:
    """The command `forge completion`."""
    parser = sweep_command.parser("completion", _WHAT, _EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    shell = parser.parse_args(arguments).shell
    sys.stdout.write(_fish() if shell == "fish" else _bash(is_zsh=shell == "zsh"))
    return 0


def _bash(*, is_zsh: bool) -> str:
    from forge.cli.commands import COMMANDS

    cases = "\n".join(
        f'        "{name} ") words="{" ".join(options)}" ;;'
        for name in COMMANDS
        if (options := options_of(name))
    )
    return (_ZSH if is_zsh else "") + _BASH.format(commands=" ".join(COMMANDS), cases=cases)


def _fish() -> str:
    from forge.cli.commands import COMMANDS

    lines = []
    for name, command in COMMANDS.items():
        purpose = command.purpose.replace("'", "\\'")
        lines.append(f"complete -c forge -n __fish_use_subcommand -a {name} -d '{purpose}'")
        for option in options_of(name):
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"complete -c forge -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines) + "\n"


def options_of(name: str) -> list[str]:
    """The options of a command, sorted; none of `forge exec`, which takes overrides of Hydra's."""
    from forge.cli.commands import COMMANDS

    if name in ("exec", "completion"):
        return ["--help"]

    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        found.append(parser)
        raise SystemExit

    stopped = mock.patch.multiple(
        argparse.ArgumentParser, parse_args=stop, parse_intermixed_args=stop
    )
    with stopped, contextlib.suppress(SystemExit):
        COMMANDS[name].main([])
    return [option for parser in found for option in of_stdlib.options(parser)]
