"""The rules: which scope each route takes. The one table; a route that is not in it takes `admin`."""

from __future__ import annotations

from functools import cache

from ..access.keys import Scope

OPEN = frozenset({"/healthz", "/readyz"})
"""Answered to anybody: whoever probes a gateway has no key."""

# The beginning of a route's path, as it was registered ("/v2/{function}/run"), and what it takes; the first that fits.
# Where the path has a {function}, the key must cover it as well: `Guard` sees to that.
RULES: tuple[tuple[str, Scope], ...] = (
    ("/invoke/", Scope.INVOKE),
    ("/v2/", Scope.INVOKE),
    ("/predictions", Scope.INVOKE),
    ("/2015-03-31/", Scope.INVOKE),
    ("/v1/functions", Scope.DEPLOY),
)
ANY_KEY = frozenset({"/openapi.json", "/health-check"})
"""Answered to every key, with what it covers."""


@cache
def scope_of(path: str) -> Scope | None:
    """The scope that a registered path takes; None: any. There are as many paths as routes, so all are kept."""
    if path in ANY_KEY:
        return None
    for beginning, scope in RULES:
        if path.startswith(beginning):
            return scope
    return Scope.ADMIN
