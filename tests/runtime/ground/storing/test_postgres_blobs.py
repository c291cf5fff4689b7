"""Blobs in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from blobs_tests import BlobsTests
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.runtime.ground.storing.postgres_blobs import PostgresBlobs
from postgres import postgres_server


@pytest.fixture
def blobs(postgres_url: str) -> Iterator[PostgresBlobs]:
    connection = PostgresConnection(postgres_url)
    migrate(connection)
    connection.close()
    blobs = PostgresBlobs(postgres_url)
    yield blobs
    blobs.close()


class TestPostgresBlobs(BlobsTests):
    """The store that several gateways share."""


def test_new_blobs_are_kept_for_an_hour(blobs: PostgresBlobs, postgres_url: str) -> None:
    """Another gateway may have stored them for a row that it has not written yet."""
    for name in ("old", "named", "new"):
        blobs.put(name, b"1")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE blobs SET created = now() - interval '61 minutes' WHERE name <> 'new'")
    blobs.keep(["named"])
    assert [blobs.get(name) for name in ("old", "named", "new")] == [None, b"1", b"1"]


def test_a_blob_that_was_stored_may_be_stored_again(blobs: PostgresBlobs) -> None:
    blobs.put("1-a-b", b"1")
    blobs.put("1-a-b", b"1")
    assert blobs.get("1-a-b") == b"1"


def test_a_server_that_ends_is_an_error_until_it_is_back() -> None:
    with postgres_server() as server:
        connection = PostgresConnection(server.url)
        migrate(connection)
        connection.close()
        blobs = PostgresBlobs(server.url)
        blobs.put("1-a-b", b"1")
        server.kill()
        with pytest.raises(JobStoreFailed, match="could not be written or read"):
            blobs.get("1-a-b")
        server.start()
        assert blobs.get("1-a-b") == b"1"
        server.kill()
        server.start()
        # The idle connection is broken, and a new one replaces it.
        assert blobs.get("1-a-b") == b"1"
        blobs.close()


def test_a_blob_that_is_stored_again_is_new_again(blobs: PostgresBlobs, postgres_url: str) -> None:
    """Otherwise another gateway could delete it before the row that names it is written."""
    blobs.put("1-a-b", b"1")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE blobs SET created = now() - interval '61 minutes'")
    blobs.put("1-a-b", b"1")
    blobs.keep([])
    assert blobs.get("1-a-b") == b"1"


def test_blobs_in_another_table_are_others(blobs: PostgresBlobs, postgres_url: str) -> None:
    others = PostgresBlobs(postgres_url, "revision_files")
    others.put("1-a-b", b"other")
    assert blobs.get("1-a-b") is None
    blobs.delete(["1-a-b"])
    assert others.get("1-a-b") == b"other"
    others.close()
