"""Counts the open connections of clients. If there are too many, closes idle ones, so that descriptors stay free for links and files."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from ....errors import Overloaded
from .origins import Origins, network_of
from .reading_turns import ReadingTurns

SHARE_OF_FILES = 1 / 2
"""The share of the limit of open files that connections may use. Links to processes, logs and databases have the rest."""
SHARE_OF_CLIENT = 1 / 2
SHARE_NOT_ADMITTED = 3 / 4
"""The shares of these connections that one client may have, and that all connections without an admitted request may have together."""
MAX_FILES = 1 << 20
MAX_LOOKS = 64
"""Limit for the connections that one search for an idle connection checks. Each new connection may cause a search."""
RETRY_S = 1.0


class ClosableConnection(Protocol):
    """An open connection, as `OpenConnections` sees it."""

    @property
    def is_busy(self) -> bool: ...

    def abort(self) -> None: ...


class ConnectionPlace:
    """One open connection, as `OpenConnections` counts it."""

    __slots__ = ("_among", "_sock", "admitted", "client", "connection")

    def __init__(self, among: OpenConnections, sock: socket.socket, client: str) -> None:
        self._among, self._sock, self.client = among, sock, client
        self.admitted = False
        """True if a request on this connection was admitted: the caller has sent a key, or needs none."""
        self.connection: ClosableConnection | None = None
        """None until the handshake of TLS has ended."""

    @property
    def is_busy(self) -> bool:
        return self.connection is not None and self.connection.is_busy

    def take_turn(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` in a later turn of the event loop, after the other clients' turns."""
        self._among.turns.add(read_on, self.client)

    def admit(self) -> None:
        """Note that a request was admitted."""
        if self._among.leave(self):
            self.admitted = True
            self._among.add(self)

    def close(self) -> None:
        """Close the connection, and stop counting it."""
        self.leave()
        if self.connection is not None:
            self.connection.abort()
        else:
            # Make the TLS handshake fail. The transport then closes the socket.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Stop counting the connection, because it is closed."""
        self._among.leave(self)


class OpenConnections:
    """The open connections of a gateway, and the running requests of each client behind a proxy."""

    def __init__(self, origins: Origins, most: int) -> None:
        """`origins` knows which proxies are trusted. `most` is the largest number of open connections."""
        self._origins, self._most = origins, most
        self._admitted: dict[ConnectionPlace, None] = {}
        self._others: dict[ConnectionPlace, None] = {}
        self._of_client: dict[str, dict[ConnectionPlace, None]] = {}
        self._requests: Counter[str] = Counter()
        self.turns = ReadingTurns()

    def enter(self, sock: socket.socket, address: str) -> ConnectionPlace | None:
        """Count a new connection, and return its place. `address` is an IP address, or "" for a unix socket. If there
        are too many connections, close an idle connection. If no connection is idle, return None: the caller must
        close the new connection.
        """
        # Set no limit per client for a trusted proxy, because its connections belong to many clients.
        client = "" if self._origins.trusts(address) else network_of(address)
        own = self._of_client.get(client, {}) if client else {}
        for places, share in ((own, SHARE_OF_CLIENT), (self._others, SHARE_NOT_ADMITTED)):
            if len(places) >= self._most * share and not _close_idle(places):
                return None
        full = len(self._others) + len(self._admitted) >= self._most
        if full and not (_close_idle(self._others) or _close_idle(self._admitted)):
            return None
        place = ConnectionPlace(self, sock, client)
        self.add(place)
        return place

    def add(self, place: ConnectionPlace) -> None:
        (self._admitted if place.admitted else self._others)[place] = None
        if place.client:
            self._of_client.setdefault(place.client, {})[place] = None

    def leave(self, place: ConnectionPlace) -> bool:
        """Stop counting a connection. Return False if it was not counted any more."""
        places = self._admitted if place.admitted else self._others
        if place not in places:
            return False
        del places[place]
        if place.client:
            own = self._of_client[place.client]
            del own[place]
            if not own:
                del self._of_client[place.client]
        return True

    def client_of(self, headers: Mapping[str, str], transport: asyncio.BaseTransport | None) -> str:
        """Return the IP address of the client of a request, also behind a trusted proxy. Return "" for a request over a
        unix socket.
        """
        peer = transport.get_extra_info("peername") if transport is not None else None
        return self._origins.client_of(headers, peer[0] if isinstance(peer, tuple) else "")

    def begin(
        self, headers: Mapping[str, str], transport: asyncio.BaseTransport | None
    ) -> Callable[[], None] | None:
        """Count a request of a client behind a trusted proxy, and return a function to call at its end. Return None for
        any other request.

        Raise Overloaded if too many requests of this client are running.
        """
        if not self._origins.trusts_some:
            return None
        peer = transport.get_extra_info("peername") if transport is not None else None
        if not isinstance(peer, tuple) or not self._origins.trusts(peer[0]):
            return None
        client = network_of(self._origins.client_of(headers, peer[0]))
        if self._requests[client] >= self._most * SHARE_OF_CLIENT:
            message = "This client's requests use all connections that one client may use."
            raise Overloaded(message, remedy="Try again.", details={"retry_after_s": RETRY_S})
        self._requests[client] += 1
        return partial(self._end, client)

    def _end(self, client: str) -> None:
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]


def most_connections() -> int:
    """Return how many connections the limit of open files of this process allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int((MAX_FILES if files == resource.RLIM_INFINITY else files) * SHARE_OF_FILES)


def raise_open_files() -> None:
    """Raise the soft limit of open files of this process to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _close_idle(places: dict[ConnectionPlace, None]) -> bool:
    """Close the first idle connection, and return True. Check at most MAX_LOOKS connections. Move busy connections to
    the end. Return False if all checked connections are busy.
    """
    for _ in range(min(len(places), MAX_LOOKS)):
        place = next(iter(places))
        if not place.is_busy:
            place.close()
            return True
        places[place] = places.pop(place)
    return False
