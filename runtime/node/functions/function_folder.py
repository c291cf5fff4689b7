"""Reads the stored revisions of one function."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ....errors import BadInput, GatewayError, UnknownRevision
from ....snapshot.publish import sync
from ...ground.storing import private_files
from .revision_record import LostRevision, RevisionRecord

CODE_FOLDER, RECORD_FILE = "code", "revision.json"

_REVISION = re.compile(r"r[1-9][0-9]{0,8}-[0-9a-f]{8}")
_NUMBER = re.compile(r"r?([1-9][0-9]{0,8})")


class FunctionFolder:
    """The folder of one function in the store. The folder need not exist. `store.py` describes its files."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """`report` is called with a line if the function has revisions, but its live revision cannot be read."""
        self.name, self.path, self._report = path.name, path, report
        self.live_file, self.deleted_file = path / "current", path / "deleted"

    def ids(self) -> list[str]:
        """Return the ids of all revisions, sorted by their numbers. No record is read."""
        found = [path.name for path in self.path.glob("r*") if _REVISION.fullmatch(path.name)]
        # The ids differ in length only by their numbers, and a shorter number is smaller.
        return sorted(found, key=lambda revision: (len(revision), revision))

    def leftovers(self) -> list[str]:
        """Return the ids of the revisions that have kept only their code: they still ran calls when their function was
        deleted.
        """
        return [revision for revision in self.ids() if not self._record_file(revision).exists()]

    def _record_file(self, revision: str) -> Path:
        return self.path / revision / RECORD_FILE

    def next_number(self) -> int:
        """Return the number that the next revision gets."""
        ids = self.ids()
        return int(ids[-1][1:].partition("-")[0]) + 1 if ids else 1

    def read(self, revision: str) -> RevisionRecord:
        """Return the record of a revision. Raise GatewayError if it cannot be used."""
        if not _REVISION.fullmatch(revision):
            raise GatewayError(f"{revision!r}: that is not a revision's id.")
        record = private_files.load(self._record_file(revision), RevisionRecord)
        code = self.path / revision / CODE_FOLDER
        found = record and _is_whole(code, record) and (record.function, record.revision)
        if record is None or found != (self.name, revision):
            raise GatewayError(f"{self.path / revision} is not that revision.")
        return record

    def current(self) -> RevisionRecord | None:
        """Return the record of the live revision; None if there is no readable record."""
        try:
            if (revision := private_files.read(self.live_file)) is not None:
                return self.read(revision.decode(errors="replace").strip())
            if any(self._record_file(revision).exists() for revision in self.ids()):
                self._report(f"function {self.name} has no live revision: its first deploy was not finished")
        except GatewayError as error:
            self._report(
                f"the live revision of {self.name}, in {self.live_file.parent}, cannot be read: {error.message}"
            )
        return None

    def lost(self) -> LostRevision | None:
        """Return a stand-in for the live revision if its files are damaged; None if they are whole, or if no revision
        was live.
        """
        revision = ""
        try:
            if (found := private_files.read(self.live_file)) is not None:
                revision = found.decode(errors="replace").strip()
                self.read(revision)
                return None
        except GatewayError:
            pass
        readable = self.records()
        # If the id of the live revision cannot be read, look for a record with the facts of a handler. Only a revision
        # that was live has such a record.
        if not revision and not any(record.handler for record in readable):
            return None
        known = revision if revision in self.ids() else f"r{self.next_number()}-{0:08x}"
        return LostRevision.like(next(iter(readable), None), self.name, known)

    def records(self) -> list[RevisionRecord]:
        """Return the records of the revisions that can be read, the newest first."""
        found = []
        for revision in reversed(self.ids()):
            with contextlib.suppress(GatewayError):
                found.append(self.read(revision))
        return found

    def find(
        self, live: RevisionRecord, wanted: str | None, among: Sequence[RevisionRecord] | None = None
    ) -> RevisionRecord:
        """Return the revision to roll back to. `live` is the live revision. `among` are the function's revisions, the
        newest first. If `among` is None, use the revisions in the folder.

        `wanted` is the id of a revision, or its number, as `r3` or `3`. If `wanted` is None, return the newest revision
        before the live one. Raise UnknownRevision if there is no such revision, and BadInput if the wanted revision is
        live.
        """
        found = self.records() if among is None else among
        number = _NUMBER.fullmatch(wanted or "")
        for record in found:
            before = wanted is None and record.number < live.number
            if before or wanted == record.revision or (number and int(number[1]) == record.number):
                if record.revision == live.revision:
                    message = f"{live.revision} of {self.name!r} is live already."
                    raise BadInput(message, remedy="Restart it instead.")
                return record
        there = ", ".join(record.revision for record in found)
        missing = "no older revision" if wanted is None else f"no revision {wanted[:40]!r}"
        raise UnknownRevision(
            f"{self.name!r} has {missing} (there: {there}).",
            remedy="Name a revision that is there, or deploy again.",
        )

    def sizes(self) -> dict[str, int]:
        """Return the bytes on disk of each revision, the newest first, without bytes that a newer revision shares."""
        seen: set[int] = set()
        return {revision: sum(_new_bytes(self.path / revision, seen)) for revision in reversed(self.ids())}

    def hide(self, busy: Collection[str], aside: Path) -> None:
        """Move everything to `aside`, except the code of the `busy` revisions, because the function is deleted."""
        aside.mkdir(mode=0o700)
        # Mark the folder as deleted. If the gateway crashes before it removes the mark, the next start of the store
        # removes the whole folder.
        private_files.write(self.deleted_file, b"")
        try:
            for path in self.path.iterdir():
                if path.name in busy:
                    self._record_file(path.name).unlink(missing_ok=True)
                    sync(path)
                elif path != self.deleted_file:
                    path.rename(aside / path.name)
            sync(self.path)
        finally:
            # Remove the mark also after an error of the disk. Otherwise, the next start of the store would remove a new
            # function of this name.
            self.deleted_file.unlink()
            sync(self.path)


def _is_whole(code: Path, record: RevisionRecord) -> bool:
    """Return True if the code is there, with the file of the handler."""
    file = str(record.handler.get("entry", "")).partition(":")[0]
    try:
        return code.is_dir() and not (file.endswith(".py") and (code / file).stat().st_size == 0)
    except OSError:
        return False


def _new_bytes(folder: Path, seen: set[int]) -> Iterator[int]:
    """Yield the sizes of the files in `folder` whose inodes are not in `seen`, and add the inodes to `seen`."""
    # Do not use recursion: a function may make a tree that is deeper than Python's stack.
    folders = [folder]
    while folders:
        # OSError: another thread may remove the revision meanwhile.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                    continue
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode) and facts.st_ino not in seen:
                    seen.add(facts.st_ino)
                    yield facts.st_size
