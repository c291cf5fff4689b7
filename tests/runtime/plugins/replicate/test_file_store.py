"""The store of uploaded files: shares of owners, expiry, and what crashes leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pilotflame.errors import InputTooLarge, StorageFull, UnknownFile
from pilotflame.runtime.plugins.replicate import file_store
from pilotflame.runtime.plugins.replicate.file_store import FileStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def store(root: Path) -> FileStore:
    return opened(root)


def opened(root: Path) -> FileStore:
    store = FileStore(root)
    store.load()
    return store


def put(store: FileStore, owner: str, content: bytes) -> str:
    upload = store.begin(owner, "x.txt", len(content))
    upload.write(content)
    about = store.finish(upload, "text/plain", {})
    store.discard(upload)
    return about.id


def test_a_file_is_its_owners(store: FileStore, root: Path) -> None:
    first = put(store, "me", b"12345")
    for again in (store, opened(root)):
        assert again.get(first, "me")[1].read_bytes() == b"12345"
        assert [one.id for one in again.list("me")] == [first]
        assert again.list("you") == []
        for file_id, owner in ((first, "you"), ("../files", "me"), ("0" * 32, "me")):
            with pytest.raises(UnknownFile):
                again.get(file_id, owner)
    store.delete(first, "me")
    assert list(root.iterdir()) == []
    with pytest.raises(UnknownFile):
        store.delete(first, "me")


def test_a_stored_file_is_on_the_disk(store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content, about.json and their hidden folder are synced before the folder gets its final name. Then the root is synced."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path.name)

    monkeypatch.setattr("os.fsync", noted)
    upload = store.begin("ada", "hello.txt")
    upload.write(b"hello")
    about = store.finish(upload, "text/plain", {})
    hidden = f".{about.id}"
    assert synced[0] == "content.txt"
    assert synced[1].startswith(".about.json.")
    assert synced[2:] == [hidden, root.name]


def test_an_upload_has_a_limit(store: FileStore, root: Path) -> None:
    upload = store.begin("me", "y", 4)
    with pytest.raises(InputTooLarge):
        upload.write(b"12345")
    store.discard(upload)
    assert list(root.iterdir()) == []
    # A thread may still write after its caller has left and the upload is discarded. The write must fail.
    with pytest.raises(StorageFull):
        upload.write(b"1")


def test_uploads_at_the_same_time_share_what_is_left(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_OWNER_BYTES", 10)
    put(store, "me", b"1234")
    running = store.begin("me", "y", 5)
    with pytest.raises(InputTooLarge, match="no room"):
        store.begin("me", "z", 5)
    # Files of other owners do not count, and the error does not mention them.
    assert put(store, "you", b"1234567890")
    store.discard(running)
    assert put(store, "me", b"12345")
    monkeypatch.setattr(file_store, "MAX_OWNER_FILES", 2)
    with pytest.raises(InputTooLarge, match="2 files"):
        store.begin("me", "z", 1)


def test_the_content_may_be_missing(store: FileStore, root: Path) -> None:
    first = put(store, "me", b"1")
    (root / first / "content.txt").unlink()
    with pytest.raises(UnknownFile):
        store.get(first, "me")


def test_files_expire(store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, running = put(store, "me", b"1"), store.begin("me", "y", 4)
    running.write(b"1")
    monkeypatch.setattr(file_store, "KEEP_S", -1.0)
    assert store.list("me") == []
    with pytest.raises(UnknownFile):
        store.get(first, "me")
    store.sweep()
    assert [one.name for one in root.iterdir()] == [f".{running.file_id}"]
    # The next gateway removes the incomplete uploads of this one when it starts.
    opened(root)
    assert list(root.iterdir()) == []
    store.discard(running)
