"""The store: what is deployed, on disk, whole after any crash.

    <state dir>/functions/<name>/<revision>/code/            the function's folder as it was deployed
    <state dir>/functions/<name>/<revision>/revision.json    the record
    <state dir>/functions/<name>/current                     names the live revision
    <state dir>/staging/                                     being made or being removed; emptied at start

A revision is made under `staging`, brought to disk, then renamed to its place; only then is `current`
replaced, by a rename too. What is removed is renamed into `staging` first. So whatever lies under `functions`
is whole, and a reader sees the old revision or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ...errors import CodeError, SettingsError, UnknownFunction
from ...snapshot.publish import sync
from ..settings.function_settings import FunctionSettings, check_name, name_problem

_log = logging.getLogger(__name__)

_REVISION = re.compile(r"r([1-9][0-9]{0,8})-[0-9a-f]{8}")
_RECORD = "revision.json"
_CURRENT = "current"


class RevisionFields(BaseModel):
    """What a deploy knows about its revision before it is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code_digest: str
    settings: FunctionSettings
    snapshot_root: Path | None = None
    snapshot_url: str | None = None
    python: Path
    requirements_digest: str
    handler: dict[str, Any] = Field(default_factory=dict)


class RevisionRecord(RevisionFields):
    """One revision, as `revision.json` holds it; never changed."""

    function: str
    revision: str
    number: int
    created_at: AwareDatetime


class Staging:
    """A revision in the making: put its code into `code`, which does not exist yet, then publish.

    As a context manager it leaves nothing behind if it was not published.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.code = path / "code"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove it; after publishing there is nothing left to remove."""
        shutil.rmtree(self.path, ignore_errors=True)


