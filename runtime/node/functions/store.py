"""Stores the deployed functions on disk. The stored files are consistent after a crash at any moment.

    <state dir>/functions/<name>/<revision>/code/            the function's folder as it was deployed
    <state dir>/functions/<name>/<revision>/revision.json    the record of the revision
    <state dir>/functions/<name>/current                     holds the id of the live revision
    <state dir>/functions/<name>/paused                      is there while the owner has paused the function
    <state dir>/functions/<name>/deleted                     is there while the function's files are removed
    <state dir>/weights/                                     weights that revisions share; see shared_weights.py
    <state dir>/compiled/<name>/                             what compilers made; see worker/compiled_code.py
    <state dir>/prefixes/<name>/                             what its workers computed; see snapshot/computed.py
    <state dir>/staging/                                     folders being made or removed; emptied at start

A revision is made under `staging`, synced to disk, and then moved to its place by a rename. Only after that
is `current` replaced, also by a rename. To remove a folder, it is first moved into `staging` by a rename. So
a reader sees either the complete old revision or the complete new one. A revision of a deleted function whose calls still run
keeps its code, but not its record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field, model_validator

from ....errors import BadInput, GatewayError, LauncherError, UnknownFunction, UnknownRevision
from ....removal import remove_tree
from ....snapshot.publish import sync
from ...calls.link.handler_facts import checked
from ...calls.link.worker_spec import CompiledCode, KeptPrefixes
from ...ground.access import private_files
from ...ground.access.deploy_policy import Deployer
from ...ground.settings.function_settings import FunctionSettings, check_name, name_problem
from . import shared_weights

CODE_FOLDER = "code"

_REVISION = re.compile(r"r[1-9][0-9]{0,8}-[0-9a-f]{8}")
_NUMBER = re.compile(r"r?([1-9][0-9]{0,8})")
_RECORD = "revision.json"
_CURRENT = "current"
_PAUSED = "paused"
_DELETED = "deleted"


class StoredSnapshot(BaseModel, frozen=True, extra="forbid"):
    """Where a revision's weights are: at a path on this node, or at a URL. A path inside the revision's code is
    relative to the code.
    """

    root: Path | None = None
    url: str | None = None


def _facts(stored: Any) -> dict[str, Any]:
    """Return the stored facts of a handler. Facts that cannot be true count as not known."""
    try:
        return checked(stored)
    except LauncherError:
        return {}


class RevisionFields(BaseModel, frozen=True, extra="forbid"):
    """The part of a revision's record that is known before the store gives the revision its id."""

    code_digest: str
    settings: FunctionSettings
    setting_origins: dict[str, str] = Field(default_factory=dict)
    snapshots: dict[str, StoredSnapshot] = Field(
        default_factory=dict, description="By name; the only one has none."
    )
    python: Path
    requirements_digest: str
    handler: Annotated[dict[str, Any], BeforeValidator(_facts)] = Field(
        default_factory=dict, description="The facts that its zygote has reported about its handler."
    )
    warnings: tuple[str, ...] = ()
    deployed_by: str = Field("", description="The id of the API key that deployed it.")
    deployer: str = Field("", description="The name of that key; the key may be revoked later.")

    @model_validator(mode="before")
    @classmethod
    def _named_snapshots(cls, stored: Any) -> Any:
        """Convert the fields in which an earlier release stored the only snapshot."""
        if not isinstance(stored, dict) or not ({"snapshot_root", "snapshot_url"} & set(stored)):
            return stored
        found = {key: value for key, value in stored.items() if key not in {"snapshot_root", "snapshot_url"}}
        root, url = stored.get("snapshot_root"), stored.get("snapshot_url")
        return {**found, "snapshots": {"": {"root": root, "url": url}} if root or url else {}}

    @model_validator(mode="before")
    @classmethod
    def _forget_defaults(cls, stored: Any) -> Any:
        """Remove the defaults that an earlier release stored as limits of `resources`."""
        if isinstance(stored, dict) and isinstance(settings := stored.get("settings"), dict):
            origins, limits = stored.get("setting_origins", {}), settings.get("resources", {})
            kept = {key: limit for key, limit in limits.items() if f"resources.{key}" in origins}
            return {**stored, "settings": {**settings, "resources": kept}}
        return stored


