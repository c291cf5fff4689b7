"""HTTP as a source: ranges into memory, wrong responses, redirects, TLS, credentials that are never shown."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from certificates import serving, trusting
from fault_server import Faults, FaultServer
from pilotflame.errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from pilotflame.snapshot.sources import wire
from pilotflame.snapshot.sources.access import Access
from pilotflame.snapshot.sources.http import HttpConnection, HttpSource
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.source import read_all
from pilotflame.snapshot.sources.variables import TOKEN_VARIABLE
from source_tests import OBJECTS, SourceTests, connected
from source_tests import read_range as read

DATA = random.Random(3).randbytes(1 << 20)
NAME = "model.safetensors"
FILES = {NAME: DATA, "empty": b"", "sub/ä b+c%.bin": b"0123456789"}


def read_once(server: FaultServer, begin: int = 1000, end: int = 700_000, version: str = "") -> bytes:
    with connected(HttpSource(server.url)) as connection:
        return read(connection, begin, end, version)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TIMEOUT_S", 5.0)


@pytest.fixture(scope="module")
def plain() -> Iterator[FaultServer]:
    """A server without faults."""
    with FaultServer(FILES) as server:
        yield server


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A server whose faults the test sets."""
    with FaultServer(FILES) as found:
        yield found


# -- reading


class TestHttpSource(SourceTests):
    @pytest.fixture
    def source(self, server: FaultServer) -> HttpSource:
        server.content = OBJECTS
        return HttpSource(server.url)


def test_stat_asks_for_one_byte_and_remembers(server: FaultServer) -> None:
    source = HttpSource(server.url)
    info = source.stat(NAME)
    assert (info.size_bytes, info.version) == (len(DATA), '"v0"')
    assert source.stat(NAME) == info
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-0"]
    assert source.stat("empty").size_bytes == 0
    assert source.read_into("empty", 0, memoryview(bytearray(4))) == 0


def test_names_are_encoded_and_a_query_of_the_base_is_kept(plain: FaultServer) -> None:
    source, buffer = HttpSource(f"{plain.url}/sub?token=hush&x=1"), bytearray(4)
    assert source.read_into("ä b+c%.bin", 3, memoryview(buffer)) == 4
    assert buffer == b"3456"
    assert plain.requests[-1].target == "/sub/%C3%A4%20b%2Bc%25.bin?token=hush&x=1"
    assert source.url == f"{plain.url}/sub"


@pytest.mark.parametrize("name", ["../x", "/x", "", "a//b", "a\nb"])
def test_names_that_lead_out_are_refused_unasked(plain: FaultServer, name: str) -> None:
    asked = len(plain.requests)
    with pytest.raises(SourceMissing, match="not a name below"):
        HttpSource(plain.url).stat(name)
    assert len(plain.requests) == asked


def test_a_tag_or_a_date_is_compared_and_no_condition_sent(server: FaultServer) -> None:
    """The source sends no If-Match, which some servers refuse. It compares the version of the answer instead."""
    for etag in ("strong", "weak", None):
        server.faults = Faults(etag=etag)
        source = HttpSource(server.url)
        version = source.stat(NAME).version
        assert version
        with connected(source) as connection:
            assert read(connection, 5, 50, version) == DATA[5:50]
            assert "if-match" not in server.requests[-1].headers
            server.faults = Faults(etag=etag, changed_from=0)
            with pytest.raises(SnapshotChanged, match=NAME) as caught:
                connection.begin(NAME, 5, 50, version)
        assert caught.value.details == {"object": NAME}
        assert source.stat(NAME).version != version, "it is remembered although it changed"


def test_an_object_of_another_size_has_changed(server: FaultServer) -> None:
    source = HttpSource(server.url)
    source.stat(NAME)
    server.content = {NAME: DATA[:-1]}
    with (
        connected(source) as connection,
        pytest.raises(SnapshotChanged, match="1048575 bytes, and had 1048576"),
    ):
        connection.begin(NAME, 0, 10)
    with connected(source) as connection, pytest.raises(SnapshotChanged, match="shorter"):
        connection.begin(NAME, len(DATA) + 5, len(DATA) + 10)


