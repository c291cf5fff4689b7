"""Idle connections: they are used again for the same source only. A stale one is not used, and only a few are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import SourceUnavailable
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.sources import idle
from pilotflame.snapshot.sources.http import HttpConnection, HttpSource
from pilotflame.snapshot.sources.idle import MOST_IDLE
from pilotflame.snapshot.sources.locate import MOST_KEPT, KeptSources
from pilotflame.snapshot.sources.source import Source
from pulling import LIMIT_S, make

FILES = {name: bytes([number]) * 1000 for number, name in enumerate("abcdefghijkl")}


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer(FILES) as running:
        yield running


def read(connection: HttpConnection, name: str) -> bytes:
    buffer = memoryview(bytearray(1000))
    connection.begin(name, 0, 1000)
    done = 0
    while count := connection.read_into(buffer[done:]):
        done += count
    return bytes(buffer)


def ask(source: Source, name: str) -> None:
    """Read an object as a fetch does."""
    connection = source.connect()
    assert isinstance(connection, HttpConnection)
    assert read(connection, name) == FILES[name]
    connection.release()


def test_requests_for_several_objects_take_one_connection_and_one_request_each(server: FaultServer) -> None:
    source = HttpSource(server.url)
    for name in FILES:
        ask(source, name)
    assert (server.connections, len(server.requests)) == (1, len(FILES))


def test_an_object_shorter_than_what_is_asked_for_is_read_to_its_end(server: FaultServer) -> None:
    for offset, expected in ((0, 1000), (999, 1), (1000, 0), (5000, 0)):
        buffer = bytearray(3000)
        assert HttpSource(server.url).read_into("b", offset, memoryview(buffer)) == expected
        assert buffer == FILES["b"][offset:].ljust(3000, b"\0")


def test_a_connection_that_the_server_closed_is_not_used(server: FaultServer) -> None:
    source = HttpSource(server.url)
    server.faults = Faults(close_each=True, close_said=False)
    ask(source, "a")
    server.faults = Faults()
    ask(source, "b")
    assert [request.name for request in server.requests] == ["a", "b"]


def test_no_connection_passes_to_other_secrets_or_another_server(server: FaultServer) -> None:
    kept = KeptSources()
    secrets = [{"PILOTFLAME_SNAPSHOT_TOKEN": token} for token in ("one", "two")]
    with FaultServer(FILES) as other:
        for url in (server.url, other.url):
            for own in (*secrets, *secrets):
                source = kept.open(url, own)
                ask(source, "a")
        assert (server.connections, other.connections) == (2, 2)
        tokens = [
            {request.headers["authorization"] for request in server.requests if request.connection == number}
            for number in range(2)
        ]
    assert tokens == [{"Bearer one"}, {"Bearer two"}]


def test_what_redirects_lead_to_is_asked_on_connections_of_its_own_server(server: FaultServer) -> None:
    with FaultServer({}, Faults(redirect=f"{server.url}/")) as front:
        source = HttpSource(front.url)
        with pytest.MonkeyPatch.context() as patch:
            # Let the source forget the redirect, so that each request goes to the first server again. Both connections are kept.
            patch.setattr(source, "note", lambda name, location: None)
            for name in "abc":
                ask(source, name)
        assert server.connections == 1
        assert {request.name for request in front.requests} == {"a", "b", "c"}


def test_only_a_few_are_kept_and_only_for_a_while(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HttpSource(server.url)
    monkeypatch.setattr(idle, "IDLE_S", 0.05)
    before = set(threading.enumerate())
    used = [source.connect() for _ in range(MOST_IDLE + 3)]
    for connection in used:
        assert read(connection, "a") == FILES["a"]
    for connection in used:
        connection.release()
    # Wait for all timers. A timer that leaves younger connections starts the next timer before it ends.
    while timers := {one for one in threading.enumerate() if isinstance(one, threading.Timer)} - before:
        timers.pop().join(LIMIT_S)
    assert server.connections == MOST_IDLE + 3
    ask(source, "b")
    assert server.connections == MOST_IDLE + 4


def test_a_connection_that_was_released_cannot_be_closed_by_its_last_user(server: FaultServer) -> None:
    source = HttpSource(server.url)
    first = source.connect()
    read(first, "a")
    first.release()
    second = source.connect()
    second.begin("b", 0, 1000)
    first.close()
    first.release()
    assert second.read_into(memoryview(bytearray(1000))) > 0
    assert server.connections == 1
    second.close()


def test_a_connection_closed_before_its_request_takes_no_kept_one(server: FaultServer) -> None:
    source = HttpSource(server.url)
    ask(source, "a")
    closed = source.connect()
    closed.close()
    with pytest.raises(SourceUnavailable):
        closed.begin("b", 0, 1000)
    assert [request.name for request in server.requests] == ["a"]


def test_a_body_that_was_not_read_to_its_end_is_not_mixed_into_the_next(server: FaultServer) -> None:
    source = HttpSource(server.url)
    first = source.connect()
    first.begin("a", 0, 1000)
    first.release()
    ask(source, "b")
    assert server.connections == 2


def test_what_is_not_verified_is_read_over_a_new_connection(server: FaultServer) -> None:
    # The server sends its answer for "b" once more when the next request comes on the same connection.
    server.faults = lambda request: Faults(late_share=float(request.name == "b"))
    source = HttpSource(server.url)
    ask(source, "b")
    buffer = bytearray(1000)
    assert source.read_into("c", 0, memoryview(buffer)) == 1000
    assert buffer == FILES["c"]
    assert server.connections == 2


def test_after_an_answer_that_is_of_another_range_nothing_is_kept(server: FaultServer) -> None:
    server.faults = lambda request: Faults(late_share=float(request.name == "b"))
    source = HttpSource(server.url)
    ask(source, "b")
    with (
        closing(source.connect()) as connection,
        pytest.raises(SourceUnavailable, match="another range"),
    ):
        connection.begin("b", 10, 1000)
    server.faults = Faults()
    ask(source, "d")
    ask(source, "e")
    assert server.connections == 3


def test_after_a_while_connections_are_kept_again_but_none_of_before(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HttpSource(server.url)
    monkeypatch.setattr(idle, "DISTRUSTED_FOR_S", 0.0)
    ask(source, "a")
    source.idle.distrust()
    ask(source, "b")
    ask(source, "c")
    assert server.connections == 2


def test_only_the_sources_used_last_are_kept(server: FaultServer) -> None:
    kept = KeptSources()
    first = kept.open(server.url, {})
    assert kept.open(server.url, {}) is first
    for number in range(MOST_KEPT):
        kept.open(f"{server.url}/{number}", {})
    assert kept.open(server.url, {}) is not first


def test_a_kept_source_takes_an_object_as_it_is_now(server: FaultServer) -> None:
    kept = KeptSources()
    server.content = {"a": b"1" * 1000}
    source = kept.open(server.url, {})
    assert source.stat("a").size_bytes == 1000
    server.content = {"a": b"2" * 500}
    again = kept.open(server.url, {})
    assert again is source
    assert again.stat("a").size_bytes == 500


def test_fetches_of_one_source_share_their_connections(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    make(folder)
    for number in range(6):
        (folder / f"config{number}.json").write_text(f"[{number}]")
    manifest = create(folder, chunk_bytes=64 << 10)
    with FaultServer(folder) as server:
        sources, counts = KeptSources(), []
        for number in range(3):
            cache = Cache([Tier(tmp_path / f"tier{number}", 64 << 20)])
            with cache.open(manifest, sources.open(server.url, {})) as lease:
                lease.wait(LIMIT_S)
            counts.append(server.connections)
        asked = [request.name for request in server.requests if request.name.endswith(".json")]
    # A fetch may need more connections than were kept, but it must not open all of them anew.
    assert counts[2] < 3 * counts[0]
    assert sorted(asked) == sorted(3 * [asset.name for asset in manifest.assets])