class RevisionRecord(RevisionFields):
    """The content of `revision.json`. It never changes once the revision is live."""

    function: str
    revision: str
    number: int
    created_at: AwareDatetime

    @property
    def owner(self) -> Deployer:
        """The API key that deployed it."""
        return Deployer(self.deployed_by, self.deployer)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much the store keeps of each function.

    It keeps at most `count` revisions, with at most `size_bytes` in all, about `compiled_bytes` of compiled code, and at most
    `prefixes_bytes` of stored prefixes.
    """

    count: int = 5
    size_bytes: int = 4 << 30
    compiled_bytes: int = 1 << 30
    prefixes_bytes: int = 4 << 30


DEFAULT_RETENTION = Retention()


class Store:
    """All functions and revisions in the state folder `root`, which the caller must have locked.

    The store skips functions that cannot be read, and calls `report` with a line about each. All methods but `start`
    are safe to call from several threads.
    """

    def __init__(
        self, root: Path, report: Callable[[str], None], retention: Retention = DEFAULT_RETENTION
    ) -> None:
        self.curves = root.absolute() / "curves"
        """The folder that holds the measured latency curves."""
        self.copies = re.compile(
            rf"{re.escape(str(root.absolute()))}/(?:functions/[^/\s]+|staging)/[^/\s]+/{CODE_FOLDER}/"
        )
        """Matches the paths of copied code in a text, up to the name of the file in the function's folder."""
        self.weights = shared_weights.SharedWeights(root.absolute() / shared_weights.FOLDER)
        self._retention = retention
        self._functions = root.absolute() / "functions"
        self._compiled, self._prefixes = root.absolute() / "compiled", root.absolute() / "prefixes"
        self._staging = root.absolute() / "staging"
        self._report = report
        self._lock = threading.Lock()

    def start(self) -> None:
        """Make the store's folders, and remove unfinished files that a crash has left. Call this first."""
        self._functions.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._staging.exists():
            self._remove(self._staging)
        self._staging.mkdir(mode=0o700, exist_ok=True)
        self.weights.discard_unused()
        for folder in self._functions.glob("*/"):
            for half_written in (*folder.glob(f".{_CURRENT}.*"), *folder.glob(f"*/.{_RECORD}.*")):
                half_written.unlink()
            self._discard_deleted(folder)
            # The gateway crashed during this function's first deploy, before the revision was moved here, or after the
            # deletion of the function.
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        for folder in (*self._compiled.glob("*/"), *self._prefixes.glob("*/")):
            unkept = folder.parent == self._compiled and not self._retention.compiled_bytes
            if unkept or not (self._functions / folder.name).is_dir():
                self._discard(folder)

    def stage(self) -> Path:
        """Return a new, empty folder for a revision. The caller puts the code into its subfolder `code`."""
        path = self._aside("upload")
        path.mkdir(mode=0o700)
        return path

    def place(self, staged: Path, fields: RevisionFields) -> RevisionRecord:
        """Give the revision in a staged folder its id, move the folder to its place, and return its record.

        The revision is not live yet. Afterwards call `promote` to make it live, or `withdraw` to remove it.
        If an error is raised, the staged folder has been removed.
        """
        try:
            return self._place(staged, fields)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def _place(self, staged: Path, fields: RevisionFields) -> RevisionRecord:
        with self._lock:
            record = self._new_record(fields)
            _write_record(staged, record)
            for path in (staged, *staged.rglob("*")):
                if not path.is_symlink():
                    sync(path)
            folder = self._folder(record.function)
            folder.mkdir(exist_ok=True, mode=0o700)
            sync(self._functions)
            staged.rename(folder / record.revision)
            sync(folder)
        return record

    def promote(self, record: RevisionRecord) -> None:
        """Make a placed revision live. Store its record again, because the record may have gained `handler`."""
        folder = self._folder(record.function)
        with self._lock:
            _write_record(folder / record.revision, record)
            private_files.write(folder / _CURRENT, f"{record.revision}\n".encode())

    def pause(self, name: str, *, paused: bool) -> None:
        """Store whether a function is paused. Raise GatewayError, or UnknownFunction if the function was deleted
        meanwhile.
        """
        folder = self._folder(name)
        with self._lock:
            if not folder.is_dir():
                raise UnknownFunction.named(name)
            if paused:
                private_files.write(folder / _PAUSED, b"")
            else:
                (folder / _PAUSED).unlink(missing_ok=True)
                sync(folder)

    def paused(self) -> set[str]:
        """Return the names of the paused functions."""
        return {file.parent.name for file in self._functions.glob(f"*/{_PAUSED}")}

    def withdraw(self, record: RevisionRecord) -> None:
        """Remove a placed revision that will not become live."""
        aside, folder = self._aside(record.function), self._folder(record.function)
        with self._lock:
            (folder / record.revision).rename(aside)
            # If the function has other revisions, its folder must stay, and rmdir fails.
            with contextlib.suppress(OSError):
                folder.rmdir()
            gone = not folder.exists()
        if gone:
            self._discard_computed(record.function)
        self._remove(aside)

    def functions(self) -> dict[str, RevisionRecord]:
        """Return the record of each function's live revision, by the function's name."""
        records = {}
        for folder in sorted(self._functions.iterdir()):
            if name_problem(folder.name) is not None or not folder.is_dir():
                self._report(f"{folder} is skipped: it is not a function's folder")
            elif record := self.current(folder.name):
                records[folder.name] = record
        return records

    def current(self, name: str) -> RevisionRecord | None:
        """Return the record of a function's live revision; None if there is no readable record."""
        folder = self._folder(name)
        try:
            if (revision := private_files.read(folder / _CURRENT)) is not None:
                return self._read(name, revision.decode(errors="replace").strip())
            if any((folder / one / _RECORD).exists() for one in self._revision_ids(name)):
                self._report(f"function {name} has no live revision: its first deploy was not finished")
        except GatewayError as error:
            self._report(f"function {name} is skipped: {error.message}")
        return None

    def code(self, record: RevisionRecord) -> Path:
        """Return the folder that holds the code of a revision."""
        return self._folder(record.function) / record.revision / CODE_FOLDER

    def compiled(self, record: RevisionRecord) -> CompiledCode | None:
        """Return where compilers keep their output for a revision; None if the output is not kept.

        No limit applies to a running process that writes there. So functions with limited disk space do not write there.
        """
        limit_bytes, settings = self._retention.compiled_bytes, record.settings
        if not limit_bytes or settings.image.name or settings.resources.files == "private":
            return None
        made_from = f"{record.code_digest} {record.requirements_digest}"
        code = hashlib.sha256(made_from.encode()).hexdigest()[:16]
        return CompiledCode(folder=self._compiled / record.function, code=code, limit_bytes=limit_bytes)

    def prefixes(self, record: RevisionRecord) -> KeptPrefixes | None:
        """Return the prefixes that a revision declares, and where its workers keep their keys and values; None if it declares none."""
        folder, limit_bytes = self._prefixes / record.function, self._retention.prefixes_bytes
        kept = KeptPrefixes(declared=record.settings.prefixes, folder=folder, limit_bytes=limit_bytes)
        return kept if kept.declared else None

    def delete(self, name: str, *, busy: Collection[str] = ()) -> None:
        """Remove a function and all its revisions. Raise UnknownFunction if it does not exist.

        The revisions in `busy` keep their code until `sweep`, and can be neither listed nor made live.
        """
        folder, aside = self._folder(check_name(name)), self._aside(name)
        # Remove the compiled code and the prefixes first. Then a crash in between leaves them to no new function of this
        # name.
        self._discard_computed(name)
        with self._lock:
            if not folder.is_dir():
                raise UnknownFunction.named(name)
            if busy:
                self._hide(folder, busy, aside)
            else:
                folder.rename(aside)
                sync(self._functions)
        self._remove(aside)
        self.weights.discard_unused()

    def _hide(self, folder: Path, busy: Collection[str], aside: Path) -> None:
        """Move everything of a deleted function to `aside`, except the code of its `busy` revisions."""
        aside.mkdir(mode=0o700)
        # Until this file is removed, `start` removes the whole folder.
        private_files.write(folder / _DELETED, b"")
        try:
            for path in folder.iterdir():
                if path.name in busy:
                    (path / _RECORD).unlink(missing_ok=True)
                    sync(path)
                elif path.name != _DELETED:
                    path.rename(aside / path.name)
            sync(folder)
        finally:
            # If the disk has failed, the next deploy of this name must not be removed with the rest.
            (folder / _DELETED).unlink()
            sync(folder)

    def sweep(self, name: str, *, busy: Collection[str] = ()) -> list[str]:
        """Remove the code that `delete` has left for calls, except that of the revisions in `busy`. Return the ids."""
        folder, aside = self._folder(name), self._aside(name)
        aside.mkdir(mode=0o700)
        with self._lock:
            found = [one for one in self._revision_ids(name) if one not in busy]
            ended = [one for one in found if not (folder / one / _RECORD).exists()]
            for revision in ended:
                (folder / revision).rename(aside / revision)
            # The folder stays if the function has other revisions.
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._remove(aside)
        if ended:
            self.weights.discard_unused()
        return ended

    def _discard_deleted(self, folder: Path) -> None:
        """Remove what a crash has left of a deleted function, or of its revisions that still ran calls."""
        if (folder / _DELETED).exists():
            self._remove(folder)
            return
        for revision in self._revision_ids(folder.name) if name_problem(folder.name) is None else ():
            if not (folder / revision / _RECORD).exists():
                self._remove(folder / revision)

    def revisions(self, name: str) -> list[RevisionRecord]:
        """Return the records of a function's revisions that can be read, the newest first."""
        found = []
        for revision in reversed(self._revision_ids(name)):
            with contextlib.suppress(GatewayError):
                found.append(self._read(name, revision))
        return found

    def environments(self) -> set[str]:
        """Return the digests of the requirements of all revisions of all functions."""
        names = [folder.name for folder in self._functions.iterdir() if name_problem(folder.name) is None]
        return {record.requirements_digest for name in names for record in self.revisions(name)}

    def find(self, live: RevisionRecord, wanted: str | None) -> RevisionRecord:
        """Return the revision of a function to roll back to. `live` is its live revision.

        `wanted` is the id of a revision, or its number, as `r3` or `3`. If `wanted` is None, return the newest revision
        before the live one. Raise UnknownRevision if there is no such revision, and BadInput if it is the live
        revision.
        """
        name, found = live.function, self.revisions(live.function)
        number = _NUMBER.fullmatch(wanted or "")
        for record in found:
            before = wanted is None and record.number < live.number
            if before or wanted == record.revision or (number and int(number[1]) == record.number):
                if record.revision == live.revision:
                    raise BadInput(
                        f"{live.revision} of {name!r} is live already.", remedy="Restart it instead."
                    )
                return record
        there = ", ".join(record.revision for record in found)
        missing = "no older revision" if wanted is None else f"no revision {wanted[:40]!r}"
        raise UnknownRevision(f"{name!r} has {missing} (there: {there}).", remedy="Deploy it again.")

    def sizes(self, name: str) -> dict[str, int]:
        """Return the bytes on disk of each revision, the newest first, without bytes that a newer revision shares."""
        seen: set[int] = set()
        return {
            revision: sum(_new_bytes(self._folder(name) / revision, seen))
            for revision in reversed(self._revision_ids(name))
        }

    def prune(self, name: str, keep: int | None = None, *, busy: Collection[str] = ()) -> list[str]:
        """Remove old revisions of a function, and return their ids.

        The newest `keep` revisions remain (by default the retention's count), while their total size is within the
        retention's limit. The newest revision, the live revision and the revisions in `busy` always remain. If the live
        revision cannot be read, nothing is removed. Stored prefixes are removed once no revision declares any.
        """
        with self._lock:
            if (live := self.current(name)) is None:
                return []
            kept = {live.revision, *busy, *self._retained(name, keep)}
            old = [revision for revision in self._revision_ids(name) if revision not in kept]
            removed = {revision: self._aside(name) for revision in old}
            for revision, aside in removed.items():
                (self._folder(name) / revision).rename(aside)
            if not any(record.settings.prefixes for record in self.revisions(name)):
                self._discard(self._prefixes / name)
        for aside in removed.values():
            self._remove(aside)
        self.weights.discard_unused()
        return list(removed)

    def _retained(self, name: str, keep: int | None) -> Iterator[str]:
        """Yield the ids of the revisions within the retention, the newest first."""
        total, count = 0, max(1, self._retention.count if keep is None else keep)
        for position, (revision, size) in enumerate(self.sizes(name).items()):
            total += size
            if position and (position >= count or total > self._retention.size_bytes):
                return
            yield revision

    def _folder(self, name: str) -> Path:
        return self._functions / check_name(name)

    def _discard_computed(self, name: str) -> None:
        """Remove what compilers and workers have computed for a function."""
        for kept in (self._compiled, self._prefixes):
            self._discard(kept / name)

    def _discard(self, folder: Path) -> None:
        """Remove a folder of computed files, if it is there. Report a folder that cannot be removed."""
        aside = self._aside(folder.name)
        try:
            private_files.let_owner_write(folder)
            folder.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            self._report(f"{folder} cannot be removed: {error.strerror}")
        else:
            self._remove(aside)

    def _remove(self, folder: Path) -> None:
        """Remove a folder in which functions may have taken rights from its owner. Report it if files remain."""
        if not remove_tree(folder):
            self._report(f"{folder} cannot be removed completely.")

    def _aside(self, name: str) -> Path:
        return self._staging / f"{name}.{secrets.token_hex(8)}"

    def _revision_ids(self, name: str) -> list[str]:
        """Return the ids of all revisions of a function, sorted by their numbers. No record is read."""
        found = [path.name for path in self._folder(name).glob("r*") if _REVISION.fullmatch(path.name)]
        # The ids differ in length only by their numbers, and a shorter number is smaller.
        return sorted(found, key=lambda revision: (len(revision), revision))

    def _new_record(self, fields: RevisionFields) -> RevisionRecord:
        ids = self._revision_ids(fields.settings.name)
        number = int(ids[-1][1:].partition("-")[0]) + 1 if ids else 1
        content = f"{fields.code_digest}\n{fields.settings.model_dump_json()}".encode()
        name, id_ = fields.settings.name, f"r{number}-{hashlib.sha256(content).hexdigest()[:8]}"
        now = datetime.now(UTC)
        return RevisionRecord(**dict(fields), function=name, revision=id_, number=number, created_at=now)

    def _read(self, name: str, revision: str) -> RevisionRecord:
        """Return the record of a revision. Raise GatewayError if it cannot be used."""
        if not _REVISION.fullmatch(revision):
            raise GatewayError(f"{revision!r}: that is not a revision's id.")
        folder = self._folder(name) / revision
        record = private_files.load(folder / _RECORD, RevisionRecord)
        found = record and (folder / CODE_FOLDER).is_dir() and (record.function, record.revision)
        if record is None or found != (name, revision):
            raise GatewayError(f"{folder} is not that revision.")
        return record


def _write_record(folder: Path, record: RevisionRecord) -> None:
    private_files.write(folder / _RECORD, record.model_dump_json(indent=2).encode())


def _new_bytes(folder: Path, seen: set[int]) -> Iterator[int]:
    """Yield the sizes of the files in `folder` whose inodes are not in `seen`, and add these to `seen`."""
    # A function may make a tree that is deeper than Python's stack.
    folders = [folder]
    while folders:
        # Another thread may remove the revision meanwhile.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                    continue
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode) and facts.st_ino not in seen:
                    seen.add(facts.st_ino)
                    yield facts.st_size
