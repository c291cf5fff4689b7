"""Writes files and folders atomically and durably: each is complete or not there, even after a power loss."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from ..errors import CacheError, SnapshotError, StorageFull


@contextmanager
def publish(path: Path, mode: int = 0o644, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a stream. When the block ends without an error, the written bytes become file `path`.

    Without `durable`, nothing is synced: after a power loss, `path` may be incomplete.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=_beginning(path), delete=False) as stream:
        try:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
            Path(stream.name).replace(path)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise
    if durable:
        sync(path.parent)


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which is renamed to `path` when the block ends. The caller must sync its files.

    Raise SnapshotError if `path` exists and is not an empty folder. Raise CacheError for any OSError, also for an
    OSError that the block raises.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise SnapshotError(f"{path} is there and not empty.", remedy="Choose a folder that does not exist.")
    made = path.parent / f"{_beginning(path)}{secrets.token_hex(4)}"
    try:
        made.mkdir(parents=True)
        yield made
        for folder, _, _ in os.walk(made, topdown=False):
            sync(Path(folder))
        made.rename(path)
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        # After a successful rename there is no folder `made`, and nothing is removed.
        shutil.rmtree(made, ignore_errors=True)


def _beginning(path: Path) -> str:
    """Return the beginning of a hidden name for a file or folder that is renamed to `path` later."""
    # 50 characters take at most 200 of the 255 bytes that a name may have. A random ending follows.
    return f".{path.name[:50]}."


def sync(path: Path) -> None:
    """Flush the bytes of file `path`, or the list of names in folder `path`, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> CacheError:
    fault = f"{path} cannot be written: {error.strerror or error}."
    kind = StorageFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else CacheError
    return kind(fault, remedy="Free some space, or choose another place.")
