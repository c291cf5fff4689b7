"""Reads, replaces and removes files that only their owner can read. No file is changed in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ....errors import GatewayError
from ....snapshot.publish import publish, sync

_ModelT = TypeVar("_ModelT", bound=BaseModel)


def write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create or replace the file, and make its folder. With `durable`, the file is durably on disk when this returns.
    Raise GatewayError if it cannot be written.
    """
    with _reported("written", path):
        _make_folder(path.parent)
        with publish(path, 0o600, durable=durable) as stream:
            stream.write(data)


def read(path: Path) -> bytes | None:
    """Return the file's bytes, or None if it does not exist. Raise GatewayError if it cannot be read."""
    with _reported("read", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def load(path: Path, model: type[_ModelT]) -> _ModelT | None:
    """Return the file's JSON as an instance of `model`, or None if the file does not exist.

    Raise GatewayError if the file cannot be read or is not valid. The message quotes no values.
    """
    data = read(path)
    return None if data is None else parse(data, model, str(path))


def parse(data: bytes, model: type[_ModelT], place: str) -> _ModelT:
    """Return JSON as an instance of `model`. Raise GatewayError, which names the `place` but no values, if it is not valid."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        fault = f"the field {field} is wrong ({problem['type']})" if field else "it is no JSON object"
        # A damaged file of keys must not count as missing. Otherwise, the gateway could admit callers without a key.
        message = f"{place} is damaged: {fault}."
        raise GatewayError(message, remedy="Restore it from a backup.") from None


def remove(path: Path) -> None:
    """Remove the file if it exists. When this returns, the removal is durable. Raise GatewayError if it cannot be
    removed.
    """
    with _reported("removed", path):
        if path.exists():
            path.unlink()
            sync(path.parent)


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and in its subfolders, sorted; none if there is no folder. Raise GatewayError if a folder
    cannot be read.
    """

    def fail(error: OSError) -> None:
        # Without this, os.walk leaves out a folder that it cannot read.
        raise error

    with _reported("read", folder), contextlib.suppress(FileNotFoundError):
        return sorted(
            Path(place, name) for place, _, names in os.walk(folder, onerror=fail) for name in names
        )
    return []


def let_owner_write(folder: Path) -> None:
    """Give the owner of a folder all rights on it, and others none. Raise OSError if it is no folder, or a symbolic link."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Opening with O_PATH needs no rights on the folder. `fchmod` does not accept such a descriptor, so use its path in /proc.
        Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, durably and for their owner only. `Path.mkdir(parents=True)` would give others rights on the parents."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        sync(folder.parent)


@contextlib.contextmanager
def _reported(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make sure that the state folder belongs to this user, and that its disk is not full."
        raise GatewayError(f"{path} cannot be {verb}: {error.strerror or error}.", remedy=remedy) from error
