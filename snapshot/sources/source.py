"""The interface of a source: named, immutable byte strings below one URL, read in ranges.

The backends are `folder`, `http` and `s3`. A source knows sizes and versions, and opens connections that stream one
range after another into the caller's memory; parallel reading takes several connections. Retrying is left to the
caller: the class of an error says whether it may help.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from ...errors import SnapshotChanged

MAX_NAME_CHARS = 1024
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The size of an object, and its version (such as an ETag), which changes when its bytes do."""

    size_bytes: int
    version: str = ""


class Connection(Protocol):
    """One stream of ranges. Not thread-safe, except that any thread may call `close`."""

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        """Request bytes [begin, end) of object `name`, 0 <= begin < end <= size, and wait for the response.

        Returns what the response says of the object. An earlier range that was not read to its end is dropped.
        Raises SnapshotChanged if the object is no longer of `version`, SourceMissing, SourceDenied, and
        SourceUnavailable if a retry may help.
        """

    def read_into(self, view: memoryview) -> int:
        """Read the next bytes of the range into `view` and return their count, which is 0 only at the range's end.

        Raises SourceUnavailable if the range ends early, or nothing arrives before the source's timeout.
        """

    def close(self) -> None:
        """Close. A read that waits in another thread raises SourceUnavailable at once. May be called twice."""


class Source(Protocol):
    """Named, immutable byte strings. Thread-safe."""

    @property
    def url(self) -> str:
        """The URL for messages and for keys; without credentials."""

    def stat(self, name: str) -> ObjectInfo:
        """Return the size and version of `name`. Raises SourceMissing."""

    def size(self, name: str) -> int:
        """Return the size of `name` in bytes. Raises SourceMissing."""

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """Fill `view` from `offset` on. Return the count of bytes, smaller than `view` only at the object's end."""

    def connect(self) -> Connection:
        """Return a new connection. It may be established lazily, by the first `begin`."""


@runtime_checkable
class Listing(Protocol):
    """A source that can be listed: a folder, S3."""

    def names(self) -> list[str]:
        """Return the names of all objects below the URL, sorted and relative to it."""


@runtime_checkable
class Writable(Source, Listing, Protocol):
    """A source that can be written to: a folder, S3."""

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """Store the bytes, or those of a file, as `name`, completely or not at all. `sent` receives counts of bytes."""


class ByteCounter:
    """Adds up bytes that are done and reports them. Thread-safe."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            if self._progress is not None:
                self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


def opened(content: Path | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def read_all(source: Source, name: str, most_bytes: int) -> bytes:
    """Return an object's bytes, at most the first `most_bytes`."""
    text = bytearray(min(source.size(name), most_bytes))
    return bytes(text[: source.read_into(name, 0, memoryview(text))])


def changed(url: str, name: str, how: str) -> SnapshotChanged:
    remedy = "Publish new weights under a new name, with a new manifest."
    return SnapshotChanged(
        f"{url} changed while it was read: {how}.", remedy=remedy, details={"object": name}
    )


def same_version(one: str, other: str) -> bool:
    """Return True if two versions name the same bytes. Proxies may weaken an ETag (W/"..."), keeping its opaque part."""
    return one.removeprefix("W/") == other.removeprefix("W/")


def name_fault(name: str) -> str | None:
    """Return why a file's name is not a plain relative one, or None if it is."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it is longer than {MAX_NAME_CHARS} characters"
    if "\\" in name or any(char < " " or "\ud800" <= char <= "\udfff" for char in name):
        return "it holds a backslash, a control character or half a character"
    if name.startswith("/"):
        return "it is absolute"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "it holds an empty, '.' or '..' component"
    return None
