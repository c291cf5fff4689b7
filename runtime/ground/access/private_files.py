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

FOLDER = "access"
"""The name of the folder in the state folder that holds keys and secrets."""
_ModelT = TypeVar("_ModelT", bound=BaseModel)


def write(path: Path, data: bytes) -> None:
    """Create or replace the file. When this returns, the file is durably on disk. Raise GatewayError if it cannot be
    written.
    """
    with _reported("written", path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with publish(path, 0o600) as stream:
            stream.write(data)


def read(path: Path) -> bytes | None:
    """Return the file's bytes, or None if it does not exist. Raise GatewayError if it cannot be read."""
    with _reported("read", path):
        return path.read_bytes() if path.exists() else None


def load(path: Path, model: type[_ModelT]) -> _ModelT | None:
    """Return the file's JSON as an instance of `model`, or None if the file does not exist.

    Raise GatewayError if the file cannot be read or is not valid. The message quotes no values.
    """
    data = read(path)
    try:
        return None if data is None else model.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        fault = f"the field {place} is wrong ({problem['type']})" if place else "it is no JSON object"
        # A damaged file of keys must not count as missing. Otherwise, the gateway could admit callers without a key.
        message = f"{path} is damaged: {fault}."
        raise GatewayError(message, remedy="Restore it from a backup.") from None


def remove(path: Path) -> None:
    """Remove the file if it exists. When this returns, the removal is durable. Raise GatewayError if it cannot be
    removed.
    """
    with _reported("removed", path):
        if path.exists():
            path.unlink()
            sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a crashed process left in `folder`, since they may hold keys or secrets."""
    for leftover in folder.glob(".*"):
        leftover.unlink(missing_ok=True)


def let_owner_write(folder: Path) -> None:
    """Give the owner of a folder all rights on it, and others none. Raise OSError if it is no folder, or a symbolic link."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # A descriptor of O_PATH needs no rights on the folder, and fchmod does not take it.
        Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _reported(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make sure that the state folder belongs to this user, and that its disk is not full."
        raise GatewayError(f"{path} cannot be {verb}: {error.strerror or error}.", remedy=remedy) from error
