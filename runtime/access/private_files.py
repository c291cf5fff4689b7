"""Files that only their owner can read, each replaced as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ...errors import GatewayError
from ...snapshot.publish import publish, sync

FOLDER = "access"
"""The folder of keys and secrets in the state folder."""
_ModelT = TypeVar("_ModelT", bound=BaseModel)


def write(path: Path, data: bytes) -> None:
    """Replace the file; it is on the disk on return. Raise GatewayError."""
    with _reported("written", path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with publish(path, 0o600) as stream:
            stream.write(data)


def read(path: Path) -> bytes | None:
    """Return the file's bytes, or None if there is no file. Raise GatewayError."""
    with _reported("read", path):
        return path.read_bytes() if path.exists() else None


def load(path: Path, model: type[_ModelT]) -> _ModelT | None:
    """Return the file's JSON as `model`, or None if there is no file. Raise GatewayError, which quotes no value."""
    data = read(path)
    try:
        return None if data is None else model.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        # Ignoring the file could admit callers that it shuts out.
        message = f"{path} is damaged: {problem['type']} at {problem['loc']}."
        raise GatewayError(message, remedy="Restore it, or remove it.") from None


def remove(path: Path) -> None:
    """Remove the file if it exists; it is gone from the disk on return. Raise GatewayError."""
    with _reported("removed", path):
        if path.exists():
            path.unlink()
            sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of a crashed process, which may hold what was to be removed."""
    for leftover in folder.glob(".*"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _reported(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make sure that the state folder belongs to this user, and that its disk is not full."
        raise GatewayError(f"{path} cannot be {verb}: {error.strerror or error}.", remedy=remedy) from error
