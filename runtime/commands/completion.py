"""The command that prints a shell's completion script: `pilotflame completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

# The variable in which the script passes the words to complete; click makes it from the program's name.
VARIABLE = "_PILOTFLAME_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes commands, functions and templates in SHELL.

    \b
    Examples:
      eval "$(pilotflame completion bash)"        # in ~/.bashrc, and with zsh in ~/.zshrc
      pilotflame completion fish > ~/.config/fish/completions/pilotflame.fish
    """
    root = context.find_root()
    found = get_completion_class(shell)
    if found is not None:
        click.echo(found(root.command, {}, root.info_name or "", VARIABLE).source())
