"""Nodes take chunks from each other, over real sockets. A bucket counts what it serves, and some peers fail or lie."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count as counting
from pathlib import Path
from typing import Any

import pytest
import trustme
from fault_server import FaultServer
from pilotflame.errors import CacheError, Cancelled, SourceMissing, SourceUnavailable
from pilotflame.snapshot.caching.cache import Cache, Lease
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.digests import ALGORITHMS, AlgorithmName
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.peering import peers as peering
from pilotflame.snapshot.peering.chunk_server import ChunkServer, listening
from pilotflame.snapshot.peering.peer import PeerList
from pilotflame.snapshot.peering.peers import Peers
from pilotflame.snapshot.peering.served_chunks import ServedChunks
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.source import Source
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, check, make

TOKEN = "the token of the cluster"
REALM, OTHER_REALM = "a" * 64, "b" * 64


class Node:
    """A node's cache, which serves chunks on a port of its own."""

    def __init__(self, folder: Path, token: str = TOKEN, **how: Any) -> None:
        self.tier, self.token = Tier(folder, 1 << 30), token
        self.served_chunks = ServedChunks([self.tier])
        sock = listening("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.server = ChunkServer(sock, self.served_chunks, token, **how)
        self.server.start()
        self.peers: Peers | None = None
        self.refused: list[str] = []

    def meet(self, urls: list[str]) -> None:
        self.peers = Peers(self.served_chunks, PeerList(urls), self.token, on_refused=self.refused.append)

    def open(self, manifest: Manifest, source: Source) -> Lease:
        return Cache([self.tier], self.peers).open(manifest, source, tee=False)

    def fetch(self, manifest: Manifest, source: Source) -> tuple[int, int]:
        """Fetch a snapshot. Return how many bytes came from the source, and how many from other nodes."""
        with self.open(manifest, source) as lease:
            lease.wait(LIMIT_S)
            assert lease.stats is not None
            return lease.stats.fetched_bytes, lease.stats.taken_bytes

    def ask(self, target: str, token: str = TOKEN, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, target, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


Nodes = Callable[..., list[Node]]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Return a function that makes nodes. Each node knows the URLs of all nodes, also its own. Small snapshots are taken, too."""
    monkeypatch.setattr(peering, "LEAST_BYTES", 0)
    with ExitStack() as opened:

        def made(count: int, **how: Any) -> list[Node]:
            found = [Node(tmp_path / f"node{index}", **how) for index in range(count)]
            for node in found:
                opened.callback(node.server.close)
                node.meet([f"http://127.0.0.1:{other.port}" for other in found])
            return found

        yield made


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path / "weights", make(tmp_path / "weights").with_realm(REALM)


def test_of_nodes_that_begin_at_once_one_asks_the_bucket(
    nodes: Nodes, weights: tuple[Path, Manifest]
) -> None:
    folder, manifest = weights
    cluster, begin = nodes(3), threading.Barrier(3)
    with FaultServer(folder, total_bytes_per_s=20e6) as bucket, ThreadPoolExecutor() as pool:

        def fetch(node: Node) -> tuple[int, int]:
            begin.wait(LIMIT_S)
            return node.fetch(manifest, HttpSource(bucket.url))

        found = sorted(pool.map(fetch, cluster))
        sent_bytes = sum(request.sent for request in bucket.requests)
    assert found == [(0, manifest.total_bytes)] * 2 + [(manifest.total_bytes, 0)]
    assert sent_bytes < 1.9 * manifest.total_bytes
    for node in cluster:
        check(node.tier.folder(manifest.digest) / "files", folder)
    assert sum(node.server.served_bytes for node in cluster) == 2 * manifest.total_bytes


def test_chunks_are_given_while_the_others_still_arrive(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    first, second = nodes(2)
    bucket = Stopping(folder, stop_at=5 * CHUNK_BYTES)
    with first.open(manifest, bucket) as leading:
        leading.arrival.wait(0, 3, LIMIT_S)
        with second.open(manifest, Stopping(folder, stop_at=0)) as following:
            following.arrival.wait(0, 3, LIMIT_S)
            assert not following.arrival.complete
            bucket.go()
            following.wait(LIMIT_S)
            check(following.root, folder)
            assert following.stats is not None
            assert following.stats.taken_bytes == manifest.total_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_comes_later_asks_no_bucket(nodes: Nodes, tmp_path: Path, algorithm: AlgorithmName) -> None:
    folder = tmp_path / "weights"
    manifest = make(folder, algorithm=algorithm).with_realm(REALM)
    first, second, third = nodes(3)
    first.fetch(manifest, Stopping(folder))
    denying = Stopping(folder, stop_at=0)
    for node in (second, third):
        assert node.fetch(manifest, denying) == (0, manifest.total_bytes)
        check(node.tier.folder(manifest.digest) / "files", folder)
    # The third node has taken chunks from both other nodes.
    assert first.server.served_bytes > manifest.total_bytes
    assert second.server.served_bytes > 0


@pytest.mark.parametrize("gone", ["the node", "its bucket"])
def test_without_a_node_that_fetched_the_rest_comes_from_the_bucket(
    nodes: Nodes, weights: tuple[Path, Manifest], gone: str
) -> None:
    folder, manifest = weights
    first, second = nodes(2)
    bucket = Stopping(folder, stop_at=5 * CHUNK_BYTES)
    with first.open(manifest, bucket) as leading:
        leading.arrival.wait(0, 3, LIMIT_S)
        with second.open(manifest, Stopping(folder)) as following:
            following.arrival.wait(0, 3, LIMIT_S)
            if gone == "the node":
                first.server.close()
            else:
                bucket.deny()
            following.wait(LIMIT_S)
            check(following.root, folder)
            assert following.stats is not None
            assert 0 < following.stats.fetched_bytes < manifest.total_bytes
        bucket.go()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_wrong_bytes_are_found_and_their_node_is_left_alone(
    nodes: Nodes, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    folder = tmp_path / "weights"
    manifest = make(folder, algorithm=algorithm).with_realm(REALM)
    first, second = nodes(2)
    first.fetch(manifest, Stopping(folder))
    stored = first.tier.folder(manifest.digest) / "files" / "model.safetensors"
    stored.write_bytes(bytes(byte ^ 1 for byte in stored.read_bytes()))
    assert second.fetch(manifest, Stopping(folder)) == (manifest.total_bytes, 0)
    check(second.tier.folder(manifest.digest) / "files", folder)
    assert first.server.served_bytes <= peering.TAKERS * CHUNK_BYTES


def test_a_truncated_file_ends_no_fetch(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    first, second = nodes(2)
    first.fetch(manifest, Stopping(folder))
    stored = first.tier.folder(manifest.digest) / "files" / "model.safetensors"
    stored.write_bytes(stored.read_bytes()[: 3 * CHUNK_BYTES + 5])
    with pytest.raises(http.client.IncompleteRead):
        first.ask(f"/v1/chunks/{manifest.digest}/whole/3")
    fetched_bytes, taken_bytes = second.fetch(manifest, Stopping(folder))
    assert fetched_bytes + taken_bytes == manifest.total_bytes
    check(second.tier.folder(manifest.digest) / "files", folder)


def test_without_the_token_nothing_is_told(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    (node,) = nodes(1)
    node.fetch(manifest, Stopping(folder))
    key = manifest.digest
    there = [f"/v1/line/{key}", f"/v1/chunks/{key}/whole/0"]
    others = [f"/v1/line/{'0' * 64}", f"/v1/chunks/{'0' * 64}/whole/0", "/", "/nothing"]
    for token in ("", "another token", TOKEN[:-1], f"{TOKEN}!", "ü"):
        answers = {node.ask(target, token.encode().decode("latin-1")) for target in there + others}
        assert answers == {(401, b"{}")}
    assert node.server.served_bytes == 0
    assert [node.ask(target)[0] for target in there + others] == [200, 200, 200, 404, 404, 404]


def test_a_node_with_another_token_asks_the_bucket_and_says_why(
    nodes: Nodes, weights: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = weights
    (first,) = nodes(1)
    first.fetch(manifest, Stopping(folder))
    stranger = Node(tmp_path / "stranger", "another token")
    stranger.meet([f"http://127.0.0.1:{first.port}"])
    assert stranger.fetch(manifest, Stopping(folder)) == (manifest.total_bytes, 0)
    stranger.server.close()
    assert first.server.served_bytes == 0
    assert "PILOTFLAME_PEERS_TOKEN" in stranger.refused[0]
    assert "another token" not in stranger.refused[0]


@pytest.mark.parametrize(
    "target",
    [
        "/v1/chunks/{key}/whole/99999999999999",
        "/v1/chunks/{key}/whole/-1",
        "/v1/chunks/{key}/whole/0/..",
        "/v1/chunks/{key}/" + "0" * 32 + "/900",
        "/v1/chunks/../../../../etc/passwd/whole/0",
        "/v1/chunks/..%2f..%2fetc/whole/0",
        "/v1/line",
        "/v1/chunks/" + "0" * 64 + "/whole/0",
    ],
)
def test_what_is_not_there_is_not_found(nodes: Nodes, weights: tuple[Path, Manifest], target: str) -> None:
    folder, manifest = weights
    (node,) = nodes(1)
    node.fetch(manifest, Stopping(folder))
    assert node.ask(target.format(key=manifest.digest)) == (404, b"{}")


def test_a_stranger_takes_little_memory_and_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotflame.snapshot.peering.chunk_server.HEAD_TIMEOUT_S", 0.3)
    (node,) = nodes(1)
    address = ("127.0.0.1", node.port)
    for head in (b"GET / HTTP/1.1\r\nA: " + b"x" * 9000, b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 2000, b"G"):
        with socket.create_connection(address, LIMIT_S) as stranger, suppress(ConnectionError):
            stranger.sendall(head)
            assert stranger.recv(10) in {b"", b"HTTP/1.1 4"}


def test_a_server_without_threads_to_be_had_serves_later(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = nodes(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        address = ("127.0.0.1", node.port)
        with socket.create_connection(address, LIMIT_S) as refused, suppress(ConnectionError):
            assert refused.recv(10) == b""
    assert node.ask(f"/v1/line/{'0' * 64}")[0] == 200


def test_the_end_of_a_server_ends_a_connection_that_is_being_opened(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotflame.snapshot.peering.chunk_server.HEAD_TIMEOUT_S", 10 * LIMIT_S)
    begun, closed, secured = threading.Event(), threading.Event(), ChunkServer._secured

    def late(server: ChunkServer, connection: socket.socket) -> socket.socket:
        begun.set()
        assert closed.wait(LIMIT_S)
        return secured(server, connection)

    monkeypatch.setattr(ChunkServer, "_secured", late)
    (node,) = nodes(1)
    with socket.create_connection(("127.0.0.1", node.port), LIMIT_S) as client:
        assert begun.wait(LIMIT_S)
        node.server.close()
        closed.set()
        assert client.recv(1) == b""


def _no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_is_served_is_not_evicted(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    (node,) = nodes(1)
    node.fetch(manifest, Stopping(folder))
    with node.served_chunks.lent(manifest.digest, "whole", 1), pytest.raises(CacheError):
        node.tier.evict(manifest.digest)
    node.tier.evict(manifest.digest)
    with pytest.raises(SourceMissing), node.served_chunks.lent(manifest.digest, "whole", 1):
        pass


def test_a_chunk_that_has_not_landed_is_not_lent(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    (node,) = nodes(1)
    with node.open(manifest, Stopping(folder, stop_at=5 * CHUNK_BYTES)) as lease:
        lease.arrival.wait(0, 3, LIMIT_S)
        position = node.served_chunks.position_of(manifest.digest, settled=True).position
        assert position is not None
        status, body = node.ask(f"/v1/chunks/{manifest.digest}/{position.ticket}/2")
        assert (status, body) == (
            200,
            (folder / "model.safetensors").read_bytes()[2 * CHUNK_BYTES : 3 * CHUNK_BYTES],
        )
        demanded: list[tuple[int, int]] = []
        lease.arrival.on_demand(lambda *chunks: demanded.append(chunks))
        with pytest.raises(SourceUnavailable), node.served_chunks.lent(manifest.digest, position.ticket, 9):
            pass
        # A request of a peer is not a demand: only the node's own workers decide which chunk is fetched next.
        assert demanded == []
        assert node.ask(f"/v1/chunks/{manifest.digest}/whole/2")[0] == 404
    assert node.ask(f"/v1/chunks/{manifest.digest}/{position.ticket}/2")[0] == 404


def test_weights_whose_digests_are_not_known_come_from_the_bucket(
    nodes: Nodes, weights: tuple[Path, Manifest]
) -> None:
    folder, _ = weights
    (folder / MANIFEST_NAME).unlink()
    first, second = nodes(2)
    with FaultServer(folder) as bucket:
        manifest = find_manifest(HttpSource(bucket.url)).with_realm(REALM)
        for node in (first, second):
            assert node.fetch(manifest, HttpSource(bucket.url)) == (manifest.total_bytes, 0)


@pytest.mark.parametrize("realm", [OTHER_REALM, ""])
def test_another_realm_gets_no_bytes_of_equal_weights(
    nodes: Nodes, weights: tuple[Path, Manifest], realm: str
) -> None:
    folder, manifest = weights
    other = manifest.with_realm(realm)
    first, second = nodes(2)
    with first.open(manifest, Stopping(folder, stop_at=5 * CHUNK_BYTES)) as lease:
        lease.arrival.wait(0, 3, LIMIT_S)
        assert second.fetch(other, Stopping(folder)) == (manifest.total_bytes, 0)
        # With the ticket of the fetch, the other realm gets no bytes either.
        position = first.served_chunks.position_of(manifest.digest, settled=True).position
        assert position is not None
        assert first.ask(f"/v1/chunks/{other.digest}/{position.ticket}/0")[0] == 404
    assert second.ask(f"/v1/chunks/{manifest.digest}/whole/0")[0] == 404
    assert first.server.served_bytes == 0


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen in place of a peer. Yield the URL, and call `answer` with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as opened:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                opened.callback(connection.close)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def says(line: bytes, chunk: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        try:
            while text := connection.recv(4096):
                connection.sendall(line if b"/v1/line/" in text else chunk)
        except OSError:
            pass

    return answer


def trickles(connection: socket.socket) -> None:
    """Send a chunk at 50 bytes a second."""
    with suppress(OSError):
        while b"/v1/line/" in connection.recv(4096):
            connection.sendall(IN_LINE)
        connection.sendall(response(200, b"", CHUNK_BYTES))
        while not threading.Event().wait(0.02):
            connection.sendall(b"x")


def trickles_a_head(connection: socket.socket) -> None:
    """Send the head of an answer with a chunk at 50 bytes a second, without end."""
    with suppress(OSError):
        while b"/v1/line/" in connection.recv(4096):
            connection.sendall(IN_LINE)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not threading.Event().wait(0.02):
            connection.sendall(b"x")


def boasts(connection: socket.socket) -> None:
    """Answer each request for a chunk with 503, and claim each time that one more byte has landed."""
    with suppress(OSError):
        for landed_bytes in counting(1):
            asked = connection.recv(4096)
            if not asked:
                return
            told = response(503, b"", more=f"Pilotflame-Landed-Bytes: {landed_bytes}\r\n")
            connection.sendall(IN_LINE if b"/v1/line/" in asked else told)


def response(status: int, body: bytes, size: int | None = None, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status} x\r\nContent-Length: {len(body) if size is None else size}\r\n{more}\r\n".encode()
        + body
    )


IN_LINE = response(200, b'{"node": "n", "number": 0, "ticket": "whole", "choosing": false}')
OTHERS = {
    "silent": says(b"", b""),
    "no HTTP": says(b"SSH-2.0\r\n\r\n", b""),
    "no JSON": says(response(200, b"hello"), b""),
    "no place": says(response(200, b'{"node": "n", "number": -5, "ticket": "x", "choosing": false}'), b""),
    "too much": says(response(200, b" " * 9000), b""),
    "gone": says(IN_LINE, response(404, b"")),
    "longer": says(IN_LINE, response(200, b"x" * (CHUNK_BYTES + 1))),
    "shorter": says(IN_LINE, response(200, b"x")),
    "silent in a chunk": says(IN_LINE, response(200, b"x", CHUNK_BYTES)),
    "slow": trickles,
    "slow head": trickles_a_head,
    "one byte more": boasts,
    "never": says(IN_LINE, response(503, b"", more="Pilotflame-Landed-Bytes: 5\r\n")),
    "redirect": says(IN_LINE, response(302, b"", more="Location: http://127.0.0.1:1/\r\n")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_something_else_that_listens_there_ends_no_fetch(
    nodes: Nodes, weights: tuple[Path, Manifest], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = weights
    (node,) = nodes(1)
    monkeypatch.setattr(peering, "PATIENCE_S", 0.1)
    monkeypatch.setattr(peering, "SLOW_S", 0.1)
    monkeypatch.setattr(peering, "LEAST_WAIT_S", 0.02)
    monkeypatch.setattr("pilotflame.snapshot.peering.peer.SILENT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("pilotflame.snapshot.peering.peer.ANSWER_TIMEOUT_S", 0.4)
    with answering(OTHERS[what]) as url:
        node.meet([url])
        assert node.fetch(manifest, Stopping(folder)) == (manifest.total_bytes, 0)
    check(node.tier.folder(manifest.digest) / "files", folder)


def test_a_fetch_is_closed_while_it_waits_for_a_peer(nodes: Nodes, weights: tuple[Path, Manifest]) -> None:
    folder, manifest = weights
    first, second = nodes(2)
    bucket = Stopping(folder, stop_at=5 * CHUNK_BYTES)
    with first.open(manifest, bucket) as leading:
        leading.arrival.wait(0, 3, LIMIT_S)
        following = second.open(manifest, Stopping(folder, stop_at=0))
        following.arrival.wait(0, 3, LIMIT_S)
        following.close()
        with pytest.raises(Cancelled):
            following.wait(LIMIT_S)
        bucket.go()


def test_chunks_go_over_tls_to_those_who_trust_the_certificate(
    nodes: Nodes, weights: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = weights
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain, key, trusted = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "authority.pem"
    issued.private_key_pem.write_to_path(key)
    for pem in issued.cert_chain_pems:
        pem.write_to_path(chain, append=True)
    authority.cert_pem.write_to_path(trusted)
    first, second, third = nodes(3, certificate=(chain, key))
    first.fetch(manifest, Stopping(folder))
    for node in (second, third):
        node.meet([f"https://127.0.0.1:{first.port}"])
    assert second.fetch(manifest, Stopping(folder)) == (manifest.total_bytes, 0)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    assert third.fetch(manifest, Stopping(folder)) == (0, manifest.total_bytes)
    check(third.tier.folder(manifest.digest) / "files", folder)
