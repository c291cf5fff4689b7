"""The database: acknowledged writes are on the disk, and a failed write harms no other write."""

import asyncio
import os
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from pilotflame.errors import JobConflict, JobStoreFailed
from pilotflame.runtime.jobs.sql.group_commit import MAX_GROUP
from pilotflame.runtime.jobs.sqlite.database import Database

SCRIPTS = ("CREATE TABLE rows (number INTEGER PRIMARY KEY, body BLOB UNIQUE)",)


def put(body: bytes) -> "Insert":
    return Insert(body)


class Insert:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def __call__(self, connection: sqlite3.Connection) -> int:
        return connection.execute("INSERT INTO rows (body) VALUES (?)", (self.body,)).lastrowid or 0


def bodies(connection: sqlite3.Connection) -> list[bytes]:
    return [row["body"] for row in connection.execute("SELECT body FROM rows ORDER BY number")]


def opened(path: Path, on_written: Callable[[bool], None] = lambda _failed: None) -> Database:
    database = Database(path, SCRIPTS, on_written)
    database.open()
    return database


class Held:
    """Keeps the writer busy, so that changes that are queued meanwhile become one group."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, _: sqlite3.Connection) -> None:
        self.reached.set()
        assert self.go.wait(20)


async def together(database: Database, *changes: object) -> list[object]:
    """Write all changes as one group."""
    held = Held()
    holding = asyncio.ensure_future(database.write(held))
    await asyncio.to_thread(held.reached.wait, 20)
    asked = [asyncio.ensure_future(database.write(change)) for change in changes]  # type: ignore[arg-type]
    # Let each task queue its change.
    await asyncio.sleep(0)
    held.go.set()
    await holding
    return list(await asyncio.gather(*asked, return_exceptions=True))


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    found = opened(tmp_path / "jobs.db")
    yield found
    await asyncio.to_thread(found.close)


async def test_a_write_can_be_read_and_survives_reopening(tmp_path: Path) -> None:
    database = opened(tmp_path / "jobs.db")
    assert await database.write(put(b"a")) == 1
    assert await database.read(bodies) == [b"a"]
    await asyncio.to_thread(database.close)
    database = opened(tmp_path / "jobs.db")
    assert await database.read(bodies) == [b"a"]
    await asyncio.to_thread(database.close)
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"], "the log was not brought into the file"


async def test_the_file_has_its_settings(database: Database) -> None:
    def settings(connection: sqlite3.Connection) -> list[object]:
        names = ("auto_vacuum", "journal_mode", "synchronous")
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    assert await database.read(settings) == [2, "wal", 2]
    assert await database.write(settings) == [2, "wal", 2]


async def test_a_read_cannot_change_anything(database: Database) -> None:
    with pytest.raises(JobStoreFailed, match="readonly"):
        await database.read(put(b"a"))
    assert await database.read(bodies) == []


async def test_each_change_of_a_group_succeeds_or_fails_alone(database: Database) -> None:
    def conflict(connection: sqlite3.Connection) -> None:
        put(b"undone")(connection)
        raise JobConflict("no")

    def wrong(connection: sqlite3.Connection) -> None:
        put(b"undone too")(connection)
        connection.execute("SELECT nonsense")

    done = await together(database, put(b"a"), conflict, put(b"b"), put(b"a"), wrong, put(b"c"))
    assert [type(result) for result in done] == [
        int, JobConflict, int, JobStoreFailed, JobStoreFailed, int,
    ]  # fmt: skip
    assert await database.read(bodies) == [b"a", b"b", b"c"]


async def test_more_changes_than_fit_a_group(database: Database) -> None:
    count = 2 * MAX_GROUP + 3
    await asyncio.gather(*(database.write(put(b"%d" % number)) for number in range(count)))
    assert len(await database.read(bodies)) == count


async def test_the_change_of_a_cancelled_caller_is_committed_and_reported(database: Database) -> None:
    committed = asyncio.Event()
    held = Held()
    holding = asyncio.ensure_future(database.write(held))
    await asyncio.to_thread(held.reached.wait, 20)
    asked = asyncio.ensure_future(database.write(put(b"a"), lambda _: committed.set()))
    await asyncio.sleep(0)
    asked.cancel()
    held.go.set()
    await holding
    await asyncio.wait_for(committed.wait(), 20)
    assert asked.cancelled()
    assert await database.read(bodies) == [b"a"]


async def test_a_failed_change_is_not_reported_as_committed(database: Database) -> None:
    committed = asyncio.Event()

    def conflict(_: sqlite3.Connection) -> None:
        raise JobConflict("no")

    with pytest.raises(JobConflict):
        await database.write(conflict, lambda _: committed.set())
    await database.write(put(b"a"))
    assert not committed.is_set()


async def test_close_finishes_queued_calls_and_refuses_later_ones(tmp_path: Path) -> None:
    database = opened(tmp_path / "jobs.db")
    asked = [asyncio.ensure_future(database.write(put(b"%d" % number))) for number in range(50)]
    await asyncio.sleep(0)
    await asyncio.to_thread(database.close)
    assert await asyncio.gather(*asked) == list(range(1, 51))
    with pytest.raises(JobStoreFailed, match="closed"):
        await database.write(put(b"late"))
    with pytest.raises(JobStoreFailed, match="closed"):
        await database.read(bodies)
    database.close()


def test_a_closed_event_loop_does_not_end_the_writer(tmp_path: Path) -> None:
    database = opened(tmp_path / "jobs.db")
    held = Held()

    async def leave() -> None:
        asked = asyncio.ensure_future(database.write(held))
        await asyncio.to_thread(held.reached.wait, 20)
        asked.cancel()

    asyncio.run(leave())
    held.go.set()
    asyncio.run(database.write(put(b"a")))
    assert asyncio.run(database.read(bodies)) == [b"a"]
    database.close()


# -- versions


async def test_an_older_file_is_upgraded_and_a_newer_one_refused(tmp_path: Path) -> None:
    database = opened(tmp_path / "jobs.db")
    await database.write(put(b"a"))
    await asyncio.to_thread(database.close)
    newer = Database(tmp_path / "jobs.db", (*SCRIPTS, "ALTER TABLE rows ADD COLUMN more TEXT DEFAULT 'm'"))
    newer.open()
    assert (
        await newer.read(lambda connection: connection.execute("SELECT more FROM rows").fetchone()[0]) == "m"
    )
    await asyncio.to_thread(newer.close)
    with pytest.raises(JobStoreFailed, match="has version 2; this pilotflame knows versions up to 1"):
        opened(tmp_path / "jobs.db")


def test_a_file_of_a_version_that_no_release_wrote_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "jobs.db").close()
    later = Database(tmp_path / "jobs.db", ("", "", *SCRIPTS))
    with pytest.raises(JobStoreFailed, match="has version 1; this pilotflame reads versions from 3 on"):
        later.open()


def test_a_script_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    broken = Database(tmp_path / "jobs.db", ("CREATE TABLE a (b); CREATE TABLE a (b)",))
    with pytest.raises(JobStoreFailed, match="already exists"):
        broken.open()
    opened(tmp_path / "jobs.db").close()


# -- damage and full disks


def test_a_file_that_is_not_a_database_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(JobStoreFailed, match=r"jobs\.db.*not a database.*moved away"):
        opened(path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobStoreFailed, match="unable to open"):
        opened(tmp_path / "nowhere" / "jobs.db")


async def test_damage_is_reported_and_other_calls_succeed(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    database = opened(path)
    await asyncio.gather(*(database.write(put(os.urandom(500))) for _ in range(500)))
    await asyncio.to_thread(database.close)
    content = bytearray(path.read_bytes())
    content[4096 * 8 : 4096 * 60] = os.urandom(4096 * 52)
    path.write_bytes(content)
    database = opened(path)
    with pytest.raises(JobStoreFailed, match="malformed"):
        await database.read(bodies)
    with pytest.raises(JobStoreFailed, match="malformed"):
        await database.write(lambda connection: connection.execute("DELETE FROM rows"))
    assert await database.read(lambda connection: connection.execute("SELECT 1").fetchone()[0]) == 1
    await asyncio.to_thread(database.close)


async def test_a_change_that_does_not_fit_is_refused_alone_and_fits_later(database: Database) -> None:
    def limit(pages: int) -> object:
        return lambda connection: connection.execute(f"PRAGMA max_page_count={pages}").fetchone()

    await database.write(limit(50))  # type: ignore[arg-type]
    done = await together(database, put(b"a"), put(b"large" * 100_000), put(b"b"))
    assert [type(result) for result in done] == [int, JobStoreFailed, int]
    assert "full" in str(done[1])
    assert await database.read(bodies) == [b"a", b"b"]
    await database.write(limit(5000))  # type: ignore[arg-type]
    await database.write(put(b"large" * 100_000))


async def refused_or(writing: Coroutine[None, None, object]) -> JobStoreFailed | None:
    try:
        await writing
    except JobStoreFailed as error:
        return error
    return None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_is_reported_and_writes_succeed_once_there_is_room(small_disk: Path) -> None:
    ballast, failures = small_disk / "ballast", list[bool]()
    database = opened(small_disk / "jobs.db", failures.append)
    await database.write(put(b"first"))
    ballast.write_bytes(b"x" * 700_000)
    asked = [b"%4d" % number + os.urandom(9_000) for number in range(200)]
    results = [await refused_or(database.write(put(body))) for body in asked]
    kept = [body for body, result in zip(asked, results, strict=True) if result is None]
    assert 0 < len(kept) < 200
    assert all(result is None or "full" in str(result) for result in results)
    assert await database.read(bodies) == [b"first", *kept]
    assert failures == [False, *(result is not None for result in results)]
    ballast.unlink()
    await database.write(put(b"last"))
    assert failures[-1] is False
    await asyncio.to_thread(database.close)
    database = opened(small_disk / "jobs.db")
    assert await database.read(bodies) == [b"first", *kept, b"last"]
    await asyncio.to_thread(database.close)


async def test_a_read_sees_one_state_of_the_file(database: Database) -> None:
    """A list of jobs is read with one query for each job state. If the queries saw different versions of the file, the list could lack
    jobs whose state changes meanwhile.
    """
    held = Held()

    def twice(connection: sqlite3.Connection) -> list[list[bytes]]:
        before = bodies(connection)
        held(connection)
        return [before, bodies(connection)]

    reading = asyncio.ensure_future(database.read(twice))
    await asyncio.to_thread(held.reached.wait, 20)
    await database.write(put(b"a"))
    held.go.set()
    assert await reading == [[], []]
    assert await database.read(bodies) == [b"a"]


def _deny_transaction_ends(connection: sqlite3.Connection) -> None:
    """Make all commits and rollbacks of the connection fail, as on a disk that fails."""

    def allow(action: int, argument: str | None, *_: object) -> int:
        ends = action == sqlite3.SQLITE_TRANSACTION and argument in ("COMMIT", "ROLLBACK")
        return sqlite3.SQLITE_DENY if ends else sqlite3.SQLITE_OK

    connection.set_authorizer(allow)


@pytest.mark.parametrize("fault", [_deny_transaction_ends, sqlite3.Connection.close])
async def test_a_rollback_that_fails_costs_one_group(database: Database, fault: Callable[..., None]) -> None:
    await database.write(put(b"a"))
    done = await together(database, put(b"b"), fault, put(b"c"))
    assert [type(result) for result in done] == [JobStoreFailed] * 3
    async with asyncio.timeout(20):
        assert await database.write(put(b"d"))
        assert await database.read(bodies) == [b"a", b"d"]
        await database.read(sqlite3.Connection.close)
        assert await database.read(bodies) == [b"a", b"d"]


async def test_a_database_that_cannot_be_opened_again_refuses_until_it_can(
    database: Database, tmp_path: Path
) -> None:
    await database.write(put(b"a"))
    held = Held()
    holding = asyncio.ensure_future(database.write(held))
    await asyncio.to_thread(held.reached.wait, 20)
    faulty = asyncio.ensure_future(database.write(sqlite3.Connection.close))
    await asyncio.sleep(0)
    # The file's folder is missing for a while, as when a volume is unmounted.
    away = tmp_path.rename(tmp_path.with_name("away"))
    held.go.set()
    await asyncio.wait([holding, faulty])
    assert isinstance(faulty.exception(), JobStoreFailed)
    with pytest.raises(JobStoreFailed):
        await database.write(put(b"lost"))
    away.rename(tmp_path)
    with pytest.raises(JobStoreFailed):
        await database.write(put(b"the call that opens it again"))
    assert await database.write(put(b"b"))


async def test_a_failure_after_the_commit_ends_no_thread(tmp_path: Path) -> None:
    """`on_written`, which looks at the disk, raises OSError, as on a disk that is gone."""
    failing = True

    def look(_failed: bool) -> None:
        if failing:
            raise OSError("stale file handle")

    database = opened(tmp_path / "jobs.db", look)
    async with asyncio.timeout(20):
        assert await database.write(put(b"a")) == 1
        with pytest.raises(JobStoreFailed):
            await database.write(lambda connection: connection.execute("SELECT nonsense"))
        failing = False
        assert await database.write(put(b"b")) == 2
    await asyncio.to_thread(database.close)


async def test_nothing_is_written_between_a_change_and_what_follows_its_commit(database: Database) -> None:
    done: list[str] = []

    def fails(_: sqlite3.Connection) -> None:
        raise JobConflict("no")

    held = Held()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(held))
        await asyncio.to_thread(held.reached.wait, 20)
        tasks.create_task(
            database.write(lambda _: done.append("change"), at_commit=lambda: done.append("committed"))
        )
        tasks.create_task(database.write(lambda _: done.append("later")))
        # Let each task queue its change.
        await asyncio.sleep(0)
        held.go.set()
    assert done == ["later", "change", "committed"]
    with pytest.raises(JobConflict):
        await database.write(fails, at_commit=lambda: done.append("failed"))
    assert "failed" not in done
