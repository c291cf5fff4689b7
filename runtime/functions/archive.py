"""Taking in an archive of code from somebody else: a tar.gz, believed in nothing.

Only files, folders, and links to files or folders of the same archive are taken. Every path is checked by its
text alone, and links are made last, so that no file is ever written through one: that does not depend on
which mistakes the standard library's own filter still has (CVE-2025-4517), which is asked all the same.
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
from .code import MAX_CODE_BYTES, MAX_FILES

MAX_PATH_BYTES = 512
MAX_SEGMENT_BYTES = 255

_REMEDY = "Pack the folder with `pilotflame deploy`, or with plain `tar czf`."
_PIECE_BYTES = 64 * 1024
# Headers and padding: each member has at most a few blocks beside its content.
_MAX_STREAM_BYTES = MAX_CODE_BYTES + MAX_FILES * 4096
# What a broken archive makes gzip and tarfile raise; ValueError and LookupError are malformed PAX headers.
_BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError, LookupError)


def unpack(archive: bytes | Path, into: Path) -> None:
    """Unpack a tar.gz into the new or empty folder `into`; if it is refused, nothing is left."""
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise CodeError(f"{into} is not empty.", remedy="Code is only put into a new folder.")
    try:
        with _opened(archive) as stream:
            _Unpacking(into).run(stream)
    except _BROKEN as error:
        shutil.rmtree(into)
        raise CodeError(f"The archive is not a whole tar.gz: {error}.", remedy=_REMEDY) from error
    except BaseException:
        shutil.rmtree(into)
        raise


def _opened(archive: bytes | Path) -> BinaryIO:
    return archive.open("rb") if isinstance(archive, Path) else io.BytesIO(archive)


class _Bounded:
    """A decompressed stream that ends with an error where a bomb would go on."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = _MAX_STREAM_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise CodeError(
                f"The archive holds more than {MAX_CODE_BYTES / 2**20:.0f} MiB.",
                remedy="Put weights in a snapshot folder.",
            )
        return data


class _Unpacking:
    """One archive on its way into one folder."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self._files: set[str] = set()
        self._folders: set[str] = {""}
        self._links: dict[str, str] = {}
        self._bytes = 0
        self._members = 0

    def run(self, stream: BinaryIO) -> None:
        with (
            gzip.GzipFile(fileobj=stream, mode="rb") as unzipped,
            tarfile.open(fileobj=cast("BinaryIO", bounded := _Bounded(unzipped)), mode="r|") as tar,
        ):
            for member in tar:
                self._members += 1
                if self._members > MAX_FILES:
                    raise _refused(
                        member.name, f"is one more than the {MAX_FILES} members an archive may have"
                    )
                self._take(tar, member)
            while bounded.read(_PIECE_BYTES):  # to the end, where gzip compares its checksum
                pass
        for name, target in self._links.items():
            self._link(name, target)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _checked_name(member.name)
        if member.isdir():
            if name in self._files or name in self._links:
                raise _refused(member.name, "comes twice")
            self._folder(name, member.name)
            return
        self._new(name, member.name)
        if member.issym():
            self._links[name] = _symlink_target(name, member)
            self._second_opinion(member)
        elif member.islnk():
            self._hardlink(name, member)
        elif member.isreg():
            self._second_opinion(member)
            self._file(tar, name, member)
        else:
            raise _refused(member.name, "is neither a file, nor a folder, nor a link")

    def _new(self, name: str, shown: str) -> None:
        """A path that nothing has, below folders only."""
        if not name or name in self._files or name in self._folders or name in self._links:
            raise _refused(shown, "comes twice")
        self._folder(posixpath.dirname(name), shown)

    def _folder(self, name: str, shown: str) -> None:
        if name in self._folders:
            return
        self._folder(posixpath.dirname(name), shown)
        if name in self._files or name in self._links:
            raise _refused(shown, f"lies below {name}, which is not a folder")
        (self._into / name).mkdir()
        self._folders.add(name)

    def _second_opinion(self, member: tarfile.TarInfo) -> None:
        try:
            tarfile.data_filter(member, str(self._into))
        except tarfile.FilterError as error:
            raise _refused(member.name, f"is unsafe ({error})") from error

    def _file(self, tar: tarfile.TarFile, name: str, member: tarfile.TarInfo) -> None:
        self._bytes += member.size
        if self._bytes > MAX_CODE_BYTES:
            raise CodeError(
                f"The archive holds over {MAX_CODE_BYTES / 2**20:.0f} MiB, counted at {member.name!r}.",
                remedy="Put weights in a snapshot folder.",
            )
        source = tar.extractfile(member)
        if source is None or member.issparse():
            raise _refused(member.name, "is a sparse file")
        path = self._into / name
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        self._files.add(name)

    def _hardlink(self, name: str, member: tarfile.TarInfo) -> None:
        """A second name of an earlier file: copied, so that two names never share one file."""
        target = _checked_name(member.linkname)
        if target not in self._files:
            raise _refused(
                member.name, f"is a hard link to {member.linkname!r}, which is no earlier file of the archive"
            )
        self._bytes += (self._into / target).stat().st_size
        if self._bytes > MAX_CODE_BYTES:
            raise _refused(member.name, f"passes the limit of {MAX_CODE_BYTES / 2**20:.0f} MiB")
        shutil.copy(self._into / target, self._into / name)
        self._files.add(name)

    def _link(self, name: str, target: str) -> None:
        if target not in self._files and target not in self._folders:
            raise _refused(name, f"is a link to {target!r}, which is no file or folder of the archive")
        if target == "" or name.startswith(f"{target}/"):
            raise _refused(name, "is a link to a folder that holds it")
        relative = posixpath.relpath(target, posixpath.dirname(name) or ".")
        (self._into / name).symlink_to(relative)


def _symlink_target(name: str, member: tarfile.TarInfo) -> str:
    """The path in the archive that a link means; its text tells, since no link leads through a link."""
    if member.linkname.startswith("/"):
        raise _refused(member.name, f"is a link to the absolute path {member.linkname!r}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
    if target == ".." or target.startswith("../"):
        raise _refused(member.name, f"is a link that leaves the folder, to {member.linkname!r}")
    return "" if target == "." else target


def _checked_name(name: str) -> str:
    """The path without `./`; the empty text for the root itself."""
    if name.startswith("/"):
        raise _refused(name, "is an absolute path")
    segments = [segment for segment in name.split("/") if segment not in ("", ".")]
    if ".." in segments:
        raise _refused(name, "leaves the folder")
    try:
        lengths = [len(segment.encode()) for segment in segments]
    except UnicodeEncodeError as error:
        raise _refused(name, "is not UTF-8") from error
    if (
        "\0" in name
        or sum(lengths) + len(lengths) > MAX_PATH_BYTES
        or max(lengths, default=0) > MAX_SEGMENT_BYTES
    ):
        raise _refused(name, f"is longer than {MAX_PATH_BYTES} bytes, or is no path")
    return "/".join(segments)


def _refused(name: str, reason: str) -> CodeError:
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    return CodeError(f"The archive's member {shown!r} {reason}.", remedy=_REMEDY)