# -- wrong responses


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(wrong_range_share=1), "bytes 1000 to 700000: the response is another range, bytes 999 to 699999"),
        (Faults(short_share=1), "bytes 1000 to 700000: the connection was closed"),
        (Faults(reset_share=1), "bytes 1000 to 700000: Connection reset"),
        (Faults(chunked=True, short_share=1), "bytes 1000 to 700000: peer"),
        (Faults(chunked=True, reset_share=1), "bytes 1000 to 700000: Connection reset"),
        (Faults(busy_share=1), "HTTP 503"),
        (Faults(busy_share=1, busy_status=429), "HTTP 429"),
        (Faults(status=408), "HTTP 408"),
        (Faults(status=500, body="x" * 200_000), "HTTP 500"),
    ],
)  # fmt: skip
def test_what_may_pass_is_unavailable_and_heals_on_the_same_connection(
    server: FaultServer, faults: Faults, words: str
) -> None:
    with connected(HttpSource(server.url)) as connection:
        server.faults = faults
        with pytest.raises(SourceUnavailable, match=words) as caught:
            read(connection, 1000, 700_000)
        assert NAME in caught.value.message
        assert caught.value.details["object"] == NAME
        server.faults = Faults()
        assert read(connection, 1000, 700_000) == DATA[1000:700_000]


def test_a_response_sent_twice_is_not_taken_for_the_next_one(server: FaultServer) -> None:
    server.faults = Faults(duplicate_share=1)
    refused = []
    with connected(HttpSource(server.url)) as connection:
        for begin, size in [
            *((at, 1000) for at in range(0, 50_000, 10_000)),
            (0, 400_000),
            (100_000, 400_000),
        ]:
            try:
                data = read(connection, begin, begin + size)
            except SourceUnavailable as error:
                # The second copy of an earlier answer arrived after this request was sent, so the source refused it.
                refused.append(error.message)
                data = read(connection, begin, begin + size)
            assert data == DATA[begin : begin + size]
    assert all("another range" in message for message in refused)


def test_chunked_responses_are_decoded(server: FaultServer) -> None:
    server.faults = Faults(chunked=True)
    assert read_once(server) == DATA[1000:700_000]


def test_closing_after_each_response_is_no_failure(server: FaultServer) -> None:
    for said in (True, False):
        server.faults = Faults(close_each=True, close_said=said)
        with connected(HttpSource(server.url)) as connection:
            for begin in range(0, 5000, 1000):
                assert read(connection, begin, begin + 900) == DATA[begin : begin + 900]
    assert server.connections == 10


def test_retry_after_is_seconds_or_a_date(server: FaultServer) -> None:
    for text, wanted in (("7", 7.0), ("Thu, 01 Jan 2015 00:00:00 GMT", 0.0), ("soon", None), ("-3", None)):
        server.faults = Faults(busy_share=1, retry_after=text)
        with pytest.raises(SourceUnavailable) as caught:
            read_once(server)
        assert caught.value.retry_after_s == wanted


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, SourceMissing),
        (410, SourceMissing),
        (401, SourceDenied),
        (403, SourceDenied),
        (412, SourceError),
    ],
)
def test_statuses_become_errors(server: FaultServer, status: int, error: type[PilotflameError]) -> None:
    server.faults = Faults(status=status, body="no")
    with pytest.raises(error, match=NAME):
        read_once(server)
    assert len(server.requests) == 1


def test_an_unexpected_response_is_an_error(server: FaultServer) -> None:
    server.faults = Faults(status=418)
    with pytest.raises(SourceError, match="HTTP 418"):
        read_once(server)
    server.faults = Faults(headers={"Content-Encoding": "gzip"})
    with pytest.raises(SourceError, match="Content-Encoding gzip"):
        read_once(server)


