"""Defines the interface of a source: objects, which are named and immutable byte strings, below one URL.

Modules such as `folder`, `http` and `s3` implement the interface. A source returns the sizes and versions of objects,
and opens connections. A connection reads one range of bytes after another into the caller's memory. To read in
parallel, open several connections. A connection does not retry. The caller may retry after SourceUnavailable.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from ...errors import SnapshotChanged, SnapshotCorrupt, SourceError

MAX_NAME_CHARS = 1024
# A listing with more objects is an error, because a deploy may name a whole bucket by mistake.
LISTED_AT_MOST = 100_000
ReportProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The size and version of an object. The version (such as an ETag) changes when the bytes change."""

    size_bytes: int
    version: str = ""


class Connection(Protocol):
    """Reads one range of bytes after another. Not thread-safe, except that any thread may call `close`."""

    @property
    def used(self) -> bool:
        """True if the network connection was used before this object got it, for example by an earlier fetch."""

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        """Request bytes [begin, end) of object `name`, 0 <= begin < end <= size, and wait for the response.

        Return the size and version in the response. If the previous range was not read to its end, its remaining
        bytes are dropped. Raise SnapshotChanged if `version` is not "" and the object has another version.
        Raise SourceMissing, SourceDenied, another SourceError or, if a retry may help, SourceUnavailable.
        """

    def read_into(self, view: memoryview) -> int:
        """Read the next bytes of the range into `view`. Return their number: 0 only at the range's end.

        Raise SourceUnavailable if the response ends before the range, or if nothing arrives for too long.
        """

    def close(self) -> None:
        """Close the connection, if it is open. A waiting `read_into` raises SourceUnavailable at once."""

    def release(self) -> None:
        """End the use of this object. The source may keep the network connection for its next requests.

        The thread that uses the connection calls `release` last. Afterwards, `close` does nothing.
        """


class Source(Protocol):
    """A set of objects, which are named and immutable byte strings. Any thread may use it."""

    @property
    def url(self) -> str:
        """The URL of the source, without credentials. It is shown in messages, and identifies the source."""

    def stat(self, name: str) -> ObjectInfo:
        """Return the size and version of `name`. Raise SourceMissing."""

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """Fill `view` with the bytes of object `name` that start at `offset`, and return their number.

        The number is smaller than the size of `view` only if the object ends before `view` is full.
        """

    def connect(self) -> Connection:
        """Return a connection. Its first `begin` may open the network connection, or take one that the source keeps."""


@runtime_checkable
class Listing(Protocol):
    """A source that can be listed: a folder, S3."""

    def names(self) -> list[str]:
        """Return the names of all objects below the URL, sorted and relative to it."""


@runtime_checkable
class Kept(Protocol):
    """A source that is worth keeping for several fetches, because it has connections, clients and tokens."""

    def forget(self) -> None:
        """Forget the infos of the objects. The objects may have changed since they were read."""

    def prepare(self) -> None:
        """Do the work of the first request in advance, such as imports. Raise SourceError or SourceDenied."""


@runtime_checkable
class Pinnable(Protocol):
    """A source whose URL may later name other objects, such as the URL of a branch on the hub."""

    def pinned(self) -> str:
        """Return the URL of exactly the objects that this source reads."""


@runtime_checkable
class Served(Protocol):
    """A source whose URL does not fully determine its server: secrets may name another endpoint."""

    def served_at(self, name: str) -> str:
        """Return the URL at which object `name` is requested from the server, without credentials."""


@runtime_checkable
class VersionedByContent(Protocol):
    """A source in which objects with the same version and size have the same bytes under any name: S3, the hub."""

    versioned_by_content: bool


@dataclass(frozen=True, slots=True)
class Blob:
    """A byte string of `size_bytes` that contains objects of a source, such as a layer in a registry.

    `digest` is its digest with the name of the algorithm, as in "sha256:…". `objects` has the name and the offset of
    each object in it.
    """

    digest: str
    size_bytes: int
    objects: tuple[tuple[str, int], ...]


