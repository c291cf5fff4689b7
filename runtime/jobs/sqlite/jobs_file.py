"""The jobs file of a state folder, and the files of its large bodies, for a move of all jobs to another store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ....errors import JobStoreFailed
from ....snapshot.publish import sync
from ...ground.settings.state_dir import store_fault
from ...ground.storing.blobs import FileBlobs
from .database import Database, SqliteConnection
from .schema import SCRIPTS
from .store import DATABASE_FILE

_MOVED = ".moved-"


class JobsFile:
    """The file of a gateway that does not run. The caller has locked the state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATABASE_FILE
        self._bodies = self.path.with_suffix(".bodies")

    @property
    def moved(self) -> bool:
        """True if there is no file because all jobs were moved."""
        return not self.path.exists() and any(self.path.parent.glob(f"{DATABASE_FILE}{_MOVED}*"))

    @contextmanager
    def open(self) -> Iterator[SqliteConnection]:
        """Upgrade the file, and yield a connection that reads it. Raise JobStoreFailed if it cannot be read, also in the block."""
        database = Database(self.path, SCRIPTS)
        database.open()
        database.close()
        try:
            with closing(database.connect(reading=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            fault, remedy = store_fault(self.path, error)
            raise JobStoreFailed(f"{self.path} cannot be read: {fault}.", remedy=remedy) from error

    def bodies(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the large bodies with these names that exist."""
        blobs = FileBlobs(self._bodies)
        for name in names:
            if (body := blobs.get(name)) is not None:
                yield name, body

    def retire(self, name: str) -> None:
        """Rename the files, so that no gateway runs the jobs. `name` becomes a part of the new names. An interrupted call may be repeated."""
        for path in (self.path, self._bodies):
            if path.exists():
                path.rename(path.with_name(f"{path.name}{_MOVED}{name}"))
        sync(self.path.parent)
