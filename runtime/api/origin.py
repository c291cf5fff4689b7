"""The origin of a request, where no key is asked for: a web page of elsewhere must not command this machine's gateway.

A browser sends what any page tells it to, to 127.0.0.1 as well; and a page's own name may be made to point there. It
says which name it called (Host) and on whose behalf (Origin, Sec-Fetch-Site), and no page can forge those.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import hdrs
from multidict import istr

from ...errors import Forbidden
from ..access.loopback import is_loopback

_FETCH_SITE = istr("Sec-Fetch-Site")
_REMEDY = (
    "Call it as http://127.0.0.1:PORT or http://localhost:PORT, not from a page of elsewhere; or make an API key "
    "(pilotflame keys create NAME --scope admin) and send it: then any name will do."
)


class OriginCheck:
    """Remembers the last Host that was good: most callers send the same."""

    def __init__(self) -> None:
        self._good = ""

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises Forbidden. Without a Host, Origin or Sec-Fetch-Site it is no browser."""
        host = headers.get(hdrs.HOST)
        if host is not None and host != self._good:
            if not _names_loopback(f"//{host}"):
                raise Forbidden(
                    f"Without API keys this gateway answers only to this machine's own names, not to {host[:80]!a}.",
                    remedy=_REMEDY,
                )
            self._good = host
        origin = headers.get(hdrs.ORIGIN)
        if origin is not None and not _names_loopback(origin):
            raise Forbidden(
                f"Without API keys this gateway answers no web page of {origin[:80]!a}.", remedy=_REMEDY
            )
        if headers.get(_FETCH_SITE) == "cross-site":
            raise Forbidden("Without API keys this gateway answers no web page of elsewhere.", remedy=_REMEDY)


def _names_loopback(address: str) -> bool:
    """Whether an address such as //localhost:8600 or http://[::1] is one of this machine alone."""
    try:
        parts = urlsplit(address)
        return parts.username is None and is_loopback(parts.hostname or "")
    except ValueError:  # brackets that are none
        return False
