"""Where an object is to be had: a URL that may hold secrets, and what of it may be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urljoin

from ...errors import SourceError
from .wire import ServerAddress

PATH = "/%:@!$&'()*+,;=~"  # left as they are: the path is encoded already, but for what no URL may hold
QUERY = PATH + "?[]"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an object is to be had now: a URL, which may hold a signature, and headers for its host alone."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The URL as it may be shown: no credentials, no query."""
        return shown(self.url)


def shown(url: str) -> str:
    """A URL without credentials, query and fragment."""
    base = url.partition("?")[0].partition("#")[0]
    scheme, mark, rest = base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def redirected(location: Location, text: str) -> Location:
    """Where a redirect from `location` leads, by its Location header `text`. Headers stay with their host."""
    try:
        url = urljoin(location.url, quote(text, safe=QUERY + "#"))
        came, goes = ServerAddress.of(location.url), ServerAddress.of(url)
    except ValueError:
        raise SourceError(f"{location.shown} is redirected to what is no http(s) URL.") from None
    if came.scheme == "https" and goes.scheme == "http":
        raise SourceError(
            f"{location.shown} is redirected to {goes}, away from TLS.", remedy="Have it redirect to https."
        )
    return Location(url, location.headers if goes == came else {})
