"""Stores uploaded files in a database that gateways share. Each gateway has copies of the files that it received or used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ground.access.keys import ALL
from . import file_store
from .file_store import FileStore, Share, unknown_file
from .upload import CONTENT, HIDDEN, StoredFile, Upload, reported

if TYPE_CHECKING:
    # These modules need psycopg, which a gateway without the setting `database` need not have.
    from ...ground.storing.blobs import Blobs
    from ...ground.storing.postgres import PostgresPool

_ADD = "INSERT INTO uploads (id, owner, size, created_s, about) VALUES (?, ?, ?, ?, ?) RETURNING id"
_SHARES = "SELECT id, size, created_s FROM uploads WHERE owner = ?"
_OWNED = f"(owner = ?1 OR ?1 = '{ALL}') AND created_s > ?2"
_LIST = f"SELECT about FROM uploads WHERE {_OWNED} ORDER BY created_s DESC"  # noqa: S608
_GET = f"SELECT about FROM uploads WHERE {_OWNED} AND id = ?3"  # noqa: S608
_DELETE = f"DELETE FROM uploads WHERE {_OWNED} AND id = ?3 RETURNING id"  # noqa: S608
_EXPIRE = "DELETE FROM uploads WHERE created_s <= ? RETURNING id"


class SharedFileStore(FileStore):
    """The files in the database. The methods also raise JobStoreFailed.

    An owner's share does not count the uploads that other gateways receive at the same time.
    """

    def __init__(self, root: Path, check_disk: Callable[[], None], pool: PostgresPool, blobs: Blobs) -> None:
        super().__init__(root, check_disk)
        self._pool, self._blobs = pool, blobs
        # `finish` and `_copied` hold this lock, so that at most one file is in memory. `sweep` holds it, too: then a file without
        # a row is a copy of a deleted file, and not a file that `finish` is storing.
        self._moving = threading.Lock()

    def load(self, owner: str = ALL) -> None:
        super().load()
        rows = self._pool.rows(_SHARES, owner)
        mine = {file_id: Share(owner, size, created_s) for file_id, size, created_s in rows}
        with self._lock:
            others = {one: share for one, share in self._stored.items() if share.owner != owner}
            self._stored = others | mine

    def finish(self, upload: Upload, content_type: str, metadata: dict[str, Any]) -> StoredFile:
        with self._moving:
            about = super().finish(upload, content_type, metadata)
            row = (about.id, about.owner, about.size, about.created_s, about.model_dump_json())
            try:
                if (path := self._content(about.id)) is not None:
                    with reported():
                        content = path.read_bytes()
                    self._blobs.put(about.id, content)
                self._pool.rows(_ADD, *row)
            except BaseException:
                self._remove(about.id)
                raise
        return about

    def get(self, file_id: str, owner: str) -> tuple[StoredFile, Path]:
        super().load()
        for (text,) in self._pool.rows(_GET, owner, _oldest_s(), file_id):
            about = StoredFile.model_validate_json(text)
            return about, self._content(file_id) or self._copied(about)
        raise unknown_file(file_id)

    def list(self, owner: str) -> list[StoredFile]:
        rows = self._pool.rows(_LIST, owner, _oldest_s())
        return [StoredFile.model_validate_json(text) for (text,) in rows]

    def delete(self, file_id: str, owner: str) -> None:
        if not self._pool.rows(_DELETE, owner, _oldest_s(), file_id):
            raise unknown_file(file_id)
        self._blobs.delete((file_id,))
        self._remove_folder(file_id)

    def sweep(self) -> None:
        """Also remove copies of files that were deleted at other gateways."""
        super().load()
        self._blobs.delete([file_id for (file_id,) in self._pool.rows(_EXPIRE, _oldest_s())])
        with self._moving:
            kept = {file_id for (file_id,) in self._pool.rows("SELECT id FROM uploads")}
            for path in self._root.iterdir():
                if path.name not in kept and not path.name.startswith(HIDDEN):
                    self._remove_folder(path.name)
        self._blobs.keep(kept)

    def _content(self, file_id: str) -> Path | None:
        return next((self._root / file_id).glob(f"{CONTENT}*"), None)

    def _copied(self, about: StoredFile) -> Path:
        """Copy a file from the database, and return its path."""
        with self._moving:
            if (path := self._content(about.id)) is not None:
                return path
            content = self._blobs.get(about.id) or b""
            if len(content) == about.size:
                upload = Upload(self._root, about.id, about.owner, about.name, about.size)
                try:
                    upload.write(content)
                    upload.publish(about.content_type, about.metadata)
                finally:
                    upload.close()
                if (path := self._content(about.id)) is not None:
                    return path
        raise unknown_file(about.id)


def _oldest_s() -> float:
    return time.time() - file_store.KEEP_S
