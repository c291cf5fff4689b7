"""Where shards' bytes come from: named, immutable byte strings behind one URL, read in ranges.

A backend is a file: `folder`, `http`, `s3`. It gives sizes and versions, and connections that stream one range after
another into the caller's memory; who reads in parallel opens several. Retrying is the caller's: a source says what
kind of failure it was, in the words of the error tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

MAX_NAME_CHARS = 1024
_FIRST_PRINTABLE = 0x20
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a source knows of one object. `version` (an ETag, a version id) changes when its bytes may have."""

    size_bytes: int
    version: str = ""


class Connection(Protocol):
    """One stream of ranges. Used by one thread; `close` alone may be called from another."""

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        """Ask for bytes [begin, end) of object `name`, 0 <= begin < end <= size; waits until they start to come.

        Returns what the answer says of the object.

        With a `version`, only that one will do: SnapshotChanged if the object is another by now. SourceMissing,
        SourceDenied, and SourceUnavailable for what may pass when tried again. A range that was begun before and not
        read to its end is dropped.
        """
        ...

    def read_into(self, view: memoryview) -> int:
        """The next bytes of the range, in order, as many as are there and `view` takes; 0 only at its end.

        SourceUnavailable if the range breaks off, or nothing comes for the source's timeout.
        """
        ...

    def close(self) -> None:
        """Let go. A read that waits in another thread ends at once with SourceUnavailable. May be called twice."""
        ...


class Source(Protocol):
    """Named, immutable byte strings. Thread-safe."""

    @property
    def url(self) -> str:
        """Where this is, for messages and for remembering; no credentials in it."""
        ...

    def stat(self, name: str) -> ObjectInfo:
        """Size and version of `name`; SourceMissing if there is no such thing."""
        ...

    def size(self, name: str) -> int:
        """How many bytes `name` has; SourceMissing if there is no such thing."""
        ...

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """Fill `view` from `offset` on; returns the bytes written, fewer than asked only at the end."""
        ...

    def connect(self) -> Connection:
        """A connection of its own; it may be opened lazily, by the first `begin`."""
        ...


@runtime_checkable
class Listing(Protocol):
    """What sources that can be listed (a folder, S3) have besides."""

    def names(self) -> list[str]:
        """Every object under the URL, sorted, relative to it."""
        ...


@runtime_checkable
class Writable(Source, Listing, Protocol):
    """A source that can be written to: a folder, S3."""

    def put(
        self, name: str, content: Path | bytes, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Store a file's bytes, or these, as `name`, whole or not at all; progress is (bytes done, bytes in all)."""
        ...


def same_version(one: str, other: str) -> bool:
    """Whether two versions name the same bytes. What lies between may weaken a tag on its way (W/"..."); the opaque
    part is still the same."""
    return one.removeprefix("W/") == other.removeprefix("W/")


def name_fault(name: str) -> str | None:
    """What is wrong with a file's name as a plain relative one, in words; None if nothing is."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it is longer than {MAX_NAME_CHARS} characters"
    if "\\" in name or any(ord(char) < _FIRST_PRINTABLE or "\ud800" <= char <= "\udfff" for char in name):
        return "it holds a backslash, a control character or half a character"
    if name.startswith("/"):
        return "it is absolute"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "it holds an empty, '.' or '..' component"
    return None
