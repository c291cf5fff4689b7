"""The index of functions and revisions in PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.runtime.ground.storing.postgres_revision_index import PostgresRevisionIndex
from pilotflame.runtime.ground.storing.revision_index import FunctionEntry, IndexedRevision, TrafficShare
from postgres import postgres_server

KEEP = 2


@pytest.fixture
def index(postgres_url: str) -> Iterator[PostgresRevisionIndex]:
    connection = PostgresConnection(postgres_url)
    migrate(connection)
    connection.close()
    index = PostgresRevisionIndex(postgres_url, KEEP)
    yield index
    index.close()


def revision(number: int, function: str = "tone") -> IndexedRevision:
    return IndexedRevision(
        function, f"r{number}-0", number, f'{{"number": {number}, "log": "\\u0000"}}', f"files{number}"
    )


def serve(
    index: PostgresRevisionIndex, number: int, name: str = "tone", *, new: bool = True
) -> FunctionEntry:
    entry = FunctionEntry(name, (TrafficShare(f"r{number}-0"),))
    return index.change(name, lambda _: entry, revision(number, name) if new else None)


def test_a_change_is_read_with_its_revision(index: PostgresRevisionIndex) -> None:
    assert index.entry("tone") is None
    made = serve(index, 1)
    assert made == FunctionEntry("tone", (TrafficShare("r1-0", 1, ""),), generation=1, live=revision(1))
    assert index.entry("tone") == made
    assert index.changes(0) == [made]
    assert index.changes(1) == []


def test_generations_count_the_changes_of_all_functions(index: PostgresRevisionIndex) -> None:
    found = [serve(index, 1, name).generation for name in ("b", "a", "b", "c")]
    assert found == [1, 2, 3, 4]
    assert [(entry.name, entry.generation) for entry in index.changes(1)] == [("a", 2), ("b", 3), ("c", 4)]


def test_traffic_of_several_revisions_is_kept(index: PostgresRevisionIndex) -> None:
    shares = (TrafficShare("r2-0", 9), TrafficShare("r1-0", 1, "canary"))
    serve(index, 1)
    index.change("tone", lambda _: FunctionEntry("tone", shares, paused=True), revision(2))
    found = index.entry("tone")
    assert found is not None
    assert (found.traffic, found.paused, found.live) == (shares, True, revision(2))


def test_a_revision_that_was_removed_meanwhile_cannot_become_live(index: PostgresRevisionIndex) -> None:
    """Otherwise other gateways would find no live revision."""
    for number in range(1, 5):
        serve(index, number)
    with pytest.raises(GatewayError, match="r1-0 of tone was removed"):
        serve(index, 1, new=False)
    found = index.entry("tone")
    assert found is not None
    assert found.live == revision(4)


def test_a_decision_sees_the_present_entry_and_its_error_changes_nothing(
    index: PostgresRevisionIndex,
) -> None:
    first = serve(index, 1)

    def refuse(present: FunctionEntry | None) -> FunctionEntry:
        assert present == first
        raise GatewayError("No.")

    with pytest.raises(GatewayError, match="No"):
        index.change("tone", refuse, revision(2))
    assert [one.number for one in index.revisions("tone")] == [1]
    assert index.changes(0) == [first]


def test_old_revisions_go_but_not_the_live_one(index: PostgresRevisionIndex) -> None:
    for number in range(1, 5):
        serve(index, number)
    assert [one.number for one in index.revisions("tone")] == [4, 3]
    serve(index, 3, new=False)
    for number in (5, 6):
        index.change("tone", lambda _: FunctionEntry("tone", (TrafficShare("r3-0"),)), revision(number))
    assert [one.number for one in index.revisions("tone")] == [6, 5, 3]
    assert sorted(index.files()) == ["files3", "files5", "files6"]


def test_a_deleted_function_has_no_revisions_and_is_seen_by_who_was_away(
    index: PostgresRevisionIndex,
) -> None:
    serve(index, 1)
    serve(index, 1, "other")
    index.change("tone", lambda _: FunctionEntry("tone", deleted=True))
    assert index.revisions("tone") == []
    assert [(entry.name, entry.deleted) for entry in index.changes(1)] == [("other", False), ("tone", True)]
    assert index.files() == ["files1"]


def test_numbers_are_given_once(index: PostgresRevisionIndex) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: index.reserve("tone", 3), range(40)))
    assert sorted(found) == list(range(3, 43))
    assert [index.reserve("tone", least) for least in (1, 100, 5)] == [43, 100, 101]
    assert index.reserve("other", 1) == 1


def test_who_has_read_a_generation_misses_no_earlier_one(
    index: PostgresRevisionIndex, postgres_url: str
) -> None:
    """Two gateways change the index at the same time. A reader that asks for the changes since its newest generation gets all."""
    other, seen, done = PostgresRevisionIndex(postgres_url, KEEP), list[int](), threading.Event()

    def read() -> None:
        newest = 0
        while not done.is_set():
            for entry in index.changes(newest):
                seen.append(entry.generation)
                newest = entry.generation

    with ThreadPoolExecutor(9) as threads:
        reading = threads.submit(read)
        writers = [threads.submit(serve, (index, other)[number % 2], 1, f"f{number}") for number in range(40)]
        for writer in writers:
            writer.result(30)
        done.set()
        reading.result(30)
    seen += [entry.generation for entry in index.changes(seen[-1] if seen else 0)]
    assert seen == list(range(1, 41))
    other.close()


def test_of_two_decisions_about_one_function_the_second_sees_the_first(
    index: PostgresRevisionIndex, postgres_url: str
) -> None:
    other, first, go = PostgresRevisionIndex(postgres_url, KEEP), threading.Event(), threading.Event()

    def slow(_: FunctionEntry | None) -> FunctionEntry:
        first.set()
        assert go.wait(30)
        return FunctionEntry("tone", (TrafficShare("r1-0"),))

    def pause(present: FunctionEntry | None) -> FunctionEntry:
        assert present is not None
        return FunctionEntry("tone", present.traffic, paused=True)

    with ThreadPoolExecutor(2) as threads:
        deploy = threads.submit(index.change, "tone", slow, revision(1))
        assert first.wait(30)
        paused = threads.submit(other.change, "tone", pause)
        assert index.entry("tone") is None
        go.set()
        assert deploy.result(30).generation == 1
        assert paused.result(30) == FunctionEntry(
            "tone", (TrafficShare("r1-0"),), paused=True, generation=2, live=revision(1)
        )
    other.close()


def test_a_server_that_ends_is_an_error_until_it_is_back() -> None:
    with postgres_server() as server:
        connection = PostgresConnection(server.url)
        migrate(connection)
        connection.close()
        index = PostgresRevisionIndex(server.url, KEEP)
        made = serve(index, 1)
        server.kill()
        with pytest.raises(GatewayError, match="could not read or write the functions"):
            index.changes(0)
        server.start()
        assert index.changes(0) == [made]
        server.kill()
        server.start()
        # The idle connection is broken, and a new one replaces it.
        assert serve(index, 2).generation == 2
        index.close()


def test_a_newer_gateway_may_store_more_about_a_share(
    index: PostgresRevisionIndex, postgres_url: str
) -> None:
    serve(index, 1)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("""UPDATE functions SET traffic = jsonb_set(traffic, '{0,sticky}', 'true')""")
    found = index.entry("tone")
    assert found is not None
    assert found.traffic == (TrafficShare("r1-0"),)
