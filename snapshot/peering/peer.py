"""Asks other nodes over HTTP/1.1 for their positions in the line for a snapshot, and for its chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import h11
import orjson

from ..._version import __version__
from ...errors import SourceDenied, SourceMissing, SourceUnavailable
from ..sources.dialer import Address, Dialer
from ..sources.exchange import Exchange, Head, StaleError
from ..sources.idle import IdleConnections
from ..sources.location import ServerAddress
from ..sources.tls import system_trust
from ..sources.wire import Wire
from .fetch_order import LineAnswer, Position

LANDED_HEADER = "pilotflame-landed-bytes"
CONNECT_TIMEOUT_S = 0.5
SILENT_TIMEOUT_S = 3.0
"""How long a peer may send nothing. It is longer than `served_chunks.WAIT_S`, after which a peer answers even if the chunk has not landed."""
RESOLVE_TIMEOUT_S = 0.25
ANSWER_TIMEOUT_S = 4.0
"""How long a node may take to send the head of an answer, or a small answer."""
AVOIDED_FOR_S = 30.0
_MAX_ANSWER_BYTES = 4096
_MAX_NAME_CHARS = 64
_MAX_DIGITS = 20


class Node(NamedTuple):
    """Where another node listens. `server` is from the settings. `address` is one of the addresses of the server's host."""

    server: ServerAddress
    address: Address


class PeerList:
    """Finds nodes: one at each address to which the hosts of `urls` resolve. Thread-safe."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._servers = [ServerAddress.of(url) for url in urls]
        self._dialer = Dialer()
        self._lock = threading.Lock()
        self._last: dict[ServerAddress, list[Address]] = {}
        self._own: set[Node] = set()
        self._avoided: dict[Node, float] = {}

    def nodes(self) -> list[Node]:
        """Return all nodes, except this node and the nodes that recently did not answer."""
        deadline_s = time.monotonic() + RESOLVE_TIMEOUT_S
        found = [
            Node(server, each) for server in self._servers for each in self._addresses(server, deadline_s)
        ]
        now_s = time.monotonic()
        with self._lock:
            self._avoided = {node: until_s for node, until_s in self._avoided.items() if until_s > now_s}
            return [node for node in found if node not in self._own and node not in self._avoided]

    def avoid(self, node: Node) -> None:
        """Leave a node out of `nodes` for a while, because it did not answer."""
        with self._lock:
            self._avoided[node] = time.monotonic() + AVOIDED_FOR_S

    def is_own(self, node: Node) -> None:
        """Leave a node out of `nodes` from now on, because it is this node."""
        with self._lock:
            self._own.add(node)

    def _addresses(self, server: ServerAddress, deadline_s: float) -> list[Address]:
        """Return the addresses of a host. If resolving fails or takes too long, return the addresses found last."""
        # An OSError also means that the host has no address now, for example before the first node is ready.
        with suppress(OSError):
            self._last[server] = self._dialer.addresses(server.host, server.port, deadline_s)
        return self._last.get(server, [])


class _OneAddress(Dialer):
    """Connects to one given address of a host."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._address = address

    def addresses(self, host: str, port: int, deadline_s: float) -> list[Address]:
        del host, port, deadline_s
        return [self._address]


class Answer:
    """The response of a peer. The caller must call `end`."""

    def __init__(self, peer: Peer, wire: Wire, exchange: Exchange, head: Head) -> None:
        self.head = head
        self._peer, self._wire, self._exchange = peer, wire, exchange

    @property
    def size_bytes(self) -> int:
        """The length of the body. -1 if the response does not give it."""
        text = self.head.headers.get("content-length", "")
        return int(text) if text.isdecimal() and len(text) < _MAX_DIGITS else -1

    @property
    def landed_bytes(self) -> int:
        """How many bytes have landed at the peer. 0 if the response does not give the number."""
        text = self.head.headers.get(LANDED_HEADER, "")
        return int(text) if text.isdecimal() and len(text) < _MAX_DIGITS else 0

    def read_into(self, view: memoryview) -> int:
        """Read the next bytes of the body. Return their number: 0 at the body's end. Raise SourceUnavailable."""
        try:
            return self._exchange.read_into(view, len(view))
        except (OSError, h11.ProtocolError) as error:
            raise self._peer.failed(error) from error

    def text(self) -> bytes:
        """Return the body, or its beginning if it is long. Raise SourceUnavailable."""
        view, done = memoryview(bytearray(_MAX_ANSWER_BYTES)), 0
        with _within(ANSWER_TIMEOUT_S, self._wire):
            while done < len(view) and (count := self.read_into(view[done:])):
                done += count
        return bytes(view[:done])

    def end(self) -> None:
        """Keep the connection for the next request. Close it instead if the body was not read to its end."""
        self._peer.idle.put(self._wire, self._exchange)


