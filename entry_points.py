"""Finds plugins: objects that installed packages offer under names, in groups of entry points."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import PluginError

DIALECTS, APIS, SOURCES, COMMANDS, OBSERVERS = "dialects", "apis", "sources", "commands", "observers"


@functools.cache
def offers(group: str) -> Mapping[str, EntryPoint]:
    """Return what packages offer in the group `pilotflame.GROUP`, by name. Reads the metadata of all packages once.

    Raise PluginError if two packages offer the same name.
    """
    found = dict[str, EntryPoint]()
    for offer in sorted(entry_points(group=f"pilotflame.{group}"), key=lambda one: one.name):
        if offer.name in found and found[offer.name].value != offer.value:
            values = f"{found[offer.name].value} and {offer.value}"
            message = f"Two packages offer {offer.name!r} in pilotflame.{group}: {values}."
            raise PluginError(message, remedy="Uninstall one of them.")
        found[offer.name] = offer
    return found


def load(group: str, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the objects of a group by name, all of them or `only` these. Raise PluginError if one cannot be imported."""
    return {name: load_one(offer) for name, offer in offers(group).items() if only is None or name in only}


def load_one(offer: EntryPoint) -> Any:
    """Return the object that is offered. Raise PluginError if it cannot be imported."""
    try:
        return offer.load()
    except (ImportError, AttributeError) as error:
        message = f"The plugin {offer.name!r} cannot be loaded from {offer.value}: {error}."
        raise PluginError(
            message, remedy="Install its package again, or leave it out of `plugins`."
        ) from error


def check_names(wanted: Collection[str]) -> None:
    """Raise PluginError if one of the plugins in the setting `plugins` is not installed."""
    known = sorted({name for group in (DIALECTS, APIS, SOURCES, OBSERVERS) for name in offers(group)})
    if unknown := sorted(set(wanted) - set(known)):
        message = f"`plugins` has {', '.join(unknown)}, which no installed package offers."
        raise PluginError(message, remedy=f"Installed are {', '.join(known)}.")
