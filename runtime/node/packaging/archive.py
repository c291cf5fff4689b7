"""Unpacks an uploaded archive of code, which is a tar.gz and may be hostile.

Only files, folders, and links to files or folders of the same archive are accepted. A path whose text leaves the folder
is refused. Symbolic links are made after all files, so no file can be written through a link. This module does not rely
on the filters of `tarfile`, because they have had security holes (CVE-2025-4517).
"""

from __future__ import annotations

import gzip
import io
import math
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self, cast

from ....errors import CodeError
from .code import MAX_CODE_BYTES, MAX_FILES, make_empty, utf8

MAX_PATH_BYTES = 512
MAX_SEGMENT_BYTES = 255

_PACK_REMEDY = "Pack the folder with `pilotflame deploy`, or with plain `tar czf`."
_WEIGHTS_REMEDY = "Put weights in a snapshot folder."
# The decompressed stream may have this many bytes more than its files. 4096 bytes are enough for the headers and the
# padding of a member.
_MAX_MORE_BYTES = MAX_FILES * 4096
# The largest sizes of all headers of one member, of one extending header, and of all extending headers of an archive.
# Extending headers contain long names, times and attributes. Python before 3.11.10 and 3.12.6 needs n**2 steps for n
# digits in an extending header.
_MAX_READ_BYTES, _MAX_EXTENDING_BYTES, _MAX_ALL_BYTES = 128 << 10, 4 << 10, 4 << 20
# Count each byte of a global header this many times, because tarfile copies the fields of global headers for each
# member.
_GLOBAL_WEIGHT = 2048
_EXTENDING = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)
# The exceptions that gzip and tarfile raise for a broken archive. ValueError and LookupError mean malformed PAX
# headers, RecursionError a long chain of them.
_BROKEN = (
    tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError, LookupError, RecursionError,
)  # fmt: skip


def unpack(archive: bytes | IO[bytes], into: Path, most_bytes: int = MAX_CODE_BYTES) -> None:
    """Unpack a tar.gz into the folder `into`, which must be empty or not exist. The unpacked files may have at most
    `most_bytes` in all.

    Raise CodeError if the archive is refused. Then `into` is removed.
    """
    make_empty(into)
    try:
        _Unpacker(into, most_bytes).run(io.BytesIO(archive) if isinstance(archive, bytes) else archive)
    except BaseException as error:
        shutil.rmtree(into)
        if isinstance(error, _BROKEN):
            raise CodeError(f"The archive is not a complete tar.gz: {error}.", remedy=_PACK_REMEDY) from error
        raise


