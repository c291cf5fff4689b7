"""Unpacks an uploaded archive of code, which is a tar.gz and may be hostile.

Only files, folders, and links to files or folders of the same archive are accepted. A path whose text leaves the folder
is refused. Symbolic links are made after all files, so no file can be written through a link. This module does not rely
on the filters of `tarfile`, because they have had security holes (CVE-2025-4517).
"""

from __future__ import annotations

import gzip
import io
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import IO, cast

from ...errors import CodeError
from .code import MAX_CODE_BYTES, MAX_FILES, make_empty, utf8

MAX_PATH_BYTES = 512
MAX_SEGMENT_BYTES = 255

_PACK_REMEDY = "Pack the folder with `pilotflame deploy`, or with plain `tar czf`."
_WEIGHTS_REMEDY = "Put weights in a snapshot folder."
# The limit of the decompressed stream. For the headers and the padding of a member, 4096 bytes suffice.
_MAX_STREAM_BYTES = MAX_CODE_BYTES + MAX_FILES * 4096
# The exceptions that gzip and tarfile raise for a broken archive. ValueError and LookupError mean malformed PAX
# headers.
_BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError, LookupError)


def unpack(archive: bytes, into: Path) -> None:
    """Unpack a tar.gz into the folder `into`, which must be empty or not exist.

    Raise CodeError if the archive is refused. Then `into` is removed.
    """
    make_empty(into)
    try:
        _Unpacker(into).run(archive)
    except BaseException as error:
        shutil.rmtree(into)
        if isinstance(error, _BROKEN):
            raise CodeError(f"The archive is not a complete tar.gz: {error}.", remedy=_PACK_REMEDY) from error
        raise


class _Bounded(gzip.GzipFile):
    """Decompresses a gzip stream. Raises CodeError if there are more bytes than an archive may have."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > _MAX_STREAM_BYTES:
            raise CodeError(f"The archive exceeds {MAX_CODE_BYTES / 2**20:.0f} MiB.", remedy=_WEIGHTS_REMEDY)
        return data


class _Unpacker:
    def __init__(self, into: Path) -> None:
        self._into = into
        # The target of each symbolic link, by the link's name. An empty file stands in the link's place until all
        # members are unpacked.
        self._links: dict[str, str] = {}
        self._bytes = 0

    def run(self, archive: bytes) -> None:
        with _Bounded(fileobj=io.BytesIO(archive)) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for count, member in enumerate(tar, 1):
                if count > MAX_FILES:
                    raise _refused(member.name, f"exceeds the limit of {MAX_FILES} members")
                self._take(tar, member)
            # Read to the end of the stream, since gzip verifies its checksum only there.
            while stream.read(1 << 16):
                pass
        for name, target in self._links.items():
            if target in self._links or not (self._into / target).exists():
                raise _refused(name, f"is a link to {target!r}, which is no file or folder of the archive")
            if not target or name.startswith(f"{target}/"):
                raise _refused(name, "is a link to a folder that holds it")
        for name, target in self._links.items():
            (self._into / name).unlink()
            (self._into / name).symlink_to(posixpath.relpath(target, posixpath.dirname(name) or "."))

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
        if self._bytes > MAX_CODE_BYTES:
            limit = f"{MAX_CODE_BYTES / 2**20:.0f} MiB"
            raise CodeError(f"The archive's files exceed {limit} at {member.name!r}.", remedy=_WEIGHTS_REMEDY)


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


def _refused(name: str, reason: str) -> CodeError:
    return CodeError(f"The archive's member {name!r:.200} {reason}.", remedy=_PACK_REMEDY)
