"""A web server as a source: ranges over kept-alive HTTP/1.1, by raw sockets, straight into the caller's memory."""

from __future__ import annotations

import base64
import ssl
import threading
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import h11

from ..._version import __version__
from ...errors import PilotflameError, SnapshotChanged, SourceError, SourceMissing, SourceUnavailable
from .answer import OK, PARTIAL, REDIRECTS, Asked, check, described, is_strong, refusal, unavailable
from .exchange import Exchange, Head, StaleError
from .location import PATH, QUERY, Location, redirected, shown
from .ranged import Patience, Ranged
from .source import ObjectInfo, name_fault
from .wire import ServerAddress, Wire

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
MAX_REDIRECTS = 5
MAX_ERROR_BYTES = 64 << 10

_NONE: Mapping[str, str] = {}


class Site(Ranged):
    """A source whose objects are GET by HTTP: says where they are, and remembers what it learned of them."""

    def __init__(
        self, *, timeout_s: float, connect_timeout_s: float, ssl_context: ssl.SSLContext | None
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._given_context = ssl_context
        self._lock = threading.Lock()
        self._found: dict[str, ObjectInfo] = {}

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def locate(self, name: str, *, fresh: bool) -> Location:
        """Where `name` is; `fresh`: by new resolving or signing, since the last location was refused."""

    def settle(self, name: str, location: Location) -> None:
        """A redirect led to `location`, which answers."""

    def explain(self, asked: Asked, head: Head, body: bytes) -> PilotflameError:
        """What a refusal means; `body` is its first 64 KiB."""
        del body
        return refusal(head, asked)

    def learn(self, name: str, info: ObjectInfo, head: Head) -> None:
        """What a good answer said of `name`. The first one counts until `forget`."""
        del head
        with self._lock:
            self._found.setdefault(name, info)

    def stat(self, name: str) -> ObjectInfo:
        """See Source; tries again what may pass. Remembered until the object turns out to have changed."""
        with self._lock:
            found = self._found.get(name)
        if found is not None:
            return found
        connection = self.connect()
        try:
            return _describe(connection, name)
        finally:
            connection.close()

    def size_known(self, name: str) -> int | None:
        """The size that `stat` found."""
        with self._lock:
            found = self._found.get(name)
        return found.size_bytes if found is not None else None

    def forget(self, name: str) -> None:
        """`name` is not what it was; `stat` is to ask again."""
        with self._lock:
            self._found.pop(name, None)

    def connect(self) -> HttpConnection:
        wire = Wire(self._timeout_s, self._connect_timeout_s, lambda: self._context)
        return HttpConnection(self, wire)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._given_context or ssl.create_default_context()


class HttpSource(Site):
    """`http(s)://host/prefix`; objects are below it. `headers` go to that host alone, as do user and password
    of the URL; a query in the URL is sent with every request. ValueErrors of the URL are SourceErrors."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, ssl_context=ssl_context)
        try:
            origin, parts = ServerAddress.of(url), urlsplit(url)
        except ValueError as error:
            raise SourceError(
                f"{shown(url)!r} is not a URL of a web server: {error}.", remedy="Write http(s)://host/path."
            ) from None
        self._base = f"{origin}{quote(parts.path.rstrip('/'), safe=PATH)}"
        self._query = f"?{quote(parts.query, safe=QUERY)}" if parts.query else ""
        self._headers = dict(headers or _NONE)
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._settled: dict[str, Location] = {}

    @property
    def url(self) -> str:
        return self._base

    def locate(self, name: str, *, fresh: bool) -> Location:
        with self._lock:
            if fresh:
                self._settled.pop(name, None)
            elif name in self._settled:
                return self._settled[name]
        return Location(f"{self._base}/{quote(name, safe='/')}{self._query}", self._headers)

    def settle(self, name: str, location: Location) -> None:
        with self._lock:
            self._settled[name] = location


class HttpConnection:
    """One kept-alive connection; see Connection. Redirects are followed, and remembered by the site."""

    def __init__(self, site: Site, wire: Wire) -> None:
        self._site = site
        self._wire = wire
        self._exchange = Exchange(wire)
        self._asked = Asked("", "", 0, 0)
        self._left = 0

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        self._left = 0
        head, asked = self._ask(name, begin, end, version)
        try:
            if head.status not in {OK, PARTIAL}:
                raise self._refused(head, asked)
            check(head, asked, self._site.size_known(name))
        except SnapshotChanged:
            self._site.forget(name)
            raise
        info = described(head, asked)
        self._site.learn(name, info, head)
        self._asked, self._left = asked, end - begin
        return info

    def describe(self, name: str) -> ObjectInfo:
        """Size and version, by a GET of the first byte: a URL signed for GET refuses HEAD."""
        head, asked = self._ask(name, 0, 1, "")
        if head.status == 416 and head.headers.get("content-range") == "bytes */0":
            return described(head, asked)
        if head.status not in {OK, PARTIAL}:
            raise self._refused(head, asked)
        info = described(head, asked)
        if head.status == PARTIAL:
            check(head, asked, None)
        self._site.learn(name, info, head)
        return info

    def read_into(self, view: memoryview) -> int:
        if self._left == 0 or not len(view):
            return 0
        try:
            count = self._exchange.read_into(view, min(len(view), self._left))
        except (OSError, h11.RemoteProtocolError) as error:
            raise self._broken(self._asked, error) from error
        if count == 0:
            raise unavailable(self._asked, f"the answer ended {self._left} bytes early")
        self._left -= count
        return count

    def close(self) -> None:
        self._wire.close()

    def _ask(self, name: str, begin: int, end: int, version: str) -> tuple[Head, Asked]:
        """The head that is not a redirect; where a location is refused, a fresh one is tried once."""
        if (fault := name_fault(name)) is not None:
            raise SourceMissing(f"{name[:80]!r} is not a name below {self._site.url}: {fault}.")
        location = self._site.locate(name, fresh=False)
        head, asked = self._follow(location, Asked(name, location.shown, begin, end, version))
        if head.status in {OK, PARTIAL, 412, 416}:
            return head, asked
        refused = self._refused(head, asked)
        if (
            isinstance(refused, SourceUnavailable)
            or (fresh := self._site.locate(name, fresh=True)) == location
        ):
            raise refused
        return self._follow(fresh, Asked(name, fresh.shown, begin, end, version))

    def _follow(self, location: Location, asked: Asked) -> tuple[Head, Asked]:
        for count in range(MAX_REDIRECTS + 1):
            head = self._get(location, asked)
            if head.status not in REDIRECTS or "location" not in head.headers:
                if count and head.status in {OK, PARTIAL}:
                    self._site.settle(asked.name, location)
                return head, asked
            self._rest()
            location = redirected(location, head.headers["location"])
            asked = Asked(asked.name, location.shown, asked.begin, asked.end, asked.version)
        raise SourceError(
            f"{asked.where} is redirected more than {MAX_REDIRECTS} times.", remedy="Check the URL."
        )

    def _get(self, location: Location, asked: Asked) -> Head:
        parts = urlsplit(location.url)
        origin = ServerAddress.of(location.url)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = [("Host", origin.authority), *_headers(location, asked)]
        try:
            kept = self._wire.origin == origin and self._exchange.clean and self._wire.quiet()
            if kept:
                try:
                    return self._exchange.ask(target, headers)
                except StaleError:
                    pass  # the server had closed a connection that it had kept; that is no failure
            self._wire.connect(origin)
            return self._exchange.ask(target, headers)
        except (OSError, h11.RemoteProtocolError) as error:
            raise self._broken(asked, error) from error
        except h11.LocalProtocolError:
            # None of its words: they quote the header, which may be a secret.
            raise SourceError(
                f"{asked.where} cannot be asked for: the URL or a header holds what HTTP does not allow.",
                remedy="Look for line ends and control characters in them.",
            ) from None

    def _refused(self, head: Head, asked: Asked) -> PilotflameError:
        return self._site.explain(asked, head, self._rest())

    def _rest(self) -> bytes:
        try:
            return self._exchange.read_rest(MAX_ERROR_BYTES)
        except (OSError, h11.RemoteProtocolError):
            return b""  # the status says enough

    def _broken(self, asked: Asked, error: Exception) -> PilotflameError:
        self._wire.drop()
        if isinstance(error, ssl.SSLCertVerificationError):
            return SourceError(
                f"{asked.where}: the server's certificate is not trusted: {error.verify_message}.",
                remedy="Name its authority in SSL_CERT_FILE, or give an ssl_context that trusts it.",
            )
        if isinstance(error, TimeoutError):
            return unavailable(asked, "nothing came in time")
        return unavailable(asked, str(getattr(error, "strerror", None) or error).rstrip("."))


def _describe(connection: HttpConnection, name: str) -> ObjectInfo:
    patience = Patience()
    while True:
        try:
            return connection.describe(name)
        except SourceUnavailable as error:
            patience.failed(error)


def _headers(location: Location, asked: Asked) -> list[tuple[str, str]]:
    headers = [
        ("User-Agent", f"pilotflame/{__version__}"),
        ("Accept-Encoding", "identity"),
        ("Range", f"bytes={asked.begin}-{asked.end - 1}"),
    ]
    if is_strong(asked.version):
        headers.append(("If-Match", asked.version))
    return [*headers, *location.headers.items()]
