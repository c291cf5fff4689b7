"""TLS as a client: pieces larger than a record, authorities that change, damage on the way."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trustme
from certificates import serving, trusting
from fault_server import Faults, FaultServer
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import SourceError, SourceUnavailable
from pilotflame.snapshot.sources import wire
from pilotflame.snapshot.sources.http import HttpConnection, HttpSource
from pilotflame.snapshot.sources.location import ServerAddress
from pilotflame.snapshot.sources.socket_stream import SocketStream
from pilotflame.snapshot.sources.tls import RECEIVED_AT_ONCE, TlsStream, system_trust

DATA = random.Random(5).randbytes(700_001)
NAME = "model.safetensors"
RECORD_BYTES = 16 << 10
AUTHORITY = trustme.CA()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TIMEOUT_S", 10.0)


def read(connection: HttpConnection, begin: int, end: int) -> bytes:
    connection.begin(NAME, begin, end)
    buffer = memoryview(bytearray(end - begin))
    done = 0
    while count := connection.read_into(buffer[done:]):
        done += count
    return bytes(buffer[:done])


@contextmanager
def tls_server(
    answer: Callable[[ssl.SSLSocket], None], context: ssl.SSLContext | None = None
) -> Iterator[ServerAddress]:
    """Accept connections one after another, and call `answer` with each once its handshake is done."""
    secret = context or serving(AUTHORITY)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain = listener.accept()[0]
            except OSError:
                return
            plain.settimeout(10)
            try:
                with secret.wrap_socket(plain, server_side=True) as peer:
                    answer(peer)
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ServerAddress("https", "127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        listener.close()


@contextmanager
def stream_to(address: ServerAddress, trust: ssl.SSLContext) -> Iterator[TlsStream]:
    with socket.create_connection((address.host, address.port), 10) as raw:
        stream = TlsStream(SocketStream(raw, 10.0), address, trust)
        stream.handshake(time.monotonic() + 10)
        yield stream


# -- bytes


def test_one_receive_takes_all_records_that_wait() -> None:
    sent = threading.Event()

    def answer(peer: ssl.SSLSocket) -> None:
        peer.sendall(DATA[: 8 * RECORD_BYTES])
        sent.set()
        peer.recv(1)

    view = memoryview(bytearray(RECEIVED_AT_ONCE))
    with tls_server(answer) as address, stream_to(address, trusting(AUTHORITY)) as stream:
        assert sent.wait(10)
        count = stream.receive(view, len(view))
        assert count > 4 * RECORD_BYTES
        assert view[:count] == DATA[:count]


@settings(max_examples=25, deadline=None)
@given(
    writes=st.lists(st.integers(1, 70_000), min_size=1, max_size=8),
    limits=st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
    gather=st.booleans(),
)
def test_bytes_come_in_order_however_they_are_cut(writes: list[int], limits: list[int], gather: bool) -> None:
    total = sum(writes)

    def send(peer: ssl.SSLSocket) -> None:
        at = 0
        for count in writes:
            peer.sendall(DATA[at : at + count])
            at += count
        peer.unwrap()

    memory = bytearray(b"\xaa" * 300_010)
    found, turn = bytearray(), 0
    with tls_server(send) as address, stream_to(address, TRUST) as stream:
        while True:
            limit = limits[turn % len(limits)]
            count = stream.receive(memoryview(memory)[:limit], limit, gather=gather)
            if count == 0:
                break
            assert count <= limit
            found += memory[:count]
            turn += 1
        assert stream.idle
    assert found == DATA[:total]
    assert memory[300_000:] == b"\xaa" * 10


TRUST = trusting(AUTHORITY)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(short_share=1), "the connection was closed"),
        (Faults(reset_share=1), "reset|closed|EOF"),
        (Faults(chunked=True, short_share=1), "bytes 1000 to 700000"),
        (Faults(busy_share=1), "HTTP 503"),
    ],
)
def test_failures_heal_on_the_same_connection(faults: Faults, words: str) -> None:
    with (
        FaultServer({NAME: DATA}, ssl_context=serving(AUTHORITY)) as server,
        closing(HttpSource(server.url, ssl_context=trusting(AUTHORITY)).connect()) as connection,
    ):
        server.faults = faults
        with pytest.raises(SourceUnavailable, match=words):
            read(connection, 1000, 700_000)
        server.faults = Faults()
        assert read(connection, 1000, 700_000) == DATA[1000:700_000]


def test_bytes_behind_an_answer_are_not_taken_for_the_next_one() -> None:
    with (
        FaultServer({NAME: DATA}, Faults(duplicate_share=1), ssl_context=serving(AUTHORITY)) as server,
        closing(HttpSource(server.url, ssl_context=trusting(AUTHORITY)).connect()) as connection,
    ):
        for begin in (0, 200_000, 400_000, 5, 7):
            try:
                found = read(connection, begin, begin + 100_000)
            except SourceUnavailable:
                found = read(connection, begin, begin + 100_000)
            assert found == DATA[begin : begin + 100_000]


@contextmanager
def flipping(target: str, flip_at: int) -> Iterator[str]:
    """Relay the first connection to `target`, and flip one bit in byte `flip_at` of the target's answers. Yield the URL of the relay."""
    port = int(target.rpartition(":")[2])
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(one: socket.socket, other: socket.socket, flip: int | None) -> None:
        at = 0
        try:
            while data := bytearray(one.recv(65536)):
                if flip is not None and at <= flip < at + len(data):
                    data[flip - at] ^= 1
                at += len(data)
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def serve() -> None:
        with listener.accept()[0] as peer, socket.create_connection(("127.0.0.1", port)) as there:
            up = threading.Thread(target=pump, args=(peer, there, None))
            up.start()
            pump(there, peer, flip_at)
            up.join(10)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(20)
        listener.close()


