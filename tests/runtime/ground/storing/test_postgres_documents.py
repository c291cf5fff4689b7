"""Documents in PostgreSQL: the contract, and sessions and servers that end at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import psycopg
import pytest
from documents_tests import DocumentsTests
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing.documents import Documents
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, PostgresRow, migrate
from pilotflame.runtime.ground.storing.postgres_documents import PostgresDocuments
from postgres import PostgresServer, postgres_server

NAME = "access/keys.json"
THREADS, ROUNDS = 8, 10


@pytest.fixture
def make_documents(postgres_url: str) -> Iterator[Callable[[], PostgresDocuments]]:
    connection = PostgresConnection(postgres_url)
    migrate(connection)
    connection.close()
    made = list[PostgresDocuments]()

    def make() -> PostgresDocuments:
        made.append(PostgresDocuments(postgres_url))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def documents(make_documents: Callable[[], PostgresDocuments]) -> PostgresDocuments:
    return make_documents()


@pytest.fixture
def other(make_documents: Callable[[], PostgresDocuments]) -> PostgresDocuments:
    return make_documents()


class TestPostgresDocuments(DocumentsTests):
    """The store that several gateways share."""


def counted(before: bytes | None) -> bytes:
    return b"%d" % (int(before or b"0") + 1)


def end_sessions(postgres: PostgresServer) -> None:
    """End all sessions of gateways, and wait until they have ended."""
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )


def count_together(*stores: Documents) -> None:
    """Let threads of each gateway count in one document."""
    threads = [
        threading.Thread(target=lambda store=store: [store.update(NAME, counted) for _ in range(ROUNDS)])
        for store in stores * THREADS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_gateways_with_eight_threads_each_lose_no_change(documents: Documents, other: Documents):
    before = other.generation("access/")
    count_together(documents, other)
    assert documents.get(NAME) == b"%d" % (2 * THREADS * ROUNDS)
    assert other.generation("access/") == before + 2 * THREADS * ROUNDS


def test_no_change_is_lost_in_a_database_whose_transactions_see_one_state(
    documents: Documents, postgres_url: str
):
    isolated = postgres_url.replace("options='", "options='-c default_transaction_isolation=serializable ")
    assert isolated != postgres_url
    other = PostgresDocuments(isolated)
    count_together(documents, other)
    assert documents.get(NAME) == b"%d" % (2 * THREADS * ROUNDS)
    other.close()


def test_a_reader_of_generations_misses_no_change(documents: Documents, other: Documents):
    """A gateway that reads the document after each new generation has the last version in the end."""
    ended, seen = threading.Event(), list[tuple[int, bytes | None]]()

    def watch() -> None:
        last = True
        while last:
            # Look once more after the end.
            last = not ended.is_set()
            generation = other.generation("access/")
            if not seen or generation != seen[-1][0]:
                seen.append((generation, other.get(NAME)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    count_together(documents)
    ended.set()
    watcher.join()
    assert seen[-1] == (THREADS * ROUNDS, b"%d" % (THREADS * ROUNDS))
    assert [generation for generation, _ in seen] == sorted({generation for generation, _ in seen})


def test_idle_sessions_that_were_ended_are_replaced(
    documents: Documents, other: Documents, postgres: PostgresServer
):
    count_together(documents, other)
    for call in (
        lambda: documents.put(NAME, b"1"),
        lambda: documents.update(NAME, counted),
        lambda: documents.put("habits/node.json", b"1", durable=False),
        lambda: documents.get(NAME),
        lambda: documents.all("access/"),
        lambda: documents.generation("access/"),
        lambda: documents.remove(NAME),
    ):
        end_sessions(postgres)
        call()
    assert other.get(NAME) is None


def test_a_session_that_was_ended_in_a_change_lets_another_one_make_it(
    documents: Documents, other: Documents, postgres: PostgresServer
):
    documents.put(NAME, b"1")
    seen = list[bytes | None]()

    def change(before: bytes | None) -> bytes:
        seen.append(before)
        if len(seen) == 1:
            end_sessions(postgres)
            other.update(NAME, counted)
        return counted(before)

    assert documents.update(NAME, change) == b"3"
    assert seen == [b"1", b"2"]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("between", [None, b"between"])
def test_a_lost_answer_to_a_commit_makes_no_change_twice(
    documents: PostgresDocuments,
    other: PostgresDocuments,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
    between: bytes | None,
):
    """The change is made once, even if another gateway has changed the document in between."""
    real, lost, seen = PostgresConnection.run, list[str](), list[bytes | None]()

    def lose(self: PostgresConnection, script: str) -> list[PostgresRow]:
        if script != "COMMIT" or not lost:
            return real(self, script)
        lost.pop()
        if committed:
            real(self, script)
        self.close()
        if between is not None:
            other.put(NAME, between)
        raise psycopg.OperationalError("the answer was lost")

    def change(before: bytes | None) -> bytes | None:
        seen.append(before)
        return None if before == b"xx" else (before or b"") + b"x"

    monkeypatch.setattr(PostgresConnection, "run", lose)
    for expected in (b"x", b"xx", None):
        seen.clear()
        before = documents.get(NAME)
        generation = other.generation("access/")
        lost.append("update")
        changed = documents.update(NAME, change)
        assert not lost
        again = () if committed else (before if between is None else between,)
        assert seen == [before, *again]
        if committed or between is None:
            assert changed == expected
            assert other.generation("access/") == generation + 1 + (between is not None)
        else:
            assert changed == between + b"x"
        assert other.get(NAME) == (between if committed and between is not None else changed)
        documents.put(NAME, expected) if expected is not None else documents.remove(NAME)


def test_a_server_that_ends_is_an_error_until_it_is_back():
    with postgres_server() as server:
        connection = PostgresConnection(server.url)
        migrate(connection)
        connection.close()
        documents, other = PostgresDocuments(server.url), PostgresDocuments(server.url)
        documents.put(NAME, b"1")
        assert other.get(NAME) == b"1"
        server.kill()
        uses: dict[str, Callable[[], object]] = {
            f"read the document {NAME} in the database": lambda: documents.get(NAME),
            "read the documents access/: ": lambda: documents.all("access/"),
            "read the changes of access/": lambda: other.generation("access/"),
            f"write the document {NAME} in the database": lambda: other.update(NAME, counted),
        }
        for fault, use in uses.items():
            with pytest.raises(GatewayError, match=fault) as caught:
                use()
            assert "whether PostgreSQL runs" in caught.value.remedy
        server.start()
        assert other.update(NAME, counted) == b"2"
        server.kill()
        server.start()
        # The idle connection is broken, and a new one replaces it.
        assert documents.update(NAME, counted) == b"3"
        assert (other.get(NAME), other.generation("access/")) == (b"3", 3)
        _count_while_killed(server, documents, other)
        documents.close()
        other.close()


def _count_while_killed(server: PostgresServer, *stores: PostgresDocuments) -> None:
    """Count while the server is killed. Check that each confirmed change is stored, and that no change is stored twice."""
    confirmed, tried, ended, news = list[None](), list[None](), threading.Event(), threading.Semaphore(0)
    start = int(stores[0].get(NAME) or b"0")

    def count(store: PostgresDocuments) -> None:
        while not ended.is_set():
            tried.append(None)
            with suppress(GatewayError):
                store.update(NAME, counted)
                confirmed.append(None)
                news.release()

    threads = [threading.Thread(target=count, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for _ in range(2):
        for _ in range(20):
            assert news.acquire(timeout=60)
        server.kill()
        server.start()
    ended.set()
    for thread in threads:
        thread.join()
    found = int(stores[0].get(NAME) or b"0") - start
    assert len(confirmed) <= found <= len(tried)


def test_tables_that_are_missing_are_an_error(postgres_url: str):
    documents = PostgresDocuments(postgres_url)
    with pytest.raises(GatewayError, match='relation "documents" does not exist'):
        documents.get(NAME)