class Store:
    """Every function and revision below one state folder, which the caller has locked (`StateDir`).

    `report` is told about records that cannot be read; they are skipped. Safe to call from several threads.
    """

    def __init__(
        self,
        root: Path,
        *,
        report: Callable[[str], None] = _log.warning,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.curves = root.absolute() / "curves"
        """The folder of what was measured of workers."""
        self._functions = root.absolute() / "functions"
        self._staging = root.absolute() / "staging"
        self._report = report
        self._now = now
        self._changing = threading.RLock()

    def start(self) -> None:
        """Make the folders, and remove what a crash left half done."""
        self._functions.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._staging.mkdir(exist_ok=True, mode=0o700)
        for leftover in list(self._staging.iterdir()):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        for folder in self._functions.iterdir():
            if folder.is_dir() and not any(
                folder.iterdir()
            ):  # a first deploy that was cut off before its rename
                folder.rmdir()

    def stage(self, name: str) -> Staging:
        """A new place to build a revision of `name`."""
        path = self._aside(check_name(name))
        path.mkdir(mode=0o700)
        return Staging(name, path)

    def place(self, staging: Staging, fields: RevisionFields) -> RevisionRecord:
        """Gives what was staged its revision's id and its place. It is not live: `promote` or `withdraw` comes next."""
        if fields.settings.name != staging.name:
            raise SettingsError(
                f"The settings name the function {fields.settings.name!r}, but {staging.name!r} was staged.",
                remedy="Deploy it under the name in its settings.",
            )
        if not staging.code.is_dir():
            raise CodeError(
                f"Nothing was staged for {staging.name}.", remedy="Deploy a folder with handler.py."
            )
        with self._changing:
            record = self._record(staging.name, fields)
            self._write(staging.path / _RECORD, record.model_dump_json(indent=2))
            _sync_tree(staging.path)
            self._move(staging.path, record)
        return record

    def promote(self, record: RevisionRecord) -> None:
        """Makes a placed revision the live one; `record` may meanwhile have learnt what its handler is."""
        with self._changing:
            temporary = self._aside(record.function)
            self._write(temporary, record.model_dump_json(indent=2))
            temporary.replace(self._folder(record.function) / record.revision / _RECORD)
            sync(self._folder(record.function) / record.revision)
            self._set_current(record)

    def publish(self, staging: Staging, fields: RevisionFields) -> RevisionRecord:
        """Makes what was staged the live revision of its function."""
        with self._changing:
            record = self.place(staging, fields)
            self.promote(record)
        return record

    def withdraw(self, record: RevisionRecord) -> None:
        """Removes a placed revision that is not to become live."""
        with self._changing:
            aside = self._aside(record.function)
            (self._folder(record.function) / record.revision).rename(aside)
            with contextlib.suppress(OSError):  # other revisions, or `current`, are there
                self._folder(record.function).rmdir()
        shutil.rmtree(aside)

    def current(self, name: str) -> RevisionRecord | None:
        """The live revision; None for a function that is not there, or whose live revision cannot be read."""
        folder = self._folder(name)
        try:
            revision = (folder / _CURRENT).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            if folder.is_dir():
                self._report(f"function {name} has no live revision: its first deploy was not finished")
            return None
        except (OSError, ValueError) as error:
            self._report(f"function {name} is skipped: {folder / _CURRENT} cannot be read: {error}")
            return None
        return self._read(name, revision)

    def functions(self) -> dict[str, RevisionRecord]:
        """Every function by name, with its live revision."""
        names = [name for name in _names(self._functions) if self._is_function(name)]
        records = {name: self.current(name) for name in names}
        return {name: record for name, record in records.items() if record is not None}

    def revisions(self, name: str) -> list[RevisionRecord]:
        """The function's revisions that can be read, oldest first; empty if there is no such function."""
        records = [self._read(name, revision) for _, revision in self._numbered(name)]
        return [record for record in records if record is not None]

    def code(self, record: RevisionRecord) -> Path:
        """The folder with the revision's code."""
        return self._folder(record.function) / record.revision / "code"

    def delete(self, name: str) -> None:
        """Remove a function with all its revisions."""
        with self._changing:
            aside = self._aside(check_name(name))
            try:
                self._folder(name).rename(aside)
            except FileNotFoundError as error:
                raise UnknownFunction(
                    f"There is no function {name!r}.", remedy="See `pilotflame list` for what is deployed."
                ) from error
            sync(self._functions)
        shutil.rmtree(aside)

    def prune(self, name: str, keep: int) -> list[str]:
        """Remove all but the newest `keep` (at least one) revisions and the live one; the ids removed."""
        with self._changing:
            live = self.current(name)
            old = [revision for _, revision in self._numbered(name)][: -max(keep, 1)]
            # Without a readable live revision nothing is known to be superseded.
            removed = [revision for revision in old if live is not None and revision != live.revision]
            asides = [self._aside(name) for _ in removed]
            for revision, aside in zip(removed, asides, strict=True):
                (self._folder(name) / revision).rename(aside)
        for aside in asides:
            shutil.rmtree(aside)
        return removed

    # Paths

    def _folder(self, name: str) -> Path:
        return self._functions / check_name(name)

    def _aside(self, name: str) -> Path:
        return self._staging / f"{name}.{secrets.token_hex(8)}"

    def _is_function(self, name: str) -> bool:
        if name_problem(name) is None and (self._functions / name).is_dir():
            return True
        self._report(f"{self._functions / name} is skipped: it is no function's folder")
        return False

    def _numbered(self, name: str) -> list[tuple[int, str]]:
        """The revisions that are there, readable or not, by number."""
        matches = [match for entry in _names(self._folder(name)) if (match := _REVISION.fullmatch(entry))]
        return sorted((int(match[1]), match[0]) for match in matches)

    # Writing

    def _record(self, name: str, fields: RevisionFields) -> RevisionRecord:
        numbers = [number for number, _ in self._numbered(name)]
        number = max(numbers, default=0) + 1
        content = f"{fields.code_digest}\n{fields.settings.model_dump_json()}".encode()
        return RevisionRecord(
            **dict(fields),
            function=name,
            revision=f"r{number}-{hashlib.sha256(content).hexdigest()[:8]}",
            number=number,
            created_at=self._now().astimezone(UTC),
        )

    def _move(self, path: Path, record: RevisionRecord) -> None:
        folder = self._folder(record.function)
        folder.mkdir(exist_ok=True, mode=0o700)
        sync(self._functions)
        path.rename(folder / record.revision)
        sync(folder)

    def _set_current(self, record: RevisionRecord) -> None:
        temporary = self._aside(record.function)
        self._write(temporary, f"{record.revision}\n")
        temporary.replace(self._folder(record.function) / _CURRENT)
        sync(self._folder(record.function))

    @staticmethod
    def _write(path: Path, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    # Reading

    def _read(self, name: str, revision: str) -> RevisionRecord | None:
        """The record, or None and a report of why it cannot be used."""
        shown = f"revision {revision!r} of function {name}"
        if not _REVISION.fullmatch(revision):
            self._report(f"{shown} is skipped: that is no revision's id")
            return None
        folder = self._folder(name) / revision
        try:
            record = RevisionRecord.model_validate_json((folder / _RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            self._report(f"{shown} is skipped: {folder / _RECORD} cannot be read: {error}")
            return None
        if (record.function, record.revision) != (name, revision) or not (folder / "code").is_dir():
            self._report(f"{shown} is skipped: {folder} holds something else")
            return None
        return record


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are what is wanted
    except FileNotFoundError:
        return []


def _sync_tree(folder: Path) -> None:
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            if not file.is_symlink():
                sync(file)
        sync(Path(path))
