"""Unpacking an uploaded archive of code: a tar.gz that may be hostile.

Only files, folders, and links to files or folders of the same archive are accepted. Every path is checked by its text
alone, and links are made last, so no file is ever written through a link. The standard library's own filter has had
holes (CVE-2025-4517), so it is only a second check here.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from ...errors import CodeError
from .code import MAX_CODE_BYTES, MAX_FILES, make_empty

MAX_PATH_BYTES = 512
MAX_SEGMENT_BYTES = 255

_PACK_REMEDY = "Pack the folder with `pilotflame deploy`, or with plain `tar czf`."
_WEIGHTS_REMEDY = "Put weights in a snapshot folder."
_PIECE_BYTES = 64 * 1024
# Each member has at most a few blocks of headers and padding besides its content.
_MAX_STREAM_BYTES = MAX_CODE_BYTES + MAX_FILES * 4096
# What gzip and tarfile raise for a broken archive; ValueError and LookupError are malformed PAX headers.
_BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError, LookupError)


def unpack(archive: bytes | Path, into: Path) -> None:
    """Unpack a tar.gz into the new or empty folder `into`. Remove `into` again if the archive is refused."""
    make_empty(into)
    try:
        with archive.open("rb") if isinstance(archive, Path) else io.BytesIO(archive) as stream:
            _Unpacker(into).run(stream)
    except _BROKEN as error:
        shutil.rmtree(into)
        raise CodeError(f"The archive is not a complete tar.gz: {error}.", remedy=_PACK_REMEDY) from error
    except BaseException:
        shutil.rmtree(into)
        raise


class _Bounded:
    """A decompressed stream that raises CodeError once it exceeds the limit of an archive."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = _MAX_STREAM_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise CodeError(f"The archive exceeds {MAX_CODE_BYTES / 2**20:.0f} MiB.", remedy=_WEIGHTS_REMEDY)
        return data


class _Unpacker:
    """Unpacks one archive into one folder."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self._files: set[str] = set()
        self._folders: set[str] = {""}
        self._links: dict[str, str] = {}
        self._bytes = 0

    def run(self, stream: BinaryIO) -> None:
        with (
            gzip.GzipFile(fileobj=stream, mode="rb") as unzipped,
            tarfile.open(fileobj=cast("BinaryIO", bounded := _Bounded(unzipped)), mode="r|") as tar,
        ):
            for count, member in enumerate(tar, 1):
                if count > MAX_FILES:
                    raise _refused(member.name, f"exceeds the limit of {MAX_FILES} members")
                self._take(tar, member)
            # gzip compares its checksum only at the end of the stream.
            while bounded.read(_PIECE_BYTES):
                pass
        for name, target in self._links.items():
            self._link(name, target)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _checked_name(member.name)
        if member.isdir():
            if name in self._files or name in self._links:
                raise _refused(member.name, "is a duplicate")
            self._folder(name, member.name)
            return
        if not name or name in self._files or name in self._folders or name in self._links:
            raise _refused(member.name, "is a duplicate")
        self._folder(posixpath.dirname(name), member.name)
        if member.issym():
            self._links[name] = _symlink_target(name, member)
            self._check_with_tarfile(member)
        elif member.islnk():
            self._hardlink(name, member)
        elif member.isreg():
            self._check_with_tarfile(member)
            self._file(tar, name, member)
        else:
            raise _refused(member.name, "is neither a file, nor a folder, nor a link")

    def _folder(self, name: str, shown: str) -> None:
        """Create a folder and its parents, for the member `shown`."""
        if name in self._folders:
            return
        self._folder(posixpath.dirname(name), shown)
        if name in self._files or name in self._links:
            raise _refused(shown, f"is below {name}, which is not a folder")
        (self._into / name).mkdir()
        self._folders.add(name)

    def _check_with_tarfile(self, member: tarfile.TarInfo) -> None:
        try:
            tarfile.data_filter(member, str(self._into))
        except tarfile.FilterError as error:
            raise _refused(member.name, f"is unsafe ({error})") from error

    def _file(self, tar: tarfile.TarFile, name: str, member: tarfile.TarInfo) -> None:
        self._count(member, member.size)
        source = tar.extractfile(member)
        if source is None or member.issparse():
            raise _refused(member.name, "is a sparse file")
        path = self._into / name
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        self._files.add(name)

    def _hardlink(self, name: str, member: tarfile.TarInfo) -> None:
        """Copy the earlier file, so that two names never share one file."""
        target = _checked_name(member.linkname)
        if target not in self._files:
            raise _refused(member.name, f"is a hard link to {member.linkname!r}, which is no earlier file")
        self._count(member, (self._into / target).stat().st_size)
        shutil.copy(self._into / target, self._into / name)
        self._files.add(name)

    def _count(self, member: tarfile.TarInfo, size: int) -> None:
        self._bytes += size
        if self._bytes > MAX_CODE_BYTES:
            raise CodeError(
                f"The archive's files exceed {MAX_CODE_BYTES / 2**20:.0f} MiB at {member.name!r}.",
                remedy=_WEIGHTS_REMEDY,
            )

    def _link(self, name: str, target: str) -> None:
        if target not in self._files and target not in self._folders:
            raise _refused(name, f"is a link to {target!r}, which is no file or folder of the archive")
        if target == "" or name.startswith(f"{target}/"):
            raise _refused(name, "is a link to a folder that holds it")
        (self._into / name).symlink_to(posixpath.relpath(target, posixpath.dirname(name) or "."))


def _symlink_target(name: str, member: tarfile.TarInfo) -> str:
    """Return the link's target as a path in the archive. No link leads through a link, so its text suffices."""
    if member.linkname.startswith("/"):
        raise _refused(member.name, f"is a link to the absolute path {member.linkname!r}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
    if target == ".." or target.startswith("../"):
        raise _refused(member.name, f"is a link that leaves the folder, to {member.linkname!r}")
    return "" if target == "." else target


def _checked_name(name: str) -> str:
    """Return the path without `./`; "" is the root itself."""
    if name.startswith("/"):
        raise _refused(name, "is an absolute path")
    segments = [segment for segment in name.split("/") if segment not in ("", ".")]
    if ".." in segments:
        raise _refused(name, "leaves the folder")
    try:
        lengths = [len(segment.encode()) for segment in segments]
    except UnicodeEncodeError as error:
        raise _refused(name, "is not UTF-8") from error
    too_long = sum(lengths) + len(lengths) > MAX_PATH_BYTES or max(lengths, default=0) > MAX_SEGMENT_BYTES
    if too_long or "\0" in name:
        raise _refused(name, f"is longer than {MAX_PATH_BYTES} bytes, or is not a path")
    return "/".join(segments)


def _refused(name: str, reason: str) -> CodeError:
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    return CodeError(f"The archive's member {shown!r} {reason}.", remedy=_PACK_REMEDY)