class Peer:
    """Another node. Thread-safe: each request uses a connection of its own, which is kept for later requests."""

    def __init__(self, node: Node, token: str) -> None:
        self.node = node
        self.idle = IdleConnections()
        self._headers = [
            ("Host", node.server.authority),
            ("User-Agent", f"pilotflame/{__version__}"),
            ("Authorization", f"Bearer {token}"),
        ]

    def position_of(self, key: str, *, settled: bool) -> LineAnswer:
        """Return the node's position for snapshot `key`. If `settled`, the node first waits up to half a second to choose one.

        Raise SourceUnavailable, or SourceDenied if the node refuses the token.
        """
        answer = self.ask(f"/v1/line/{key}{'?settled=1' if settled else ''}")
        try:
            text = answer.text()
        finally:
            answer.end()
        try:
            said = orjson.loads(text)
            number, ticket, node = said["number"], said["ticket"], str(said["node"])[:_MAX_NAME_CHARS]
            position = None if number is None else Position(int(number), str(ticket))
            choosing = bool(said["choosing"])
        except (ValueError, LookupError, TypeError):
            raise SourceUnavailable(f"{self.node.server} does not say where it stands.") from None
        if position is not None and not position.valid:
            raise SourceUnavailable(f"{self.node.server} has no place in line that there can be.")
        return LineAnswer(node, position, choosing=choosing)

    def ask(self, target: str) -> Answer:
        """Send a request. Return the response, which has status 200, or 503 if a chunk has not landed.

        Raise SourceMissing for 404, SourceDenied for 401, and SourceUnavailable for other responses or none.
        """
        wire, exchange, head = self._get(target)
        answer = Answer(self, wire, exchange, head)
        if head.status == 200 or (head.status == 503 and LANDED_HEADER in head.headers):
            return answer
        try:
            answer.text()
        finally:
            answer.end()
        if head.status == 401:
            remedy = "Set PILOTFLAME_PEERS_TOKEN to the same token on all nodes."
            raise SourceDenied(f"{self.node.server} refuses the token of this node.", remedy=remedy)
        kind = SourceMissing if head.status == 404 else SourceUnavailable
        raise kind(f"{self.node.server} responds with HTTP {head.status}.")

    def failed(self, error: Exception) -> SourceUnavailable:
        """Return the error for a connection that broke."""
        # Do not show h11's message about one of our headers: it quotes the header, which may have the token.
        why = "the request is not valid HTTP" if isinstance(error, h11.LocalProtocolError) else error
        return SourceUnavailable(f"{self.node.server} at {self.node.address.name[0]}: {why}.")

    def close(self) -> None:
        """Close the connections that are not in use. A connection in use is closed when its use ends."""
        self.idle.distrust()

    def _get(self, target: str) -> tuple[Wire, Exchange, Head]:
        kept = self.idle.take(self.node.server)
        if kept is not None:
            try:
                with _within(ANSWER_TIMEOUT_S, kept[0]):
                    return *kept, kept[1].request("GET", target, self._headers)
            except StaleError:
                # The node has just closed the kept connection, so send the request over a new one.
                kept[0].close()
            except (OSError, h11.ProtocolError) as error:
                kept[0].close()
                raise self.failed(error) from error
        wire = Wire(
            system_trust, _OneAddress(self.node.address),
            connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=SILENT_TIMEOUT_S, direct=True,
        )  # fmt: skip
        try:
            wire.connect(self.node.server)
            exchange = Exchange(wire)
            with _within(ANSWER_TIMEOUT_S, wire):
                return wire, exchange, exchange.request("GET", target, self._headers)
        except (OSError, h11.ProtocolError) as error:
            wire.close()
            raise self.failed(error) from error


@contextmanager
def _within(limit_s: float, wire: Wire) -> Iterator[None]:
    """Close `wire` if the block takes longer than `limit_s`. The socket's own timeout never expires if a peer sends byte by byte."""
    timer = threading.Timer(limit_s, wire.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
