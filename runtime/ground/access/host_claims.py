"""Maps host names to functions, and decides which host names functions may have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ....errors import Forbidden, SettingsError
from ..settings.function_settings import FunctionSettings, name_problem

LOOPBACK = "*.localhost"
"""A pattern that every gateway allows, because browsers resolve these names to the user's own machine."""
NOBODY = "-"
"""A name that no function can have."""


class HostClaims:
    """The host names of functions: the host names in their settings, and `NAME.apps.example.com` for each pattern
    `*.apps.example.com`.
    """

    def __init__(self, allowed: Sequence[str], functions: Callable[[], Iterable[FunctionSettings]]) -> None:
        """`allowed` are patterns of names that functions may have. `functions` returns the live settings."""
        self._allowed, self._functions = (*allowed, LOOPBACK), functions
        self._owners: Mapping[str, str] = {}
        # Cached because most requests have the same Host.
        self.find = functools.lru_cache(maxsize=256)(self._find)
        """Returns the function that has the name in a Host header, NOBODY if functions may have the name but none has it, or None if it is a name
        of the gateway.
        """

    def name_of(self, settings: FunctionSettings) -> str:
        """Return a host name of a function: the first permitted name in its settings, or a name that begins with the function's own name."""
        parents = [pattern[1:] for pattern in self._allowed if pattern.startswith("*.")]
        return next(filter(self._permits, settings.hosts), settings.name + parents[0])

    def update(self, _name: str = "") -> None:
        """Read the host names of all functions again, because a function has changed."""
        owners: dict[str, str] = {}
        for one in self._functions():
            for host in filter(self._permits, one.hosts):
                # `check` refuses a second owner of a name. If there is one nevertheless, the first owner keeps the name.
                owners.setdefault(host, one.name)
        self._owners = owners
        self.find.cache_clear()

    def check(self, settings: FunctionSettings) -> None:
        """Raise Forbidden if the gateway does not allow one of the host names, SettingsError if another function has it."""
        for host in settings.hosts:
            if not self._permits(host):
                remedy = "Set PILOTFLAME_APP_HOSTS of the gateway, for example to *.apps.example.com, and start it again."
                raise Forbidden(f"The gateway lets no function have the host name {host!r}.", remedy=remedy)
            if (self._owners.get(host) or self._default_owner(host)) not in ("", settings.name):
                message = f"hosts has {host!r}, which is the host name of another function."
                remedy = "Choose another name, delete the other function, or list this name in PILOTFLAME_APP_HOSTS."
                raise SettingsError(message, remedy=remedy)

    def _permits(self, host: str) -> bool:
        return any(fnmatchcase(host, pattern) for pattern in self._allowed)

    def _find(self, host: str) -> str | None:
        """Return the result of `find`, which caches it.

        A name that fits a pattern is never a name of the gateway, even if its function does not exist: a service worker
        of a deleted function would otherwise control the gateway's pages at this name.
        """
        name = host_name(host)
        if not self._permits(name):
            return None
        return self._owners.get(name) or self._default_owner(name) or NOBODY

    def _default_owner(self, host: str) -> str:
        """Return the function that has the host name by default, because the host name is `NAME.` and an allowed parent; else "". If the
        operator lists the host name itself in `app_hosts`, no function has it by default.
        """
        name, _, parent = host.partition(".")
        owned = f"*.{parent}" in self._allowed and host not in self._allowed and not name_problem(name)
        return name if owned else ""


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case and without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower().rstrip(".")
