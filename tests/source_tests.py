"""Tests of a source of weights: sizes, ranges, versions, names, and what is written."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pilotflame.errors import SnapshotChanged, SourceMissing
from pilotflame.snapshot.sources.source import Connection, Listing, Source, Writable

LARGE = "model.safetensors"
SMALL = "d/ä b+c%.json"
OBJECTS = {LARGE: hashlib.shake_256(b"weights").digest(1 << 20), SMALL: b"0123456789", "config.json": b"{}"}
"""The objects of the tested source, by name."""


@contextmanager
def connected(source: Source) -> Iterator[Connection]:
    """Yield a connection that is closed at the end."""
    connection = source.connect()
    try:
        yield connection
    finally:
        connection.close()


def read(source: Source, name: str, size: int, begin: int = 0) -> bytes:
    """Return up to `size` bytes of an object, from byte `begin` on."""
    buffer = bytearray(size)
    return bytes(buffer[: source.read_into(name, begin, memoryview(buffer))])


def read_range(connection: Connection, begin: int, end: int, version: str = "", name: str = LARGE) -> bytes:
    """Return the bytes [begin, end) of an object. The buffer is larger, so that surplus bytes would be
    noticed.
    """
    connection.begin(name, begin, end, version)
    buffer = memoryview(bytearray(end - begin + 10))
    done = 0
    while count := connection.read_into(buffer[done:]):
        done += count
    return bytes(buffer[:done])


class SourceTests:
    """Tests of a `Source`, and of the optional interfaces `Listing` and `Writable` if it has them.

    Needs the fixture `source`: a source that has exactly OBJECTS. If it is writable, each test needs a new one.
    """

    def test_each_object_has_a_size(self, source: Source) -> None:
        assert {name: source.stat(name).size_bytes for name in OBJECTS} == {
            name: len(data) for name, data in OBJECTS.items()
        }

    def test_the_size_of_a_read_is_limited_by_the_view_and_the_object(self, source: Source) -> None:
        assert read(source, SMALL, 4, 3) == b"3456"
        assert read(source, SMALL, 4, 8) == b"89"
        assert read(source, LARGE, 1000, 777) == OBJECTS[LARGE][777:1777]

    @pytest.mark.parametrize("name", ["missing", "d/missing"])
    def test_a_missing_object_is_named(self, source: Source, name: str) -> None:
        with pytest.raises(SourceMissing, match="missing") as caught:
            source.stat(name)
        assert caught.value.remedy

    @pytest.mark.parametrize(
        "name", ["../x", "/x", "", ".", "a/", "a//b", "a/../b", "a\x00", "a\nb", "a\\b", "x" * 2000]
    )
    def test_a_name_that_leads_out_is_refused(self, source: Source, name: str) -> None:
        with pytest.raises(SourceMissing):
            source.stat(name)

    def test_ranges_follow_each_other_on_one_connection(self, source: Source) -> None:
        data = OBJECTS[LARGE]
        with connected(source) as connection:
            for begin, end in ((0, 1), (500, 300_000), (len(data) - 7, len(data)), (0, len(data))):
                assert read_range(connection, begin, end) == data[begin:end]
            assert read_range(connection, 2, 5, name=SMALL) == b"234"

    def test_bytes_are_written_to_the_callers_view_alone(self, source: Source) -> None:
        memory, at = bytearray(b"\xaa" * 300_000), 5000
        with connected(source) as connection:
            assert connection.begin(LARGE, 10, 200_010).size_bytes == len(OBJECTS[LARGE])
            while count := connection.read_into(memoryview(memory)[at : at + 100_000]):
                at += count
        assert memory[5000:at] == OBJECTS[LARGE][10:200_010]
        assert set(memory[:5000]) == set(memory[at:]) == {0xAA}

    def test_the_rest_of_a_range_is_dropped_by_the_next(self, source: Source) -> None:
        with connected(source) as connection:
            connection.begin(LARGE, 0, len(OBJECTS[LARGE]))
            assert connection.read_into(memoryview(bytearray(100))) > 0
            assert read_range(connection, 77, 1077) == OBJECTS[LARGE][77:1077]

    def test_an_object_of_another_version_has_changed(self, source: Source) -> None:
        version = source.stat(LARGE).version
        with connected(source) as connection:
            assert connection.begin(LARGE, 0, 10, version).version == version
        with connected(source) as connection, pytest.raises(SnapshotChanged) as caught:
            connection.begin(LARGE, 0, 10, '"another version"')
        assert caught.value.details["object"] == LARGE

    def test_a_missing_object_is_named_by_a_connection_too(self, source: Source) -> None:
        with connected(source) as connection, pytest.raises(SourceMissing, match="missing"):
            connection.begin("missing", 0, 10)

    def test_a_connection_is_closed_or_released_at_any_time(self, source: Source) -> None:
        for end in ("close", "release"):
            connection = source.connect()
            read_range(connection, 0, 10)
            getattr(connection, end)()
            connection.close()
        source.connect().close()

    def test_threads_read_at_the_same_time(self, source: Source) -> None:
        data, parts = OBJECTS[LARGE], dict[int, bytes]()

        def fetch(begin: int) -> None:
            with connected(source) as connection:
                parts[begin] = read_range(connection, begin, begin + len(data) // 4)

        threads = [
            threading.Thread(target=fetch, args=(begin,)) for begin in range(0, len(data), len(data) // 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert b"".join(parts[begin] for begin in sorted(parts)) == data

    def test_a_listing_has_all_names_in_order(self, source: Source) -> None:
        if not isinstance(source, Listing):
            pytest.skip("the source is no Listing")
        assert source.names() == sorted(OBJECTS)

    def test_what_is_put_is_read(self, source: Source, tmp_path: Path) -> None:
        if not isinstance(source, Writable):
            pytest.skip("the source is not Writable")
        path, parts = tmp_path / "put", list[int]()
        path.write_bytes(OBJECTS[LARGE])
        source.put("new/file", path, parts.append)
        source.put("new/größe/重み.bin", b"bytes")
        assert sum(parts) == len(OBJECTS[LARGE])
        assert read(source, "new/file", 1 << 21) == OBJECTS[LARGE]
        assert read(source, "new/größe/重み.bin", 10) == b"bytes"
        assert source.names() == sorted([*OBJECTS, "new/file", "new/größe/重み.bin"])