def test_a_server_without_ranges_serves_whole_objects_only(server: FaultServer) -> None:
    server.faults = Faults(ranges=False)
    assert HttpSource(server.url).stat(NAME).size_bytes == len(DATA)
    assert read_once(server, 0, len(DATA)) == DATA
    with pytest.raises(SourceError, match="not served in ranges") as caught:
        read_once(server, 0, 500)
    assert "Range" in caught.value.remedy
    assert not isinstance(caught.value, SourceUnavailable)


def test_a_page_in_place_of_a_file_is_named(server: FaultServer) -> None:
    server.faults = Faults(ranges=False, headers={"Content-Type": "text/html; charset=utf-8"})
    with pytest.raises(SourceError, match="the response is a page of HTML") as caught:
        read_once(server, 0, 8)
    assert "log in" in caught.value.remedy


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 206 -\r\nContent-Length: 9, 10\r\n\r\n",
        b"HTTP/1.1 206 -\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 206 -\r\nContent-Range: bytes 0-8/9\r\nContent-Length: 4\r\n\r\n1234",
        b"HTTP/1.1 206 -\r\nContent-Range: bytes 0-8\r\nContent-Length: 9\r\n\r\n123456789",
        b"",
    ],
)
def test_a_malformed_response_is_unavailable(answer: bytes) -> None:
    with (
        scripted(lambda peer: peer.sendall(answer)) as url,
        connected(HttpSource(url)) as connection,
        pytest.raises(SourceUnavailable, match="bytes 0 to 9"),
    ):
        read(connection, 0, 9)


def test_early_hints_are_passed_over() -> None:
    answer = b"HTTP/1.1 103 -\r\nLink: x\r\n\r\nHTTP/1.1 206 -\r\nContent-Range: bytes 0-8/9\r\n\r\n123456789"
    with scripted(lambda peer: peer.sendall(answer)) as url, connected(HttpSource(url)) as connection:
        # Without a length, the body ends with the connection.
        assert read(connection, 0, 9) == b"123456789"


# -- waiting and closing


def test_what_has_come_is_handed_over_while_the_rest_is_late(server: FaultServer) -> None:
    server.faults = Faults(stall_share=1, stall_s=60, stall_at=50_000)
    buffer = memoryview(bytearray(100_000))
    with connected(HttpSource(server.url)) as connection:
        connection.begin(NAME, 0, 100_000)
        done = 0
        while done < 50_000:
            done += connection.read_into(buffer[done:])
    assert bytes(buffer[:done]) == DATA[:50_000]


def test_all_reading_ends_at_the_time_that_the_access_has(tmp_path: Path) -> None:
    """This holds also for a server that is never silent. After that time, the source makes no further attempts."""
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    with FaultServer(tmp_path, Faults(bytes_per_s=2000)) as slow:
        begun_s = time.monotonic()
        source = HttpSource(slow.url, access=Access(until_s=begun_s + 0.5))
        assert source.stat("large").size_bytes == 1 << 20
        with pytest.raises(SourceError, match="is read too slowly") as caught:
            read_all(source, "large", 1 << 20)
        assert not isinstance(caught.value, SourceUnavailable)
        with pytest.raises(SourceError, match="is read too slowly"):
            source.connect().begin("large", 0, 9)
        assert time.monotonic() - begun_s < 20


