"""The commands that back up a gateway's state folder and restore it: `pilotflame backup|restore`.

A backup is a tar.gz. The gateway only replaces the files of its state folder or appends to them, and never changes them
in place. So the backup makes hard links to the files, which stay the same while the gateway goes on. SQLite's online
backup copies the databases. Environments cannot be moved, so they are not in the backup: the gateway builds them again
when it needs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ...._version import __version__
from ....errors import GatewayError
from ....snapshot.publish import publish
from ...ground.settings.state_dir import check_user, create_private
from ...node.functions import shared_weights
from ..client import display, options

FORMAT = 1
FACTS_FILE = "pilotflame-backup.json"
DATABASE_ENDING = ".sqlite3"
FUNCTIONS_FOLDER = "functions"
STAGING_FOLDER = "staging"
# These files and folders are not in a backup. They belong to a running gateway, or the gateway makes them again.
LEFT_OUT = {STAGING_FOLDER, "compiled", "environments", "prefixes", "run", "lock", "incarnation"}
# The gateway may remove files while a folder is linked. Then linking starts again, in at most this number of attempts.
ATTEMPTS = 20
BUSY_TIMEOUT_S = 30.0
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", type=_FILE)
@options.state_dir
@options.as_json
def backup(*, file: Path, state_dir: Path | None, as_json: bool) -> None:
    """Write functions, jobs, keys and secrets to FILE, also while the gateway serves.

    FILE is a tar.gz. It holds secrets, so only its owner can read it. Snapshots outside the state folder and
    installed environments are not in it. After a restore, the gateway builds the environments again.

    Example: pilotflame backup gateway.tar.gz
    """
    settings = options.gateway_settings(state_dir=state_dir)
    state = settings.state_dir
    if settings.database is not None:
        message = "Functions, jobs, keys and secrets are in the database, which the setting `database` names."
        raise GatewayError(message, remedy="Back it up with pg_dump. A new gateway needs nothing else.")
    if not (state / FUNCTIONS_FOLDER).is_dir():
        raise GatewayError(f"{state} is not a gateway's state folder.", remedy="Name it with --state-dir.")
    found = {"format": FORMAT, "version": __version__, "created_at": datetime.now(UTC).isoformat()}
    with _reported(file), display.spinner(f"backing up {state}"), _frozen(state) as frozen:
        (frozen / FACTS_FILE).write_text(json.dumps(found))
        with (
            publish(file, 0o600) as stream,
            tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar,
        ):
            # Write the facts first, so that a reader finds them without a search.
            for path in sorted(frozen.iterdir(), key=lambda path: (path.name != FACTS_FILE, path)):
                tar.add(path, path.name)
    names = sorted(path.name for path in (state / FUNCTIONS_FOLDER).iterdir())
    found |= {"file": str(file), "bytes": file.stat().st_size, "functions": names}
    text = f"{file}: {display.counted(len(names), 'function')}, {display.size(file.stat().st_size)}"
    display.print_result(found, text, as_json=as_json)


@click.command()
@click.argument("file", type=_FILE)
@options.state_dir
@options.as_json
def restore(*, file: Path, state_dir: Path | None, as_json: bool) -> None:
    """Make a state folder from a backup in FILE. The state folder must be empty or not exist.

    Then start the gateway. A backup has no Python environments: the gateway makes the environment of a function again when it needs it.

    Example: pilotflame restore gateway.tar.gz --state-dir /srv/pilotflame
    """
    state = options.gateway_settings(state_dir=state_dir).state_dir
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        remedy = "Choose another with --state-dir, or move this one away."
        raise GatewayError(f"{state} already exists and is not empty.", remedy=remedy)
    check_user(state)
    aside = state.with_name(f".{state.name}.{secrets.token_hex(4)}")
    with _reported(file), display.spinner(f"restoring {state}"):
        try:
            found = _unpacked(file, aside)
            aside.rename(state)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        # Write the folder to the disk before the user relies on it.
        os.sync()
    text = f"{state} is restored from a backup of {found['created_at']}; start it: pilotflame serve --state-dir {state}"
    display.print_result({**found, "state_dir": str(state)}, text, as_json=as_json)


@contextlib.contextmanager
def _frozen(state: Path) -> Iterator[Path]:
    """Yield a folder with links to the files of the state folder and copies of its databases."""
    (state / STAGING_FOLDER).mkdir(exist_ok=True, mode=0o700)
    frozen = state / STAGING_FOLDER / f"backup.{secrets.token_hex(8)}"
    frozen.mkdir(mode=0o700)
    try:
        # Copy the databases first. The gateway writes a file before its database refers to the file. So all files to which
        # the copy refers exist when the files are linked.
        for entry in sorted(
            state.iterdir(), key=lambda path: (not path.name.endswith(DATABASE_ENDING), path)
        ):
            if entry.name == FUNCTIONS_FOLDER:
                (frozen / entry.name).mkdir()
                for function in sorted(entry.iterdir()):
                    _link(function, frozen / entry.name / function.name)
            elif entry.name.endswith(DATABASE_ENDING):
                _copy_database(entry, frozen / entry.name)
            elif entry.name not in LEFT_OUT and DATABASE_ENDING not in entry.name:
                _link(entry, frozen / entry.name)
        yield frozen
    finally:
        shutil.rmtree(frozen, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Make hard links to the files in `source`. If files vanish meanwhile, start again."""
    for attempt in range(ATTEMPTS):
        try:
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, copy_function=_link_or_copy)
            else:
                _link_or_copy(source, target)
        except (FileNotFoundError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            # Leave out a folder that no longer exists: its function was deleted meanwhile.
            if not source.exists():
                return
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no hard links.
        shutil.copy2(source, target)


def _copy_database(source: Path, target: Path) -> None:
    create_private(target)
    with (
        contextlib.closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S)) as live,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        live.backup(copy)


def _unpacked(file: Path, into: Path) -> dict[str, Any]:
    """Unpack a backup into a new folder, and return its facts. Raise GatewayError if `file` is not a backup."""
    remedy = "Give a file that `pilotflame backup` wrote."
    into.mkdir(parents=True, mode=0o700)
    try:
        with tarfile.open(file, "r:gz") as tar:
            first = tar.next()
            content = tar.extractfile(first) if first is not None and first.name == FACTS_FILE else None
            found: dict[str, Any] = json.loads(content.read()) if content is not None else {}
            if found.get("format", 0) > FORMAT:
                newer = f"{file} was written by pilotflame {found.get('version')}, which is newer."
                raise GatewayError(newer, remedy="Restore it with that version, or a newer one.")
            if not found:
                raise GatewayError(f"{file} is not a backup: it has no {FACTS_FILE}.", remedy=remedy)
            tar.extractall(into, filter="data")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise GatewayError(f"{file} is not a complete backup: {error}.", remedy=remedy) from None
    (into / FACTS_FILE).unlink()
    shared_weights.SharedWeights(into / shared_weights.FOLDER).protect()
    return found


@contextlib.contextmanager
def _reported(file: Path) -> Iterator[None]:
    """Turn errors of files and databases into GatewayError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        where = getattr(error, "filename", None) or file
        why = getattr(error, "strerror", None) or error
        raise GatewayError(
            f"{where}: {why}.", remedy="Check the path, its permissions and the disk."
        ) from None
