"""The command that prints a shell's completion script: `pilotflame completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ..client import display, options

# The script sets this variable when it asks for completions. click makes its name from the program's name.
VARIABLE = "_PILOTFLAME_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@options.as_json
@click.pass_context
def completion(context: click.Context, *, shell: str, as_json: bool) -> None:
    """Print the script that completes commands, functions and templates in SHELL.

    \b
    Examples:
      eval "$(pilotflame completion bash)"        # in ~/.bashrc, and with zsh in ~/.zshrc
      pilotflame completion fish > ~/.config/fish/completions/pilotflame.fish
    """
    root = context.find_root()
    found = get_completion_class(shell)
    if found is not None:
        script = found(root.command, {}, root.info_name or "", VARIABLE).source()
        display.print_result({"shell": shell, "script": script}, script, as_json=as_json)