class _Bounded(gzip.GzipFile):
    """Decompresses a gzip stream. Raises CodeError if the stream or the headers of a member have more bytes than an
    archive may have.
    """

    most_bytes: int
    """How many bytes the files may have in all."""
    header_bytes: float = _MAX_READ_BYTES
    """How many bytes may still be read for the headers of the next member; infinity while the member's content is read."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.header_bytes -= len(data)
        if self.tell() > self.most_bytes + _MAX_MORE_BYTES:
            raise CodeError(f"The archive exceeds {self.most_bytes / 2**20:.0f} MiB.", remedy=_WEIGHTS_REMEDY)
        if self.header_bytes < 0:
            raise _large_headers()
        return data


def _counted_headers() -> type[tarfile.TarInfo]:
    """Return a class of headers. It raises CodeError if an extending header, or all such headers together, have too many bytes."""
    left_bytes = _MAX_ALL_BYTES

    class LimitedTarInfo(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            nonlocal left_bytes
            found = super().frombuf(buf, encoding, errors)
            if found.type in _EXTENDING:
                left_bytes -= found.size * (_GLOBAL_WEIGHT if found.type == tarfile.XGLTYPE else 1)
                if left_bytes < 0 or found.size > _MAX_EXTENDING_BYTES:
                    raise _large_headers()
            return found

    return LimitedTarInfo


class _Unpacker:
    def __init__(self, into: Path, most_bytes: int) -> None:
        self._into, self._most_bytes = into, most_bytes
        # The target of each symbolic link, by the link's name. An empty file stands in the link's place until all
        # members are unpacked.
        self._links: dict[str, str] = {}
        self._bytes = 0

    def run(self, archive: IO[bytes]) -> None:
        with _Bounded(fileobj=archive, mode="rb") as stream:
            stream.most_bytes = self._most_bytes
            self._unpack(stream)
        for name, target in self._links.items():
            if target in self._links or not (self._into / target).exists():
                raise _refused(name, f"is a link to {target!r}, which is no file or folder of the archive")
            if not target or name.startswith(f"{target}/"):
                raise _refused(name, "is a link to a folder that holds it")
        for name, target in self._links.items():
            (self._into / name).unlink()
            (self._into / name).symlink_to(posixpath.relpath(target, posixpath.dirname(name) or "."))

    def _unpack(self, stream: _Bounded) -> None:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_counted_headers()) as tar:
            for count, member in enumerate(_members(stream, tar), 1):
                if count > MAX_FILES:
                    raise _refused(member.name, f"exceeds the limit of {MAX_FILES} members")
                self._take(tar, member)
            # Read to the end of the stream, since gzip verifies its checksum only there.
            while stream.read(1 << 16):
                pass

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = checked_path(member.name, member.name)
        path = self._into / name
        if member.isdir() and path.is_dir():
            return
        if path.exists():
            raise _refused(member.name, "is a duplicate")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise _refused(member.name, "is below a file or a link") from None
        if member.isdir():
            path.mkdir()
        elif member.issym():
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            self._links[name] = checked_path(target, member.name)
            path.touch()
        elif member.islnk():
            self._hardlink(path, member)
        elif member.isreg() and not member.issparse():
            self._count(member, member.size)
            with cast("IO[bytes]", tar.extractfile(member)) as source, path.open("xb") as file:
                shutil.copyfileobj(source, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
        else:
            raise _refused(member.name, "is neither a file, nor a folder, nor a link")

    def _hardlink(self, path: Path, member: tarfile.TarInfo) -> None:
        """Copy the file that a hard link names, instead of linking it, so that no two names share a file on disk."""
        name = checked_path(member.linkname, member.name)
        if name in self._links or not (self._into / name).is_file():
            raise _refused(member.name, f"is a hard link to {member.linkname!r}, which is no earlier file")
        self._count(member, (self._into / name).stat().st_size)
        shutil.copy(self._into / name, path)

    def _count(self, member: tarfile.TarInfo, size: int) -> None:
        self._bytes += size
        if self._bytes > self._most_bytes:
            limit = f"{self._most_bytes / 2**20:.0f} MiB"
            raise CodeError(f"The archive's files exceed {limit} at {member.name!r}.", remedy=_WEIGHTS_REMEDY)


def _members(stream: _Bounded, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members. Limit the bytes of their headers, and remove the fields of the headers, because tarfile keeps
    all members in memory.
    """
    while True:
        stream.header_bytes = _MAX_READ_BYTES
        member = tar.next()
        stream.header_bytes = math.inf
        if member is None:
            return
        member.pax_headers = {}
        yield member


def checked_path(path: str, member: str) -> str:
    """Return `path` relative to the archive's root, without `./`. The root itself is "".

    Raise CodeError, which names the member, if the path leaves the root or is too long.
    """
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if path.startswith("/") or ".." in segments:
        raise _refused(member, f"leaves the folder, to {path!r}")
    lengths = [len(segment) + 1 for segment in map(utf8, segments)]
    if sum(lengths) > MAX_PATH_BYTES or max(lengths, default=0) > MAX_SEGMENT_BYTES + 1:
        raise _refused(member, f"is longer than {MAX_PATH_BYTES} bytes")
    return "/".join(segments)


def _large_headers() -> CodeError:
    return CodeError("The archive's headers have too many bytes.", remedy=_PACK_REMEDY)


def _refused(name: str, reason: str) -> CodeError:
    return CodeError(f"The archive's member {name!r:.200} {reason}.", remedy=_PACK_REMEDY)
