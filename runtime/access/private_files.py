"""Private files: only their owner reads them, and they are there whole or as they were, whatever happens."""

from __future__ import annotations

from pathlib import Path

from ...errors import GatewayError
from ...snapshot.publish import publish, sync

MODE = 0o600
FOLDER = "access"
"""Of the state folder."""


def write(path: Path, data: bytes) -> None:
    """Replaces the file; on the disk when it returns. Raises GatewayError."""
    try:
        folder(path.parent)
        with publish(path, MODE) as stream:
            stream.write(data)
    except OSError as error:
        raise _cannot("written", path, error) from error


def read(path: Path) -> bytes | None:
    """The file's bytes; None if it is not there. Raises GatewayError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from error


def remove(path: Path) -> None:
    """Removes the file, if it is there; gone from the disk when it returns. Raises GatewayError."""
    try:
        path.unlink()
        sync(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot("removed", path, error) from error


def folder(path: Path) -> None:
    """Makes the folder, for its owner alone."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def tidy(path: Path) -> None:
    """Removes what a crash left half written in a folder, which may be what nobody should read."""
    for leftover in path.glob(".*"):
        leftover.unlink(missing_ok=True)


def broken(path: Path, why: str) -> GatewayError:
    """For a file that cannot be understood: going on without it might let in whom it kept out."""
    return GatewayError(f"{path} is not what was written there: {why}.", remedy="Restore it, or remove it.")


def _cannot(what: str, path: Path, error: OSError) -> GatewayError:
    return GatewayError(
        f"{path} cannot be {what}: {error.strerror or error}.",
        remedy="See that the state folder belongs to this user, and has room.",
    )
