"""Defines the source that reads from a web server, with range requests over kept-alive connections."""

from __future__ import annotations

import base64
import math
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import h11
import orjson

from ..._version import __version__
from ...errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from ...foreign_json import excess
from .access import ANY, Access, refused
from .dialer import AddressRefused, Dialer
from .exchange import Exchange, Head, StaleError
from .idle import IdleConnections
from .location import PATH, QUERY, Location, ServerAddress, redirected, shown
from .proxy import ProxyError
from .response import (
    MISPLACED,
    OK,
    PARTIAL,
    REDIRECTS,
    RangeRequest,
    check,
    refusal,
    told_size,
    unavailable,
    version_of,
)
from .retries import Retries, retried
from .source import ObjectInfo, name_fault
from .tls import system_trust
from .variables import HEADERS_VARIABLE, TOKEN_VARIABLE, WEB
from .wire import Wire

MAX_REDIRECTS = 5
# The headers that each request sets itself. Secrets must not set them.
_OUR_HEADERS = frozenset({"host", "range", "if-match", "accept-encoding", "connection", "content-length"})
MAX_ERROR_BYTES = 64 << 10
MAX_DOCUMENT_BYTES = 32 << 20
MAX_COUNTED_BYTES = 128 << 20
"""If a server does not tell the size of an object, the object is read to count its bytes, up to this number. A manifest may
have this size."""
# Any valid name. `prepare` resolves it, but does not request this object.
_ANY_NAME = "model.safetensors"


class WebSource(ABC):
    """A source whose objects are read with HTTP GET. It remembers their locations, sizes and versions."""

    kept_for_s = math.inf
    """How long a location is used before `resolve` is called again."""
    silent_s: float | None = None
    """How long a server may be silent; None for the usual time."""

    def __init__(self, url: str, ssl_context: ssl.SSLContext | None = None, access: Access = ANY) -> None:
        self.url = url
        self.access = access
        self._dialer = Dialer(access.addresses)
        self._own_trust = ssl_context
        # The threads of all connections use these dicts without a lock, because single operations are atomic.
        self.infos: dict[str, ObjectInfo] = {}
        """The first info seen of each object. The info is removed when a read finds that the object has changed."""
        self._locations: dict[str, tuple[Location, float]] = {}
        self.idle = IdleConnections()

    def forget(self) -> None:
        """Forget the infos and the locations of the objects."""
        self.infos.clear()
        self._locations.clear()

    def prepare(self) -> None:
        """Do the work of the first request in advance: resolve a name and, for https, load the trusted authorities."""
        if self.resolve(_ANY_NAME).url.startswith("https:"):
            self._trust()

    @abstractmethod
    def resolve(self, name: str) -> Location:
        """Return the location at which to request `name` first. The server may redirect to another location."""

    def served_at(self, name: str) -> str:
        """Return the URL at which object `name` is requested first, without credentials."""
        return shown(self.resolve(name).url)

    def locate(self, name: str, *, fresh: bool) -> Location:
        """Return the location of `name`. With `fresh`, do not return a remembered location."""
        location, until_s = self._locations.get(name, (None, 0.0))
        if location is None or fresh or time.monotonic() >= until_s:
            location = self.resolve(name)
            self.note(name, location)
        return location

    def note(self, name: str, location: Location) -> None:
        """Remember the location of `name`, which may be the target of a redirect, for `kept_for_s`."""
        self._locations[name] = location, time.monotonic() + self.kept_for_s

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        """Return the error for a response that refuses `request`. `body` has the first 64 KiB of the response's body."""
        del body
        return refusal(head, request)

    def stat(self, name: str) -> ObjectInfo:
        """Return the size and version of `name`. Send a request only if they are not known yet. Retry temporary failures."""
        if (info := self.infos.get(name)) is not None:
            return info
        with self._borrowed() as connection:
            return retried(lambda: connection.stat(name))

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """Fill `view` with the bytes of object `name` that start at `offset`, and return their number.

        Retry temporary failures, and raise the error after ATTEMPTS failures in a row.
        """
        info = self.infos.get(name)
        end = min(info.size_bytes, offset + len(view)) if info is not None else offset + len(view)
        # Do not require the version that was seen before if the whole object is read: replicas may have different versions.
        whole = info is None or (offset == 0 and end == info.size_bytes)
        wanted = "" if whole or info is None else info.version
        at, retries = offset, Retries()
        with self._borrowed() as connection:
            while at < end:
                try:
                    info = connection.begin(name, at, end, wanted)
                    wanted = info.version
                    while at < end and (count := connection.read_into(view[at - offset : end - offset])):
                        at += count
                        retries = Retries()
                except (SourceUnavailable, SnapshotChanged) as error:
                    if info is None:
                        # Ask for the size, because the object may be shorter than the requested range.
                        info = self.stat(name)
                        end = min(info.size_bytes, end)
                    elif isinstance(error, SnapshotChanged):
                        raise
                    else:
                        retries.wait(error)
        return max(0, at - offset)

    def json_document(self, location: Location, most: int = MAX_DOCUMENT_BYTES) -> Any:
        """Return the JSON value of a small document. Retry temporary failures.

        Return None if the document is not JSON, or has more values than `foreign_json` allows.
        """
        text = self.document(location, most)[1]
        try:
            return None if excess(text) else orjson.loads(text)
        except ValueError:
            return None

    def document(self, location: Location, most: int = MAX_DOCUMENT_BYTES) -> tuple[Head, bytes]:
        """Return the head and the whole body of a small document. Retry temporary failures.

        Raise SourceError if the document has more than `most` bytes.
        """
        with self._borrowed() as connection:
            return retried(lambda: connection.document(location, most))

    def connect(self) -> HttpConnection:
        return HttpConnection(self, self._wire())

    def request(self, method: str, location: Location, body: Iterable[bytes] = ()) -> tuple[Head, bytes]:
        """Send one request over a new connection. See HttpConnection.request."""
        with self._borrowed() as connection:
            return connection.request(method, location, body)

    @contextmanager
    def _borrowed(self) -> Iterator[HttpConnection]:
        # Do not reuse a kept connection: it may deliver a second answer to an earlier request, and these reads are not
        # verified.
        connection = HttpConnection(self, self._wire(), reuse=False)
        try:
            yield connection
            connection.release()
        finally:
            connection.close()

    def _wire(self) -> Wire:
        # If addresses are limited, use no proxy, because the addresses to which a proxy connects cannot be checked.
        return Wire(
            self._trust, self._dialer, timeout_s=self.silent_s, direct=self.access.addresses is not None,
            until_s=self.access.until_s,
        )  # fmt: skip

    def _trust(self) -> ssl.SSLContext:
        return self._own_trust or system_trust(self._ca_bundle())

    def _ca_bundle(self) -> str | None:
        return None


