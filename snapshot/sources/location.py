"""Handles the URLs of objects: the server's address, redirects, and the removal of secrets for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urljoin, urlsplit

from ...errors import SourceError

# The characters that `quote` must not change. They include %, because a given URL is already percent-encoded. Only
# characters that are not allowed in a URL at all are encoded.
PATH = "/%:@!$&'()*+,;=~"
QUERY = PATH + "?[]"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a web server: the scheme, host and port of its URLs."""

    scheme: str
    host: str
    port: int

    @staticmethod
    def of(url: str) -> ServerAddress:
        """Return the address of the server of `url`. Raise ValueError if it is not an http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("not an http(s) URL")
        host = parts.hostname.encode("idna").decode()
        return ServerAddress(parts.scheme, host, parts.port or _PORTS[parts.scheme])

    @property
    def authority(self) -> str:
        """The value of the Host header: the host, and the port unless it is the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where to read an object: a URL, which may be signed, and headers, which only its server may receive."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


def shown(url: str) -> str:
    """Return a URL without user, password, query and fragment, so that a message may show it."""
    base = url.partition("?")[0].partition("#")[0]
    scheme, mark, rest = base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def redirected(location: Location, target: str) -> Location:
    """Return the location to which `location` redirects. `target` is the Location header of the response.

    The result has the headers of `location` only if it is on the same server. Raise SourceError if the target is not
    an http(s) URL, or if the redirect leads from https to http.
    """
    try:
        url = urljoin(location.url, quote(target, safe=QUERY + "#"))
        before, after = ServerAddress.of(location.url), ServerAddress.of(url)
    except ValueError:
        fault = f"{shown(location.url)} redirects to a target that is not an http(s) URL."
        raise SourceError(fault) from None
    if before.scheme == "https" and after.scheme == "http":
        fault = f"{shown(location.url)} redirects to {after}, away from TLS."
        raise SourceError(fault, remedy="Redirect to https instead.")
    return Location(url, location.headers if after == before else {})
