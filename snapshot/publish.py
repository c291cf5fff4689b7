"""Publishing a file or a folder atomically and durably: it appears complete or not at all, even after a power loss."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from ..errors import CacheError, SnapshotError


@contextmanager
def publish(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Yield a stream whose bytes become file `path` when the block ends. If it raises, `path` does not change."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:100]}.", delete=False) as stream:
        try:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
            Path(stream.name).replace(path)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise
    sync(path.parent)


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `path` when the block ends. The caller syncs its files (`publish` does).

    Raises SnapshotError if `path` exists and is not an empty folder, CacheError if it cannot be written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise SnapshotError(f"{path} is there and not empty.", remedy="Choose a folder that does not exist.")
    made = path.parent / f".{path.name[:100]}.{secrets.token_hex(4)}"
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
        # It is gone if it was published.
        shutil.rmtree(made, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> CacheError:
    fault = f"{path} cannot be written: {error.strerror or error}."
    return CacheError(fault, remedy="Free some space, or choose another place.")