class HttpSource(WebSource):
    """The objects below `http(s)://host/prefix` on a web server. The query of `url` is appended to their URLs.

    Every request has the headers of `secrets`, and the user and password of `url`. If a redirect leads to another server,
    that server does not get these headers and credentials. Raises SourceError if `url` is not an http(s) URL.
    """

    def __init__(
        self,
        url: str,
        ssl_context: ssl.SSLContext | None = None,
        secrets: Mapping[str, str] | None = None,
        access: Access = ANY,
    ) -> None:
        """`secrets` may have PILOTFLAME_SNAPSHOT_TOKEN, a bearer token, and PILOTFLAME_SNAPSHOT_HEADERS."""
        try:
            origin, parts = ServerAddress.of(url), urlsplit(url)
        except ValueError as error:
            fault = f"{shown(url)!r} is not a URL of a web server: {error}."
            raise SourceError(fault, remedy="Write http(s)://host/path.") from None
        base = f"{origin}{quote(parts.path.rstrip('/'), safe=PATH)}"
        super().__init__(base, ssl_context, access)
        self._query = f"?{quote(parts.query, safe=QUERY)}" if parts.query else ""
        self._headers = _own_headers(WEB.variables(secrets, access))
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"

    def resolve(self, name: str) -> Location:
        return Location(f"{self.url}/{quote(name, safe='/')}{self._query}", self._headers)