@runtime_checkable
class Attested(Protocol):
    """A source that knows cryptographic digests of its blobs. A fetch compares them (see `fetching.blob_digests`)."""

    def blob_of(self, name: str) -> Blob:
        """Return the byte string that contains object `name`."""

    def read_blob(self, blob: Blob, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of `blob` that start at `offset`. Raise what Source.read_into raises."""

    def corrupt(self, digest: str, fault: str) -> SnapshotCorrupt:
        """Return the error for a byte string that does not have its digest."""


@runtime_checkable
class Writable(Source, Listing, Protocol):
    """A source that can be written to: a folder, S3."""

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """Store `content` (bytes, or the path of a file) atomically as object `name`.

        `put` calls `sent` with the number of bytes of each part that it has written.
        """


@runtime_checkable
class WrittenWhole(Source, Listing, Protocol):
    """A source whose objects are all written together: an artifact in a registry."""

    def begin_writing(self) -> None:
        """From now on, also request the right to write. Raise SourceError if the URL cannot be written to."""

    def put_all(
        self, files: Mapping[str, Path | bytes], sent: Callable[[int], None] | None = None
    ) -> set[str]:
        """Replace all objects by `files` at once. Return the names of the files that the server already had.

        Call `sent` with the number of bytes of each part that was sent, or that the server already had. Raise
        SnapshotChanged if a file changes meanwhile.
        """


class ByteCounter:
    """Adds up the bytes that are done, and calls `progress` with this sum and the total. Thread-safe."""

    def __init__(self, total_bytes: int, progress: ReportProgress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            if self._progress is not None:
                self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


def listed(url: str, names: Iterable[str]) -> list[str]:
    """Return `names`, the objects at `url`, as a list. Raise SourceError if there are more than LISTED_AT_MOST."""
    found = list(islice(names, LISTED_AT_MOST + 1))
    if len(found) > LISTED_AT_MOST:
        fault = f"{url} has more than {LISTED_AT_MOST} objects."
        raise SourceError(fault, remedy="Name a prefix with fewer objects, or one file.")
    return found


def below(folder: str, names: Iterable[str]) -> list[str]:
    """Return the names in a folder and its subfolders, sorted and relative to the folder. Leave out hidden files."""
    start = f"{folder}/" if folder else ""
    found = (name.removeprefix(start) for name in names if name.startswith(start))
    return sorted(name for name in found if name_fault(name) is None and "/." not in f"/{name}")


def opened(content: Path | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def read_all(source: Source, name: str, most_bytes: int) -> bytes:
    """Return the bytes of object `name`, or its first `most_bytes` if it is larger."""
    text = bytearray(min(source.stat(name).size_bytes, most_bytes))
    return bytes(text[: source.read_into(name, 0, memoryview(text))])


def new_buffer(size_bytes: int) -> memoryview:
    """Return memory for received bytes. Its pages are allocated when they are first written to.

    A bytearray would write zeros to all of its memory at once, with the interpreter's lock held, which takes a
    millisecond or two.
    """
    return memoryview(mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))


def changed(url: str, name: str, how: str) -> SnapshotChanged:
    remedy = "Publish new weights under a new name, with a new manifest."
    return SnapshotChanged(
        f"{url} changed while it was read: {how}.", remedy=remedy, details={"object": name}
    )


def same_version(one: str, other: str) -> bool:
    """Return True if two versions mean the same bytes. Ignore the W/ that a proxy may prepend to an ETag."""
    return one.removeprefix("W/") == other.removeprefix("W/")


def name_fault(name: str) -> str | None:
    """Return why `name` is not allowed as the relative name of a file, or None if it is allowed."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it is longer than {MAX_NAME_CHARS} characters"
    if "\\" in name or any(char < " " or "\ud800" <= char <= "\udfff" for char in name):
        return "it holds a backslash, a control character or an unpaired surrogate"
    if name.startswith("/"):
        return "it is absolute"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "it holds an empty, '.' or '..' component"
    return None
