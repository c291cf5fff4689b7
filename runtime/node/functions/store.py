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
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....errors import UnknownFunction
from ....removal import remove_tree
from ....snapshot.publish import sync
from ...calls.link.worker_spec import CompiledCode, KeptPrefixes
from ...ground.settings.function_settings import check_name, name_problem
from ...ground.storing import private_files
from . import shared_weights
from .function_folder import CODE_FOLDER, RECORD_FILE, FunctionFolder
from .revision_record import LostRevision, RevisionFields, RevisionRecord

_PAUSED = "paused"


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


class Staging:
    """The folder for folders that are being made or removed."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """`report` gets a line about each folder that cannot be removed."""
        self._path, self._report = path, report

    def start(self) -> None:
        """Make the folder, and remove what a crash has left in it."""
        if self._path.exists():
            self.remove(self._path)
        self._path.mkdir(mode=0o700, exist_ok=True)

    def aside(self, name: str) -> Path:
        """Return a path to which a folder can be moved, or at which it can be made."""
        return self._path / f"{name}.{secrets.token_hex(8)}"

    def remove(self, folder: Path) -> None:
        """Remove a folder, even if processes of functions have taken the owner's rights to folders in it. Report the
        folder if files remain.
        """
        if not remove_tree(folder):
            self._report(f"{folder} cannot be removed completely.")

    def discard(self, folder: Path) -> None:
        """Remove a folder that processes of functions write to, if it is there. Report a folder that cannot be removed."""
        aside = self.aside(folder.name)
        try:
            private_files.let_owner_write(folder)
            folder.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            self._report(f"{folder} cannot be removed: {error.strerror}")
        else:
            self.remove(aside)


class ComputedFiles:
    """What compilers and workers have computed for functions, and later workers use again."""

    def __init__(self, root: Path, retention: Retention, staging: Staging) -> None:
        self._compiled, self._prefixes = root / "compiled", root / "prefixes"
        self._retention, self._staging = retention, staging

    def compiled(self, record: RevisionRecord) -> CompiledCode | None:
        """Return where compilers keep their output for a revision; None if the output is not kept.

        Nothing limits a running process that writes there. So do not keep the output of functions with limited disk
        space, which have an image or private files.
        """
        limit_bytes, settings = self._retention.compiled_bytes, record.settings
        if not limit_bytes or settings.image.name or settings.resources.files == "private":
            return None
        made_from = f"{record.code_digest} {record.requirements_digest}"
        code = hashlib.sha256(made_from.encode()).hexdigest()[:16]
        return CompiledCode(folder=self._compiled / record.function, code=code, limit_bytes=limit_bytes)

    def prefixes(self, record: RevisionRecord) -> KeptPrefixes | None:
        """Return the prefixes that a revision declares, and the folder for the keys and values of these prefixes; None
        if it declares none.
        """
        folder, limit_bytes = self._prefixes / record.function, self._retention.prefixes_bytes
        kept = KeptPrefixes(declared=record.settings.prefixes, folder=folder, limit_bytes=limit_bytes)
        return kept if kept.declared else None

    def keep(self, functions: Collection[str]) -> None:
        """Remove the files of all functions that are not in `functions`. If no compiled code is kept, remove all
        compiled code.
        """
        for folder in (*self._compiled.glob("*/"), *self._prefixes.glob("*/")):
            unkept = folder.parent == self._compiled and not self._retention.compiled_bytes
            if unkept or folder.name not in functions:
                self._staging.discard(folder)

    def discard(self, function: str) -> None:
        """Remove the files of a function."""
        self._staging.discard(self._compiled / function)
        self.discard_prefixes(function)

    def discard_prefixes(self, function: str) -> None:
        """Remove the stored prefixes of a function."""
        self._staging.discard(self._prefixes / function)


class Store:
    """All functions and revisions in the state folder `root`, which the caller must have locked.

    The store skips functions that cannot be read, and calls `report` with a line about each. All methods but `start`
    are safe to call from several threads.
    """

    def __init__(
        self, root: Path, report: Callable[[str], None], retention: Retention = DEFAULT_RETENTION
    ) -> None:
        root = root.absolute()
        self.curves = root / "curves"
        """The folder that holds the measured latency curves."""
        self.copies = re.compile(
            rf"{re.escape(str(root))}/(?:functions/[^/\s]+|staging)/[^/\s]+/{CODE_FOLDER}/"
        )
        """Matches, in a text, the folder of a revision's code at the beginning of a path. The rest of the path is the path in the function's folder."""
        self.weights = shared_weights.SharedWeights(root / shared_weights.FOLDER)
        self._staging = Staging(root / "staging", report)
        self.computed = ComputedFiles(root, retention, self._staging)
        self._functions, self._retention, self._report = root / "functions", retention, report
        self._lock = threading.Lock()

    def start(self) -> None:
        """Make the store's folders, and remove unfinished files that a crash has left. Call this first."""
        self._functions.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._staging.start()
        self.weights.discard_unused()
        for path in self._functions.glob("*/"):
            for half_written in (*path.glob(".current.*"), *path.glob(f"*/.{RECORD_FILE}.*")):
                half_written.unlink()
            self._discard_deleted(FunctionFolder(path, self._report))
            # Remove the folder if it is empty. The gateway has crashed during the function's first deploy, before the
            # revision was moved here, or after the function was deleted.
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
        self.computed.keep({path.name for path in self._functions.glob("*/")})

    def _discard_deleted(self, folder: FunctionFolder) -> None:
        """Remove what a crash has left of a deleted function, or of its revisions that still ran calls."""
        if folder.deleted_file.exists():
            self._staging.remove(folder.path)
            return
        for revision in folder.leftovers() if name_problem(folder.name) is None else ():
            self._staging.remove(folder.path / revision)

    def stage(self) -> Path:
        """Return a new, empty folder for a revision. The caller puts the code into its subfolder `code`."""
        path = self._staging.aside("upload")
        path.mkdir(mode=0o700)
        return path

    def place(self, staged: Path, fields: RevisionFields, least: int = 1) -> RevisionRecord:
        """Give the revision in a staged folder its id, move the folder to its place, and return its record.

        The number of the revision is at least `least`. If `fields` is a complete record, keep its id, which another
        gateway has chosen. The revision is not live yet. Afterwards call `promote` to make it live, or `withdraw` to
        remove it. If an error is raised, the staged folder has been removed.
        """
        try:
            with self._lock:
                folder = self.function(fields.settings.name)
                if isinstance(fields, RevisionRecord):
                    record = fields
                else:
                    record = RevisionRecord.of(fields, max(least, folder.next_number()))
                _write_record(staged, record)
                for path in (staged, *staged.rglob("*")):
                    if not path.is_symlink():
                        sync(path)
                folder.path.mkdir(exist_ok=True, mode=0o700)
                sync(self._functions)
                staged.rename(folder.path / record.revision)
                sync(folder.path)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return record

    def promote(self, record: RevisionRecord) -> None:
        """Make a placed revision live. Store its record again, because its start has added the facts of the handler and
        the warnings.
        """
        folder = self.function(record.function)
        with self._lock:
            _write_record(folder.path / record.revision, record)
            private_files.write(folder.live_file, f"{record.revision}\n".encode())

    def pause(self, name: str, *, paused: bool) -> None:
        """Store whether a function is paused. Raise UnknownFunction if the function was deleted meanwhile, and
        GatewayError if the file cannot be written.
        """
        folder = self.function(name).path
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
        aside, folder = self._staging.aside(record.function), self.function(record.function).path
        with self._lock:
            (folder / record.revision).rename(aside)
            # If the function has other revisions, its folder must stay, and rmdir fails.
            with contextlib.suppress(OSError):
                folder.rmdir()
            gone = not folder.exists()
        if gone:
            self.computed.discard(record.function)
        self._staging.remove(aside)

    def functions(self) -> dict[str, RevisionRecord]:
        """Return the record of each function's live revision, by the function's name."""
        records = {}
        for path in sorted(self._functions.iterdir()):
            if name_problem(path.name) is not None or not path.is_dir():
                self._report(f"{path} is skipped: it is not a function's folder")
            elif record := self.function(path.name).current():
                records[path.name] = record
        return records

    def lost(self, known: Collection[str]) -> list[LostRevision]:
        """Return a stand-in for each function whose live revision is damaged. `known` are the functions that can be read."""
        names = [path.name for path in self._functions.glob("*/") if name_problem(path.name) is None]
        found = (self.function(name).lost() for name in sorted(set(names).difference(known)))
        return [record for record in found if record is not None]

    def function(self, name: str) -> FunctionFolder:
        """Return the folder of a function, which need not exist. Raise SettingsError if no function can have this name."""
        return FunctionFolder(self._functions / check_name(name), self._report)

    def code(self, record: RevisionRecord) -> Path:
        """Return the folder that holds the code of a revision."""
        return self.function(record.function).path / record.revision / CODE_FOLDER

    def delete(self, name: str, *, busy: Collection[str] = ()) -> None:
        """Remove a function and all its revisions. Raise UnknownFunction if it does not exist.

        The revisions in `busy` keep their code until `sweep`, and can be neither listed nor made live.
        """
        folder, aside = self.function(name), self._staging.aside(name)
        # Remove the compiled code and the prefixes first. Then a new function of this name does not get them after a
        # crash in between.
        self.computed.discard(name)
        with self._lock:
            if not folder.path.is_dir():
                raise UnknownFunction.named(name)
            if busy:
                folder.hide(busy, aside)
            else:
                folder.path.rename(aside)
                sync(self._functions)
        self._staging.remove(aside)
        self.weights.discard_unused()

    def sweep(self, name: str, *, busy: Collection[str] = ()) -> list[str]:
        """Remove the code that `delete` has kept for running calls, except the code of the revisions in `busy`. Return
        the ids of the removed revisions.
        """
        folder, aside = self.function(name), self._staging.aside(name)
        aside.mkdir(mode=0o700)
        with self._lock:
            ended = [one for one in folder.leftovers() if one not in busy]
            for revision in ended:
                (folder.path / revision).rename(aside / revision)
            # The folder stays if the function has other revisions.
            with contextlib.suppress(OSError):
                folder.path.rmdir()
        self._staging.remove(aside)
        if ended:
            self.weights.discard_unused()
        return ended

    def environments(self) -> set[str]:
        """Return the digests of the requirements of all revisions of all functions."""
        names = [folder.name for folder in self._functions.iterdir() if name_problem(folder.name) is None]
        return {record.requirements_digest for name in names for record in self.function(name).records()}

    def prune(self, name: str, *, busy: Collection[str] = ()) -> list[str]:
        """Remove old revisions of a function, and return their ids.

        The newest revisions remain, as far as the retention allows. The newest revision, the live revision and the
        revisions in `busy` always remain. If the live revision cannot be read, nothing is removed. Stored prefixes are
        removed once no revision declares any.
        """
        folder = self.function(name)
        with self._lock:
            if (live := folder.current()) is None:
                return []
            kept = {live.revision, *busy, *self._retained(folder)}
            removed = {one: self._staging.aside(name) for one in folder.ids() if one not in kept}
            for revision, aside in removed.items():
                (folder.path / revision).rename(aside)
            if not any(record.settings.prefixes for record in folder.records()):
                self.computed.discard_prefixes(name)
        for aside in removed.values():
            self._staging.remove(aside)
        self.weights.discard_unused()
        return list(removed)

    def _retained(self, folder: FunctionFolder) -> Iterator[str]:
        """Yield the ids of the revisions within the retention, the newest first."""
        total, count = 0, max(1, self._retention.count)
        for position, (revision, size) in enumerate(folder.sizes().items()):
            total += size
            if position and (position >= count or total > self._retention.size_bytes):
                return
            yield revision


def _write_record(folder: Path, record: RevisionRecord) -> None:
    private_files.write(folder / RECORD_FILE, record.model_dump_json(indent=2).encode())
