"""URLs of objects, which may hold secrets: the server's address, redirects, and the part that messages may show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urljoin, urlsplit

from ...errors import SourceError

# Characters that quoting leaves as they are: the path is encoded already, except for what no URL may hold.
PATH = "/%:@!$&'()*+,;=~"
QUERY = PATH + "?[]"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The origin of a URL: scheme, host and port."""

    scheme: str
    host: str
    port: int

    @staticmethod
    def of(url: str) -> ServerAddress:
        """Return the origin of an http(s) URL. Raises ValueError for any other."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("not an http(s) URL")
        host = parts.hostname.encode("idna").decode()
        return ServerAddress(parts.scheme, host, parts.port or _PORTS[parts.scheme])

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Location:
    """The current place of an object: a URL, possibly signed, and headers that only its host may receive."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return shown(self.url)


def shown(url: str) -> str:
    """Return a URL without credentials, query and fragment."""
    base = url.partition("?")[0].partition("#")[0]
    scheme, mark, rest = base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def redirected(location: Location, target: str) -> Location:
    """Return where a redirect from `location` leads, by its Location header `target`. Headers stay with their host."""
    try:
        url = urljoin(location.url, quote(target, safe=QUERY + "#"))
        before, after = ServerAddress.of(location.url), ServerAddress.of(url)
    except ValueError:
        raise SourceError(f"{location.shown} redirects to a target that is not an http(s) URL.") from None
    if before.scheme == "https" and after.scheme == "http":
        fault = f"{location.shown} redirects to {after}, away from TLS."
        raise SourceError(fault, remedy="Redirect to https instead.")
    return Location(url, location.headers if after == before else {})
