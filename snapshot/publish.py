"""Publishing: a file, or a folder of them, is there whole or not at all, even if the machine dies meanwhile."""

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
    """A stream whose bytes become file `path` when the block ends; if it raises, nothing is left and `path` as it was."""
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
    """A new folder that becomes `path` when the block ends; its files are the caller's to sync (`publish` does).

    SnapshotError if something is at `path` (an empty folder is nothing), CacheError if it cannot be written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise SnapshotError(f"{path} is there and not empty.", remedy="Name a folder that is not there yet.")
    made = path.parent / f".{path.name[:100]}.{secrets.token_hex(4)}"
    try:
        made.mkdir(parents=True)
        yield made
        for folder, _, _ in os.walk(made, topdown=False):
            sync(Path(folder))
        made.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise CacheError(
            f"{path} cannot be written: {error.strerror or error}.",
            remedy="Make room, or name another place.",
        ) from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, outlive the machine's death."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
