"""Takes chunks of a snapshot from the nodes that are before this node in line (see `fetch_order`).

    peers = Peers(ServedChunks(tiers), PeerList(["http://pilotflame-peers:8601"]), token)
    with peers.joined(manifest, arrival, files) as joined:
        joined.take(targets, left_out, cancelled)

Chunks that `take` did not get must be fetched from the source. Within the block, other nodes can take landed chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ...errors import SourceDenied, SourceError, SourceUnavailable
from ..fetching.arrival import Arrival
from ..fetching.chunk_reuse import ChunkReuse
from ..fetching.landing import ShardTarget
from ..fetching.ranges import wanted_order
from ..format.manifest import Manifest
from .fetch_order import LineAnswer, ahead, next_number, ranked, to_ask_again
from .peer import Answer, Node, Peer, PeerList
from .served_chunks import FetchTicket, ServedChunks

LEAST_BYTES = 16 << 20
"""A smaller snapshot is fetched only from the source, because asking all nodes would take longer."""
ASK_TIMEOUT_S = 0.6
TAKERS = 8
"""The number of threads that take chunks. Each thread waits for one chunk."""
PATIENCE_S = 10.0
"""The period over which the rate at a peer is measured. If fewer than SLOWEST_BYTES_S bytes per second land there, this node
asks the peer no more."""
LEAST_WAIT_S = 0.5
"""Minimum time between two requests to a peer for the same chunk."""
SLOW_S = 2.0
SLOWEST_BYTES_S = 2e6
"""A chunk that has landed at a peer may take SLOW_S, plus its size divided by this rate."""
_MOST_THREADS = 32


class Peers:
    """The other nodes. If a node refuses the token, this object calls `on_refused` with a message. Thread-safe."""

    def __init__(
        self,
        served_chunks: ServedChunks,
        peer_list: PeerList,
        token: str,
        *,
        on_refused: Callable[[str], None],
    ) -> None:
        self._served_chunks, self._peer_list, self._token = served_chunks, peer_list, token
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self.taken_bytes = 0
        """The size of all chunks that this node has taken from other nodes."""

    def count(self, taken_bytes: int) -> None:
        with self._lock:
            self.taken_bytes += taken_bytes

    @contextmanager
    def joined(self, manifest: Manifest, arrival: Arrival, files: Path) -> Iterator[Joined]:
        """Join the line for a snapshot that is fetched to folder `files`. During the block, serve the landed chunks."""
        ticket = FetchTicket(manifest, arrival, files)
        # Exchange chunks only under a digest that includes the realm: only functions that may read the weights know this digest.
        known = bool(manifest.realm) and manifest.has_digests
        if not known or manifest.needed_bytes < LEAST_BYTES:
            yield Joined(self, ticket, {})
            return
        peers = {node: Peer(node, self._token) for node in self._peer_list.nodes()}
        try:
            with self._served_chunks.offered(ticket):
                yield Joined(self, ticket, self._choose(ticket, peers))
        finally:
            for peer in peers.values():
                peer.close()

    def _choose(self, ticket: FetchTicket, peers: Mapping[Node, Peer]) -> dict[str, Ahead]:
        """Choose a position in line. Return the nodes before this position, by their names."""
        key = ticket.key
        found = self._ask(key, peers, settled=False)
        own = ticket.choose(next_number(found.values()))
        found |= self._ask(key, {node: peers[node] for node in to_ask_again(found)}, settled=True)
        # Keep a node that is reached at several addresses only once.
        return {found[node].node: Ahead(peers[node], at.ticket) for node, at in ahead(own, found).items()}

    def _ask(self, key: str, peers: Mapping[Node, Peer], *, settled: bool) -> dict[Node, LineAnswer]:
        """Ask nodes for their positions in line. Avoid nodes that do not answer within ASK_TIMEOUT_S for a while."""
        if not peers:
            return {}
        pool = ThreadPoolExecutor(min(_MOST_THREADS, len(peers)), "ask-peers")
        try:
            asked = {
                node: pool.submit(peer.position_of, key, settled=settled) for node, peer in peers.items()
            }
        except RuntimeError:
            # The process may start no more threads. Fetch all chunks from the source.
            return {}
        finally:
            pool.shutdown(wait=False)
        wait(asked.values(), ASK_TIMEOUT_S)
        found = {}
        for node, answer in asked.items():
            if answer.cancel():
                # Do not avoid this node: the request was never sent, because there are more nodes than threads.
                continue
            try:
                told = answer.result(0)
            except (SourceError, TimeoutError) as error:
                if isinstance(error, SourceDenied):
                    self._on_refused(str(error))
                self._peer_list.avoid(node)
                continue
            if told.node == self._served_chunks.node:
                self._peer_list.is_own(node)
            else:
                found[node] = told
        return found


class Ahead(NamedTuple):
    """A node that is before this node in line, and the ticket of its fetch."""

    peer: Peer
    ticket: str


class Joined:
    """A fetch that is in line, behind the nodes `before`."""

    def __init__(self, peers: Peers, ticket: FetchTicket, before: Mapping[str, Ahead]) -> None:
        self._peers, self._ticket, self._ahead = peers, ticket, before
        self._lock = threading.Lock()
        self._left: set[str] = set()
        """The nodes that this fetch asks no more."""
        self._taken_bytes = 0

    def take(
        self, targets: Sequence[ShardTarget], left_out: Container[int], cancelled: threading.Event
    ) -> int:
        """Take every chunk that has not landed and is not in `left_out` from the nodes before this node.

        Block until each chunk has landed or cannot come from these nodes, or until `cancelled` is set. Return the
        number of bytes taken. Raise CacheError if a chunk cannot be written.
        """
        arrival = self._ticket.arrival
        if self._ahead:
            wanted = [chunk for chunk in wanted_order(self._ticket.manifest) if chunk not in left_out]
            missing = {
                chunk: _Remote(self, chunk, cancelled) for chunk in wanted if not arrival.landed(chunk)
            }
            try:
                with ChunkReuse(arrival, targets, missing, cancelled, TAKERS):
                    pass
            finally:
                self._peers.count(self._taken_bytes)
        return self._taken_bytes

    def copy(self, chunk: int, cancelled: threading.Event, receive: Callable[[Answer], str]) -> str:
        """Ask one node after another for a chunk. Return the chunk's digest, or "" if no node has sent the right bytes.

        `receive` reads a chunk from a node's answer and returns its digest.

        A node that fails, is too slow or sends wrong bytes is left out for the rest of this fetch.
        """
        key, wanted = self._ticket.key, self._ticket.arrival.chunks.digests[chunk]
        for node in ranked(self._ahead, key, chunk):
            if node in self._left or cancelled.is_set():
                continue
            peer, ticket = self._ahead[node]
            try:
                digest = _asked(peer, f"/v1/chunks/{key}/{ticket}/{chunk}", cancelled, receive)
            except SourceError:
                digest = ""
            with self._lock:
                if digest == wanted:
                    extent = self._ticket.arrival.chunks.extent(chunk)
                    self._taken_bytes += extent.end - extent.begin
                    return digest
                self._left.add(node)
        return ""


class _Remote(NamedTuple):
    """A Lender of one chunk, which nodes before this node may have."""

    joined: Joined
    chunk: int
    cancelled: threading.Event

    def copy(self, target: ShardTarget, begin: int, end: int, buffer: memoryview) -> str:
        def receive(answer: Answer) -> str:
            until_s = time.monotonic() + SLOW_S + (end - begin) / SLOWEST_BYTES_S

            def read(view: memoryview, _done: int) -> int:
                if time.monotonic() > until_s:
                    raise SourceUnavailable("The peer is slow.")
                return answer.read_into(view)

            return target.fill(begin, end, buffer, read) if answer.size_bytes == end - begin else ""

        return self.joined.copy(self.chunk, self.cancelled, receive)


def _asked(peer: Peer, target: str, cancelled: threading.Event, receive: Callable[[Answer], str]) -> str:
    """Ask a node repeatedly for a chunk, as long as other chunks land at the node. Return the result of `receive`.

    Raise SourceError if the node cannot send the chunk. Return "" if `cancelled` is set.
    """
    landed_bytes, since_s = 0, time.monotonic()
    while not cancelled.is_set():
        asked_s = time.monotonic()
        answer = peer.ask(target)
        try:
            if answer.head.status == 200:
                return receive(answer)
            answer.text()
        finally:
            answer.end()
        now_s = time.monotonic()
        if now_s - since_s > PATIENCE_S:
            if answer.landed_bytes - landed_bytes < SLOWEST_BYTES_S * PATIENCE_S:
                raise SourceUnavailable("Too little lands at the peer.")
            landed_bytes, since_s = answer.landed_bytes, now_s
        # A peer should wait before it answers that a chunk has not landed. Wait here too, in case the peer answers at once.
        cancelled.wait(asked_s + LEAST_WAIT_S - now_s)
    return ""