def test_a_timeout_is_unavailable(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TIMEOUT_S", 0.2)
    for stall_at in (None, 50_000):
        server.faults = Faults(stall_share=1, stall_s=60, stall_at=stall_at)
        with (
            connected(HttpSource(server.url)) as connection,
            pytest.raises(SourceUnavailable, match="timed out"),
        ):
            read(connection, 0, 100_000)


def test_a_refused_connection_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with connected(HttpSource(url)) as connection, pytest.raises(SourceUnavailable, match="refused"):
        connection.begin(NAME, 0, 1)


@pytest.mark.parametrize("stall_at", [None, 50_000])
@pytest.mark.parametrize("tls", [False, True])
def test_close_ends_a_read_that_waits_in_another_thread(stall_at: int | None, tls: bool) -> None:
    authority = trustme.CA()
    faults = Faults(stall_share=1, stall_s=60, stall_at=stall_at)
    with FaultServer(FILES, faults, ssl_context=serving(authority) if tls else None) as server:
        connection = HttpSource(server.url, ssl_context=trusting(authority)).connect()
        caught, began = [], threading.Event()

        def wait() -> None:
            try:
                began.set()
                read(connection, 0, 100_000)
            except SourceUnavailable as error:
                caught.append(error)

        reader = threading.Thread(target=wait)
        reader.start()
        began.wait(10)
        while not server.requests and reader.is_alive():
            threading.Event().wait(0.005)
        connection.close()
        connection.close()
        reader.join(10)
        assert not reader.is_alive()
        assert len(caught) == 1
        with pytest.raises(SourceUnavailable, match="closed"):
            connection.begin(NAME, 0, 1)


def descriptors() -> int:
    # Collect the garbage of earlier tests, which may keep descriptors open.
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_close_at_any_moment_leaks_no_descriptor(plain: FaultServer) -> None:
    source, chance = HttpSource(plain.url), random.Random(1)
    with connected(source) as connection:
        read(connection, 0, 10)
    before = descriptors()
    for _ in range(40):
        connection = source.connect()

        def work(connection: HttpConnection = connection) -> None:
            try:
                for begin in range(0, 900_000, 100_000):
                    read(connection, begin, begin + 100_000)
            except SourceUnavailable:
                return

        reader = threading.Thread(target=work)
        reader.start()
        reader.join(chance.random() * 0.01)
        connection.close()
        reader.join(10)
        assert not reader.is_alive()
    deadline = threading.Event()
    # Wait for the server, which is in this process and closes its descriptors a moment later.
    for _ in range(200):
        if descriptors() <= before:
            break
        deadline.wait(0.01)
    assert descriptors() <= before


# -- redirects


def test_a_redirect_is_followed_once_and_remembered(server: FaultServer, plain: FaultServer) -> None:
    server.faults = Faults(redirect=plain.url + "/")
    source = HttpSource(server.url, secrets={TOKEN_VARIABLE: "hush"})
    with connected(source) as connection:
        for begin in range(0, 3000, 1000):
            assert read(connection, begin, begin + 100) == DATA[begin : begin + 100]
    assert len(server.requests) == 1
    assert server.requests[0].headers["authorization"] == "Bearer hush"
    assert "authorization" not in plain.requests[-1].headers


def test_a_redirect_that_expired_is_resolved_anew_once(server: FaultServer) -> None:
    with FaultServer(FILES) as cdn:
        server.faults = Faults(redirect=cdn.url + "/")
        source = HttpSource(server.url)
        with connected(source) as connection:
            assert read(connection, 0, 9) == DATA[:9]
            number = len(cdn.requests)
            cdn.faults = lambda request: Faults(status=403 if request.number == number else None)
            assert read(connection, 9, 19) == DATA[9:19]
            assert len(server.requests) == 2
            cdn.faults = Faults(status=403)
            with pytest.raises(SourceDenied):
                read(connection, 9, 19)
            assert len(server.requests) == 3


def test_redirects_end(server: FaultServer) -> None:
    server.faults = Faults(redirect=server.url + "/again/")
    with pytest.raises(SourceError, match="more than 5 times"):
        read_once(server)
    assert len(server.requests) == 6
    server.faults = Faults(redirect="ftp://elsewhere/x")
    with pytest.raises(SourceError, match="not an http"):
        read_once(server)


# -- TLS


def test_tls_reads_the_same_and_checks_certificates(
    plain: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    with FaultServer(FILES, ssl_context=serving(authority)) as server:
        source = HttpSource(server.url, ssl_context=trusting(authority))
        with connected(source) as connection:
            for begin in (0, 1000):
                assert read(connection, begin, begin + 700_000) == DATA[begin : begin + 700_000]
        assert server.connections == 1
        with (
            connected(HttpSource(server.url)) as connection,
            pytest.raises(SourceError, match="certificate is not trusted") as caught,
        ):
            connection.begin(NAME, 0, 1)
        assert not isinstance(caught.value, SourceUnavailable)
        server.faults = Faults(redirect=plain.url + "/")
        with connected(source) as connection, pytest.raises(SourceError, match="away from TLS"):
            connection.begin(NAME, 0, 1)
    monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 0.3)
    source = HttpSource(plain.url.replace("http", "https"))
    with connected(source) as connection, pytest.raises(SourceUnavailable):
        connection.begin(NAME, 0, 1)


# -- credentials


def test_credentials_are_sent_and_never_shown(server: FaultServer) -> None:
    source = HttpSource(server.url.replace("//", "//me:hush%40@") + "/sub/?token=secret")
    with connected(source) as connection:
        server.faults = lambda request: Faults(status=403 if request.number else 500)
        shown = [repr(source.url)]
        for _ in range(2):
            with pytest.raises(SourceError) as caught:
                connection.begin(NAME, 0, 1)
            shown += [str(caught.value), repr(caught.value.to_wire()), str(caught.value.__cause__)]
    assert server.requests[0].headers["authorization"] == "Basic bWU6aHVzaEA="
    assert not [text for text in shown if "hush" in text or "secret" in text or "me:" in text]


@pytest.mark.parametrize(
    "url", ["http://", "http://me:hush@/x", "http://h:99999/", "ftp://h/x", "http://[::1/x"]
)
def test_an_invalid_url_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(SourceError, match="not a URL of a web server") as caught:
        HttpSource(url)
    assert "hush" not in str(caught.value)


def test_a_header_that_http_does_not_allow_is_not_quoted(plain: FaultServer) -> None:
    source = HttpSource(plain.url, secrets={TOKEN_VARIABLE: "hush\nhush"})
    with pytest.raises(SourceError, match="does not allow") as caught:
        source.stat(NAME)
    assert "hush" not in str(caught.value)


def test_a_range_allocates_next_to_nothing() -> None:
    with FaultServer(FILES) as server, connected(HttpSource(server.url)) as connection:
        view = memoryview(bytearray(len(DATA)))
        read(connection, 0, 10)
        tracemalloc.start()
        try:
            connection.begin(NAME, 0, len(DATA))
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            done = 0
            while count := connection.read_into(view[done:]):
                done += count
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert done == len(DATA)
    assert peak - before < 64 << 10, "a read made a copy of what it read"


@contextmanager
def scripted(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that reads one request, calls `answer` with the socket and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as peer:
            peer.settimeout(10)
            while b"\r\n\r\n" not in peer.recv(65536):
                pass
            answer(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(10)
        listener.close()


# -- headers of a function


def test_a_functions_token_and_headers_are_sent_and_not_to_where_it_redirects(server: FaultServer) -> None:
    secrets = {
        "PILOTFLAME_SNAPSHOT_TOKEN": "hush",
        "PILOTFLAME_SNAPSHOT_HEADERS": "X-Key: hush 2\n\nX-Team:a",
    }
    with FaultServer(FILES) as there:
        server.faults = lambda request: Faults(redirect=there.url + "/" if request.name == NAME else None)
        source = open_source(server.url, secrets)
        assert source.stat(NAME).size_bytes == len(DATA)
        assert source.stat("empty").size_bytes == 0
        for request in server.requests:
            assert request.headers["authorization"] == "Bearer hush"
            assert (request.headers["x-key"], request.headers["x-team"]) == ("hush 2", "a")
        (redirected,) = there.requests
        assert not {"authorization", "x-key", "x-team"} & redirected.headers.keys()


def test_a_token_of_this_process_is_sent_nowhere(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFLAME_SNAPSHOT_TOKEN", "hush")
    open_source(server.url, {"OTHER": "x"}).stat(NAME)
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize("line", ["no colon, hush", "Range: bytes=0-hush", "HOST: hush", ": hush"])
def test_headers_that_cannot_be_are_refused_without_showing_them(line: str) -> None:
    with pytest.raises(SourceError, match="PILOTFLAME_SNAPSHOT_HEADERS") as caught:
        open_source("http://host/x", {"PILOTFLAME_SNAPSHOT_HEADERS": f"X-A: 1\n{line}"})
    assert "hush" not in f"{caught.value.message}{caught.value.remedy}"
