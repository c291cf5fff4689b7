"""The store of usage: sums by hour and day, what is kept for how long, and files that are damaged or older."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.billing.usage import Usage
from pilotflame.runtime.ground.billing.usage_store import (
    DAY_S,
    HOUR_S,
    HOURS_KEPT_S,
    Standing,
    UsageKey,
    UsageQuery,
    UsageRecord,
    UsageStore,
)

# 2026-11-22T00:00Z
DAY = 20_779 * DAY_S
FOREVER = 1e11


@pytest.fixture
def store(tmp_path: Path) -> Iterator[UsageStore]:
    opened = UsageStore(tmp_path / "usage.sqlite3")
    opened.open()
    yield opened
    opened.close()


def used(function: str, busy_s: float, owner: str = "", standing: Standing = Standing()) -> UsageRecord:  # noqa: B008
    return UsageRecord(function, owner, Usage(busy_s=busy_s, cost=busy_s / 10), standing)


def read(
    store: UsageStore, by: UsageKey, since: float = DAY, at: float = DAY + DAY_S, **more: object
) -> dict[object, float]:
    query = UsageQuery(by, since, FOREVER, **more)  # type: ignore[arg-type]
    return {key: usage.busy_s for key, usage in store.read(query, at)}


def test_usage_is_summed_up_by_what_is_asked_for(store: UsageStore) -> None:
    store.add(DAY + 10, [used("a", 1, "key1"), used("b", 2, "key2")])
    store.add(DAY + 70, [used("a", 4, "key1")])
    store.add(DAY + HOUR_S, [used("a", 8, "key2")])
    assert read(store, UsageKey.FUNCTION) == {"a": 13, "b": 2}
    assert read(store, UsageKey.OWNER) == {"key1": 5, "key2": 10}
    assert read(store, UsageKey.HOUR) == {DAY: 7, DAY + HOUR_S: 8}
    assert read(store, UsageKey.DAY) == {DAY: 15}
    assert read(store, UsageKey.HOUR, functions=("b",)) == {DAY: 2}
    assert read(store, UsageKey.HOUR, functions=()) == {}
    # The sum includes the whole hour that contains `since`.
    assert read(store, UsageKey.FUNCTION, since=DAY + HOUR_S + 5) == {"a": 8}


def test_hours_are_forgotten_after_two_weeks_and_days_stay(store: UsageStore) -> None:
    store.add(DAY, [used("gone", 1)])
    at = DAY + HOURS_KEPT_S + DAY_S
    store.add(at, [used("here", 2)])
    store.forget_old(at)
    assert read(store, UsageKey.HOUR, at=at) == {at: 2}
    # Older usage is read from the days.
    assert read(store, UsageKey.FUNCTION, at=at) == {"gone": 1, "here": 2}
    store.forget_old(DAY + 401 * DAY_S)
    assert read(store, UsageKey.FUNCTION, at=at) == {"here": 2}


def test_today_and_the_standings_are_there_after_a_restart(tmp_path: Path) -> None:
    standing = Standing(day=20_779, seconds=7.0, worker_gb=0.5)
    for _ in range(2):
        store = UsageStore(tmp_path / "usage.sqlite3")
        store.open()
        store.add(DAY + 5, [used("a", 3, standing=standing)])
        store.close()
    store.open()
    assert store.today(DAY + 6) == {"a": (Usage(busy_s=6, cost=pytest.approx(0.6)), standing)}
    assert store.today(DAY + DAY_S) == {"a": (Usage(), standing)}
    store.close()


def test_what_is_written_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.sqlite3")
    store.open()
    store.add(DAY, [used("a", 3)])
    # Open the file like another process, while this process has not closed it.
    found = UsageStore(tmp_path / "usage.sqlite3")
    found.open()
    assert read(found, UsageKey.FUNCTION) == {"a": 3}
    found.close()
    store.close()


def test_a_file_of_a_release_that_knew_fewer_figures_is_extended(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "usage.sqlite3") as connection:
        for table in ("hours", "days"):
            connection.execute(
                f"CREATE TABLE {table} (start INTEGER, function TEXT, owner TEXT, busy_s REAL, cost REAL,"
                " PRIMARY KEY (start, function, owner)) WITHOUT ROWID"
            )
            connection.execute(f"INSERT INTO {table} VALUES ({DAY}, 'a', '', 5, 0.5)")
    connection.close()
    store = UsageStore(tmp_path / "usage.sqlite3")
    store.open()
    store.add(DAY, [used("a", 1)])
    assert read(store, UsageKey.FUNCTION) == {"a": 6}
    store.close()


def test_threads_that_write_at_the_same_time_lose_nothing(store: UsageStore) -> None:
    def write() -> None:
        for _ in range(20):
            store.add(DAY, [used("a", 1)])
            read(store, UsageKey.FUNCTION)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(store, UsageKey.FUNCTION) == {"a": 80}


@pytest.mark.parametrize("harm", ["no database", "a torn page", "a short file"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str) -> None:
    path = tmp_path / "usage.sqlite3"
    store = UsageStore(path)
    store.open()
    store.add(DAY, [used(f"f{number}", 1) for number in range(300)])
    store.close()
    whole = path.read_bytes()
    damaged = {
        "no database": b"no database" * 1000,
        "a torn page": whole[:8192] + b"\xa5" * 4096 + whole[12288:],
        "a short file": whole[: len(whole) // 2],
    }[harm]
    path.write_bytes(damaged)
    store.open()
    store.add(DAY, [used("a", 1)])
    assert read(store, UsageKey.FUNCTION) == {"a": 1}
    store.close()
    (aside,) = tmp_path.glob("usage.sqlite3.damaged-*")
    assert aside.read_bytes() == damaged
    assert str(aside) in caplog.text


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "usage.sqlite3").mkdir()
    with pytest.raises(GatewayError, match=r"usage\.sqlite3.* cannot be used"):
        UsageStore(tmp_path / "usage.sqlite3").open()


def test_a_closed_store_says_so(store: UsageStore) -> None:
    store.close()
    with pytest.raises(GatewayError, match="closed"):
        store.add(DAY, [used("a", 1)])
