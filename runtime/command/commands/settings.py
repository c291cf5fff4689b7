"""The command that describes settings: `pilotflame settings`."""

from __future__ import annotations

import click

from ...ground.settings.reference import SettingFacts, all_settings, find_settings, markdown
from ..client import display, options

_SCOPES = {"function": "function (pilotflame.toml)", "gateway": "gateway"}


@click.command()
@click.argument("name", required=False)
@click.option("--markdown", "as_markdown", is_flag=True, hidden=True, help="Print docs/settings.md.")
@options.as_json
def settings(*, name: str | None, as_markdown: bool, as_json: bool) -> None:
    """Describe the settings of functions and of the gateway: type, range, default, meaning.

    NAME is a key (scale.max), a table (scale) or an environment variable (PILOTFLAME_PORT).

    \b
    Examples:
      pilotflame settings
      pilotflame settings scale.max
    """
    if as_markdown:
        return display.echo(markdown(), nl=False)
    found = find_settings(name) if name is not None else all_settings()
    if as_json:
        return display.print_json({"settings": [one._asdict() for one in found]})
    if len(found) == 1:
        return display.print_table(("", ""), _details(found[0]))
    rows = [(one.variable or one.name, one.type, one.range, one.default, one.meaning) for one in found]
    return display.print_table(("setting", "type", "range", "default", "meaning"), rows)


def _details(one: SettingFacts) -> list[tuple[str, str]]:
    """Return the facts about a setting, one row for each fact."""
    variable = [("variable", one.variable)] if one.variable else []
    return [
        ("setting", one.name),
        ("of the", _SCOPES[one.scope]),
        *variable,
        ("type", one.type),
        ("range", one.range or "any"),
        ("default", one.default or "required"),
        ("meaning", one.meaning),
    ]