def _own_headers(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a function's secrets set. Raise SourceError, whose message does not quote secrets."""
    headers = {}
    for line in secrets.get(HEADERS_VARIABLE, "").splitlines():
        name, mark, value = line.partition(":")
        if not line.strip():
            continue
        if not mark or not name.strip() or name.strip().lower() in _OUR_HEADERS:
            fault = f"{HEADERS_VARIABLE} has a line that is no header of a request for a file."
            raise SourceError(fault, remedy="Write one 'Name: value' a line.")
        headers[name.strip()] = value.strip()
    if token := secrets.get(TOKEN_VARIABLE, "").strip():
        headers["Authorization"] = f"Bearer {token}"
    return headers


class HttpConnection:
    """A Connection over HTTP. It uses one kept-alive network connection at a time, and follows redirects."""

    def __init__(self, source: WebSource, wire: Wire, *, reuse: bool = True) -> None:
        """With `reuse`, use a connection that the source keeps, if there is one."""
        self._source = source
        self._wire = wire
        self._exchange = Exchange(wire)
        self._reuses = reuse
        self.used = False
        self._lock = threading.Lock()
        """Guards `_closed`, and keeps `close` from closing a `_wire` that is being replaced."""
        self._closed = False
        self._request = RangeRequest("", "", 0, 0)
        self._left = 0
        # True if the last request was the first one on its network connection.
        self._fresh = True

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        self._left = 0
        known = self._source.infos.get(name)
        try:
            head, request = self._get(name, begin, end, version)
            size = known.size_bytes if known else told_size(head)
            check(head, request, size, fresh=self._fresh)
            if size is None:
                size = self._source.stat(name).size_bytes
        except (SnapshotChanged, SourceUnavailable) as error:
            if not self._fresh and (isinstance(error, SnapshotChanged) or MISPLACED in error.details):
                # This may be a second answer to an earlier request. Stop reusing connections, because they all may deliver such
                # answers.
                self._source.idle.distrust()
            if isinstance(error, SnapshotChanged):
                self._source.infos.pop(name, None)
            raise
        info = ObjectInfo(size, version_of(head))
        # Store no info from a used connection: the response may be a second answer to an earlier request.
        if self._fresh:
            self._source.infos.setdefault(name, info)
        self._request, self._left = request, end - begin
        return info

    def stat(self, name: str) -> ObjectInfo:
        """Return the size and version of `name`. Use GET, because servers refuse HEAD for URLs signed for GET.

        If the response does not have the size, request the whole object. If the size is still unknown, count the bytes.
        """
        head, request = self._get(name, 0, 1, empty=True)
        if head.status == PARTIAL:
            check(head, request, None, fresh=self._fresh)
        size = told_size(head)
        if size is None and head.status == PARTIAL:
            head, request = self._get(name, 0, 0)
            size = told_size(head)
        if size is None:
            fault = f"{request.url} does not tell how large it is, and has"
            size = sum(len(piece) for piece in self._pieces(request, MAX_COUNTED_BYTES, fault))
        info = ObjectInfo(size, version_of(head))
        self._source.infos.setdefault(name, info)
        return info

    def document(self, location: Location, most: int = MAX_DOCUMENT_BYTES) -> tuple[Head, bytes]:
        """Return the head and the whole body of a small document. The request has no range."""
        head, request = self._follow(location, RangeRequest("", shown(location.url), 0, 0))
        if head.status != OK:
            raise self._source.explain(request, head, self._rest())
        return head, b"".join(map(bytes, self._pieces(request, most, f"{request.url} has")))

    def _pieces(self, request: RangeRequest, most: int, fault: str) -> Iterator[memoryview]:
        """Yield the body in pieces. Each piece is valid until the next one is requested.

        Raise SourceError, whose message begins with `fault`, if the body has more than `most` bytes.
        """
        buffer, left = memoryview(bytearray(MAX_ERROR_BYTES)), most
        try:
            while count := self._exchange.read_into(buffer, len(buffer)):
                if (left := left - count) < 0:
                    self.close()
                    remedy = "Serve it as a static file, with Content-Length and ranges."
                    raise SourceError(f"{fault} more than {most} bytes.", remedy=remedy)
                yield buffer[:count]
        except (OSError, h11.RemoteProtocolError) as error:
            raise self._failed(request, error) from error

    def request(self, method: str, location: Location, body: Iterable[bytes] = ()) -> tuple[Head, bytes]:
        """Send a request. Return the head of the response, whatever its status, and at most 64 KiB of its body.

        Do not follow redirects. If there is a `body`, `location.headers` have its Content-Length.
        """
        head = self._ask(location, RangeRequest("", shown(location.url), 0, 0), method, body)
        return head, self._rest()

    def read_into(self, view: memoryview) -> int:
        if self._left == 0 or not len(view):
            return 0
        try:
            count = self._exchange.read_into(view, min(len(view), self._left))
        except (OSError, h11.RemoteProtocolError) as error:
            raise self._failed(self._request, error) from error
        if count == 0:
            raise unavailable(self._request, f"the response ended {self._left} bytes early")
        self._left -= count
        return count

    def release(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._source.idle.put(self._wire, self._exchange)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wire.close()

    def _reuse(self, origin: ServerAddress) -> bool:
        """Continue with a kept connection to `origin`. Return False if there is none."""
        kept = self._source.idle.take(origin) if self._reuses else None
        if kept is None:
            return False
        with self._lock:
            if self._closed:
                kept[0].close()
                return False
            self._wire.drop()
            self._wire, self._exchange = kept
        self.used = True
        return True

    def _get(
        self, name: str, begin: int, end: int, version: str = "", *, empty: bool = False
    ) -> tuple[Head, RangeRequest]:
        """Request a range. Return the head of the successful response, and the request that it answers.

        If the server refuses the remembered location of the object, try once more with a fresh location. With
        `empty`, a response that the object is empty counts as a success.
        """
        if fault := name_fault(name):
            raise SourceMissing(f"{name[:80]!r} is not a name below {self._source.url}: {fault}.")
        tried: Location | None = None
        for fresh in (False, True):
            location = self._source.locate(name, fresh=fresh)
            if location == tried:
                break
            request = RangeRequest(name, shown(location.url), begin, end, version)
            head, request = self._follow(location, request)
            is_empty = head.status == 416 and head.headers.get("content-range") == "bytes */0"
            if head.status in {OK, PARTIAL} or (empty and is_empty):
                return head, request
            refused = self._source.explain(request, head, self._rest())
            if isinstance(refused, (SourceUnavailable, SnapshotChanged)):
                break
            tried = location
        raise refused

    def _follow(self, location: Location, request: RangeRequest) -> tuple[Head, RangeRequest]:
        for count in range(MAX_REDIRECTS + 1):
            head = self._ask(location, request)
            if head.status not in REDIRECTS or "location" not in head.headers:
                if count and request.name and head.status in {OK, PARTIAL}:
                    self._source.note(request.name, location)
                return head, request
            self._rest()
            location = redirected(location, head.headers["location"])
            request = replace(request, url=shown(location.url))
        fault = f"{request.url} redirects more than {MAX_REDIRECTS} times."
        raise SourceError(fault, remedy="Check the URL.")

    def _ask(
        self, location: Location, request: RangeRequest, method: str = "GET", body: Iterable[bytes] = ()
    ) -> Head:
        origin = ServerAddress.of(location.url)
        try:
            own = self._wire.origin == origin and self._exchange.clean and self._wire.quiet()
            if own or self._reuse(origin):
                # If the server has closed the connection since the last request, connect again below.
                with suppress(StaleError):
                    self._fresh = False
                    return self._send(origin, location, request, method, body)
            self._fresh, self.used = True, False
            self._wire.connect(origin)
            return self._send(origin, location, request, method, body)
        except (OSError, h11.RemoteProtocolError) as error:
            raise self._failed(request, error) from error
        except h11.LocalProtocolError:
            # Do not show h11's message: it quotes the header, which may be a secret.
            fault = f"The URL or a header of the request for {request.url} holds what HTTP does not allow."
            raise SourceError(fault, remedy="Remove line ends and control characters.") from None

    def _send(
        self,
        origin: ServerAddress,
        location: Location,
        request: RangeRequest,
        method: str,
        body: Iterable[bytes],
    ) -> Head:
        parts = urlsplit(location.url)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = _headers(origin, location, request)
        if (proxy := self._wire.forwarder) is not None:
            target = f"{origin}{target}"
            headers += proxy.headers.items()
        return self._exchange.request(method, target, headers, body)

    def _rest(self) -> bytes:
        rest, done = memoryview(bytearray(MAX_ERROR_BYTES)), 0
        # Ignore errors: if the body breaks off, its beginning is enough for the text of an error.
        with suppress(OSError, h11.RemoteProtocolError):
            while done < len(rest) and (count := self._exchange.read_into(rest[done:], len(rest) - done)):
                done += count
        return bytes(rest[:done])

    def _failed(self, request: RangeRequest, error: Exception) -> PilotflameError:
        self._wire.drop()
        if isinstance(error, AddressRefused):
            return refused(request.url, error.reason)
        if isinstance(error, ssl.SSLCertVerificationError):
            fault = f"{request.url}: the server's certificate is not trusted: {error.verify_message}."
            return SourceError(fault, remedy="Name its authority in SSL_CERT_FILE.")
        if isinstance(error, ProxyError) and error.status in {401, 403, 407}:
            remedy = "Check the user and the password in HTTPS_PROXY, or name the server in NO_PROXY."
            return SourceDenied(f"{request.url} may not be read: {error}.", remedy=remedy)
        if isinstance(error, TimeoutError):
            if time.monotonic() > self._source.access.until_s:
                return SourceError(f"{request.url} is read too slowly.", remedy="Choose a faster server.")
            return unavailable(request, "timed out")
        return unavailable(request, str(getattr(error, "strerror", None) or error).rstrip("."))


def _headers(origin: ServerAddress, location: Location, request: RangeRequest) -> list[tuple[str, str]]:
    headers = [
        ("Host", origin.authority),
        ("User-Agent", f"pilotflame/{__version__}"),
        ("Accept-Encoding", "identity"),
    ]
    if request.end:
        headers.append(("Range", f"bytes={request.begin}-{request.end - 1}"))
    # Send no If-Match: some servers refuse it, and `check` compares the version of the response.
    return [*headers, *location.headers.items()]
