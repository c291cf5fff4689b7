"""Connections to PostgreSQL, and its migrations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate


@pytest.fixture
def connection(postgres_url: str) -> Iterator[PostgresConnection]:
    connection = PostgresConnection(postgres_url)
    yield connection
    connection.close()


def test_rows_are_read_by_name_and_position(connection: PostgresConnection) -> None:
    row = connection.execute("SELECT ?2::text AS b, ?1::int AS a FROM (VALUES (?1)) v", (1, "x")).fetchone()
    assert row is not None
    assert (row["a"], row[0], dict(row)) == (1, "x", {"b": "x", "a": 1})
    (one,) = connection.execute("SELECT ?::float8", (0.5,)).fetchone() or ()
    assert one == 0.5


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def test_versions_side_by_side(connection: PostgresConnection, tmp_path: Path) -> None:
    """An older gateway can still migrate after a newer version has added something, but not after it has removed something."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        script(folder, "0001_pre_rows.sql", "CREATE TABLE rows (a INT, b INT);")
    script(new, "0002_pre_more.sql", "ALTER TABLE rows ADD COLUMN c INT;")
    script(new, "0003_post_less.sql", "ALTER TABLE rows DROP COLUMN b;")
    assert migrate(connection, old) == ["0001_pre_rows.sql"]
    assert migrate(connection, new) == ["0002_pre_more.sql"]
    assert migrate(connection, new) == migrate(connection, old) == []
    connection.execute("INSERT INTO rows (a, b) VALUES (1, 2)")
    assert migrate(connection, new, kinds=("pre", "post")) == ["0003_post_less.sql"]
    with pytest.raises(JobStoreFailed, match="0003_post_less"):
        migrate(connection, old)
    assert not connection.in_transaction


def test_a_migration_that_fails_changes_nothing(connection: PostgresConnection, tmp_path: Path) -> None:
    script(tmp_path, "0001_pre_rows.sql", "CREATE TABLE rows (a INT);")
    script(tmp_path, "0002_pre_wrong.sql", "CREATE TABLE rows (a INT);")
    with pytest.raises(JobStoreFailed, match=r'0002_pre_wrong.*relation "rows" already exists'):
        migrate(connection, tmp_path)
    (tmp_path / "0002_pre_wrong.sql").unlink()
    assert migrate(connection, tmp_path) == ["0001_pre_rows.sql"]


def test_gateways_that_start_together_migrate_once(postgres_url: str, tmp_path: Path) -> None:
    script(tmp_path, "0001_pre_rows.sql", "SELECT pg_sleep(0.1); CREATE TABLE rows (a INT);")
    done: list[list[str]] = []

    def start() -> None:
        connection = PostgresConnection(postgres_url)
        done.append(migrate(connection, tmp_path))
        connection.close()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [[]] * 7 + [["0001_pre_rows.sql"]]
