"""Exchanges the files of revisions between gateways: packs a revision's folder, stores it in blobs, and unpacks it elsewhere.

The files of a revision are packed into one tar.gz, which is stored in blobs. The names of the blobs contain the SHA-256
of the tar.gz. The same files always give the same bytes, so they are stored once. The record of the revision and the
versions of local files are not packed, because they are valid on one machine only.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from ....errors import CodeError, GatewayError
from ...ground.storing.blobs import Blobs
from .archive import checked_path, unpack
from .code import MAX_FILES
from .snapshots import ASSETS_FOLDER, COMPARED_FILE, VERSIONS_FILE

MOST_BYTES = 1 << 30
"""The largest total size of a revision's files that gateways exchange. The limit protects the database, which stores
the files, and the disks of the gateways, which all copy them.
"""
PART_BYTES = 16 << 20
"""The size of a blob. A gateway has only one blob at a time in memory."""
_LOCAL_FILES = frozenset((VERSIONS_FILE, COMPARED_FILE))
REMEDY = (
    "Put the weights into an object store, and set `snapshot` to their address, such as s3://bucket/weights."
)


class PackedFiles(NamedTuple):
    """The files of a revision, packed into an open temporary file. `name` is the name under which `RevisionFiles`
    stores them.
    """

    file: IO[bytes]
    name: str


class RevisionFiles:
    """The files of all revisions. Its methods block, and raise JobStoreFailed if the blobs cannot be read or written."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def put(self, packed: PackedFiles) -> None:
        """Store packed files durably, and close `packed.file`."""
        with packed.file as file:
            for blob in _blobs_of(packed.name):
                self._blobs.put(blob, file.read(PART_BYTES))

    def get(self, name: str, into: Path) -> None:
        """Unpack stored files into the folder `into`, which must be empty or not exist. Raise GatewayError if the
        stored files are damaged or gone.
        """
        digest = hashlib.sha256()
        with TemporaryFile(dir=into.parent) as file:
            for blob in _blobs_of(name):
                data = self._blobs.get(blob) or b""
                digest.update(data)
                file.write(data)
            if digest.hexdigest() != name.partition("-")[0]:
                message = f"The files {name} in the database are damaged or gone."
                raise GatewayError(message, remedy="Deploy the function again.")
            file.seek(0)
            unpack(file, into, MOST_BYTES)

    def keep(self, names: Collection[str]) -> None:
        """Delete the stored files that are not in `names`, except new files that the index may not name yet."""
        self._blobs.keep([blob for name in names for blob in _blobs_of(name)])


def pack_files(folder: Path, code: str, record: str) -> PackedFiles:
    """Pack the folder of a revision. `code` is the name of the subfolder with the code, and `record` is the name of the
    file with the revision's record.

    The caller must pass the result to `RevisionFiles.put`, or close its file. Raise CodeError if the files are too many
    or too large.
    """
    file = TemporaryFile(dir=folder.parent)  # noqa: SIM115  the caller closes it
    try:
        # Use the fastest level, because weights hardly become smaller at any level.
        with (
            gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            _add_all(tar, folder, code, _LOCAL_FILES | {record})
        length = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return PackedFiles(file, f"{digest}-{-(-length // PART_BYTES)}")


def _blobs_of(name: str) -> list[str]:
    """Return the names of the blobs that contain the files `name`. `name` ends with the number of blobs."""
    return [f"{name}-{number}" for number in range(int(name.partition("-")[2]))]


def _add_all(tar: tarfile.TarFile, folder: Path, code: str, local: Collection[str]) -> None:
    size = 0
    for count, path in enumerate(_travelling(folder, code, local), 1):
        if count > MAX_FILES:
            fault = (
                f"The revision has more than {MAX_FILES} files and folders, the most that gateways exchange."
            )
            raise CodeError(fault, remedy=REMEDY)
        size += _add(tar, path, path.relative_to(folder).as_posix())
        if size > MOST_BYTES:
            fault = f"The revision has more than {MOST_BYTES >> 20} MiB of files, the most that gateways exchange."
            raise CodeError(fault, remedy=REMEDY)


def _travelling(folder: Path, code: str, local: Collection[str]) -> Iterator[Path]:
    """Yield all paths in `folder`, except files with a name in `local`. But yield such a file if it belongs to the code
    or to the assets.
    """
    for path in sorted(folder.rglob("*")):
        above = path.relative_to(folder).parts[:-1]
        if path.name not in local or code in above[:1] or ASSETS_FOLDER in above:
            yield path


def _add(tar: tarfile.TarFile, path: Path, name: str) -> int:
    """Add a file, a folder or a link, and return its size."""
    facts, member = path.lstat(), tarfile.TarInfo(checked_path(name, name))
    if stat.S_ISLNK(facts.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        tar.addfile(member)
        return 0
    if stat.S_ISDIR(facts.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        return 0
    member.mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
    # Follow no link and do not block: a process of the function may have replaced the file by a link or a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
        member.size = facts.st_size
        tar.addfile(member, content)
    return member.size
