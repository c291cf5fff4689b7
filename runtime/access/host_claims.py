"""Knows which function has which host name, and which host names functions may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ...errors import Forbidden, SettingsError
from ..settings.function_settings import FunctionSettings


class HostClaims:
    """The host names of the live functions."""

    def __init__(self, allowed: Sequence[str], functions: Callable[[], Iterable[FunctionSettings]]) -> None:
        """`allowed` are patterns of names that functions may have. `functions` returns the live settings."""
        self._allowed, self._functions = allowed, functions
        self._owners: Mapping[str, str] = {}

    def find(self, host: str) -> str | None:
        """Return the function that has a host name, or None."""
        return self._owners.get(host)

    def update(self, _name: str = "") -> None:
        """Read the names again, because a function has changed."""
        owners: dict[str, str] = {}
        for one in self._functions():
            for host in filter(self._permits, one.hosts):
                # `check` refuses a second owner. The first owner keeps the name in any case.
                if self._owners.get(host, one.name) == one.name or host not in owners:
                    owners[host] = one.name
        self._owners = owners

    def check(self, settings: FunctionSettings) -> None:
        """Raise Forbidden if the gateway does not allow one of the host names, SettingsError if another function has it."""
        for host in settings.hosts:
            if not self._permits(host):
                remedy = "Set PILOTFLAME_APP_HOSTS of the gateway, for example to *.apps.example.com, and start it again."
                raise Forbidden(f"The gateway lets no function have the host name {host!r}.", remedy=remedy)
            if self._owners.get(host, settings.name) != settings.name:
                message = f"hosts has {host!r}, which is the host name of another function."
                raise SettingsError(message, remedy="Choose another name, or delete the other function.")

    def _permits(self, host: str) -> bool:
        return any(fnmatchcase(host, pattern) for pattern in self._allowed)
