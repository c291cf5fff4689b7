"""Provides a group of commands that imports a command's module only on use, so that --help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A group of commands, some of which are imported only when they are used.

    `lazy` maps the name of each such command to (its module in this package, the first sentence of its help).
    """

    def __init__(self, *arguments: Any, lazy: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._lazy and cmd_name not in self.commands:
            for command in vars(import_module(f".{self._lazy[cmd_name][0]}", __package__)).values():
                if isinstance(command, click.Command) and command.name == cmd_name:
                    self.add_command(command)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(ctx)])

    def summary(self, name: str) -> str:
        return self._lazy[name][1] if name in self._lazy else self.commands[name].get_short_help_str(100)