def test_a_bit_that_was_flipped_on_the_way_never_reaches_the_caller() -> None:
    view = memoryview(bytearray(len(DATA)))
    with (
        FaultServer({NAME: DATA}, ssl_context=serving(AUTHORITY)) as server,
        flipping(server.url, 300_000) as url,
        closing(HttpSource(url, ssl_context=trusting(AUTHORITY)).connect()) as connection,
    ):
        connection.begin(NAME, 0, len(DATA))
        done = 0

        def drain() -> None:
            nonlocal done
            while count := connection.read_into(view[done:]):
                done += count

        with pytest.raises(SourceUnavailable, match=r"(?i)bad record mac|decryption failed"):
            drain()
        assert view[:done] == DATA[:done]
        assert done < 300_000


# -- authorities


def test_the_authorities_of_one_source_do_not_let_another_trust_the_server() -> None:
    with FaultServer({NAME: DATA}, ssl_context=serving(AUTHORITY)) as server:
        source = HttpSource(server.url, ssl_context=trusting(AUTHORITY))
        with closing(source.connect()) as connection:
            assert read(connection, 0, 10) == DATA[:10]
        with (
            closing(HttpSource(server.url).connect()) as connection,
            pytest.raises(SourceError, match="not trusted"),
        ):
            read(connection, 0, 10)


def test_sources_share_the_authorities_until_their_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "authorities.pem"
    trustme.CA().cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    with FaultServer({NAME: DATA}, ssl_context=serving(AUTHORITY)) as server:
        with pytest.raises(SourceError, match="not trusted"):
            HttpSource(server.url).stat(NAME)
        before = system_trust()
        assert system_trust() is before
        AUTHORITY.cert_pem.write_to_path(str(bundle), append=True)
        assert HttpSource(server.url).stat(NAME).size_bytes == len(DATA)
        assert system_trust() is not before
        assert system_trust(str(bundle)) is not system_trust()
    with pytest.raises(FileNotFoundError):
        system_trust(str(tmp_path / "none.pem"))


def test_a_source_that_is_prepared_has_loaded_the_authorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "authorities.pem"
    AUTHORITY.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    loaded: list[object] = []
    real = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: loaded.append(given) or real(**given))
    HttpSource("http://127.0.0.1/weights").prepare()
    assert loaded == []
    HttpSource("https://127.0.0.1/weights").prepare()
    assert len(loaded) == 1
    system_trust()
    assert len(loaded) == 1
