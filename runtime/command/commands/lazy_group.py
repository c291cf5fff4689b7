"""Provides a group of commands that imports a command's module only on use, so that --help is fast."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ....entry_points import COMMANDS, load_one, offers


class LazyGroup(click.Group):
    """A group of commands that imports some of its commands only when they are used.

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


class PluginGroup(LazyGroup):
    """A group that also has the commands of plugins: the entry points in the group `pilotflame.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *offers(COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # Look for plugins last, because `offers` reads the metadata of all packages.
        if (own := super().get_command(ctx, cmd_name)) is not None or cmd_name not in offers(COMMANDS):
            return own
        self.add_command(load_one(offers(COMMANDS)[cmd_name]), cmd_name)
        return super().get_command(ctx, cmd_name)

    def summary(self, name: str) -> str:
        own = name in self.commands or name in self._lazy
        return super().summary(name) if own else _summary(offers(COMMANDS)[name])


def _summary(offer: EntryPoint) -> str:
    """Return the first line of a command's docstring, without importing the command's module."""
    found = find_spec(offer.module)
    if found is None or found.origin is None:
        return ""
    for node in ast.parse(Path(found.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == offer.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
