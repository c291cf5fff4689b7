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
"""The shares of these connections that one client, and all connections without an admitted request, may use."""
MAX_FILES = 1 << 20
MAX_LOOKS = 64
"""At how many connections one search for an idle one looks. Each new connection may cause a search."""
RETRY_S = 1.0


class ClosableConnection(Protocol):
    """An open connection, as `OpenConnections` sees it."""

    @property
    def is_busy(self) -> bool: ...

    def abort(self) -> None: ...


class ConnectionPlace:
    """The place of one open connection."""

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
        """Close the connection, and give the place back."""
        self.leave()
        if self.connection is not None:
            self.connection.abort()
        else:
            # The handshake of TLS then fails, and the transport closes the socket.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Give the place back, because the connection is closed."""
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
        """Return the place of a new connection from an IP address, "" for a unix socket. If there are too many connections, close an idle one.

        Return None if the new connection must be closed, because no other one is idle.
        """
        # The connections of a trusted proxy belong to many clients.
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
        """Give a place back. Return False if it was given back before."""
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
        """Return the IP address of the client of a request, also behind a trusted proxy; "" if it came over a unix socket."""
        peer = transport.get_extra_info("peername") if transport is not None else None
        return self._origins.client_of(headers, peer[0] if isinstance(peer, tuple) else "")

    def begin(
        self, headers: Mapping[str, str], transport: asyncio.BaseTransport | None
    ) -> Callable[[], None] | None:
        """Count a request of a client behind a trusted proxy, and return a function that ends it. Return None for any other
        request.

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
    """Close the oldest idle connection of the first ones. Move the busy ones to the end. Return False if all of them are busy."""
    for _ in range(min(len(places), MAX_LOOKS)):
        place = next(iter(places))
        if not place.is_busy:
            place.close()
            return True
        places[place] = places.pop(place)
    return False
