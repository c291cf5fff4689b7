"""Uploaded files in the database of two gateways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from pilotflame.errors import InputTooLarge, JobStoreFailed, StorageFull, UnknownFile
from pilotflame.runtime.front.listening.origins import Origins
from pilotflame.runtime.ground.access.keys import ALL
from pilotflame.runtime.jobs.stored.job import NewJob
from pilotflame.runtime.plugins.replicate import file_store
from pilotflame.runtime.plugins.replicate.files import FilesApi
from pilotflame.runtime.plugins.replicate.shared_files import SharedFileStore

postgres = pytest.importorskip("pilotflame.runtime.ground.storing.postgres")
blobs = pytest.importorskip("pilotflame.runtime.ground.storing.postgres_blobs")
CONTENT = bytes(range(256)) * 10_000


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[list[SharedFileStore]]:
    postgres.prepare_database(postgres_url)
    pool = postgres.PostgresPool(postgres_url)
    stored = blobs.PostgresBlobs(pool, "upload_files")
    yield [SharedFileStore(tmp_path / name, lambda: None, pool, stored) for name in ("one", "other")]
    pool.close()


def put(store: SharedFileStore, owner: str = "me", content: bytes = CONTENT) -> str:
    store.load(owner)
    upload = store.begin(owner, "x.txt", len(content))
    if content:
        upload.write(content)
    try:
        return store.finish(upload, "text/plain", {}).id
    finally:
        store.discard(upload)


def copies(store: SharedFileStore) -> list[str]:
    return [path.name for path in store._root.iterdir()]


def test_a_file_is_at_both_gateways(pair: list[SharedFileStore]) -> None:
    one, other = pair
    file, empty = put(one), put(one, content=b"")
    for store in pair:
        assert (
            {about.id for about in store.list("me")}
            == {about.id for about in store.list(ALL)}
            == {file, empty}
        )
        assert (store.list("you"), store.get(empty, ALL)[1].read_bytes()) == ([], b"")
        about, path = store.get(file, "me")
        assert (about.size, about.owner, path.suffix, path.read_bytes()) == (
            len(CONTENT),
            "me",
            ".txt",
            CONTENT,
        )
        assert path.is_relative_to(store._root)
        for name, owner in ((file, "you"), ("../one", "me"), ("0" * 32, "me")):
            with pytest.raises(UnknownFile):
                store.get(name, owner)
    with pytest.raises(UnknownFile):
        other.delete(file, "you")
    other.delete(file, "me")
    with pytest.raises(UnknownFile):
        other.delete(file, "me")
    with pytest.raises(UnknownFile):
        one.get(file, "me")
    assert (copies(other), set(copies(one))) == ([empty], {empty, file})
    one.sweep()
    assert copies(one) == [empty]


def test_the_share_of_an_owner_counts_at_both_gateways(
    pair: list[SharedFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_OWNER_BYTES", 10)
    one, other = pair
    file = put(one, content=b"123456")
    put(one, "you", b"123456")
    with pytest.raises(InputTooLarge, match="no room"):
        put(other, content=b"12345")
    other.delete(file, "me")
    put(one, content=b"1234567890")


def test_files_expire_at_both_gateways(pair: list[SharedFileStore], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    file = put(one)
    other.get(file, "me")
    monkeypatch.setattr(file_store, "KEEP_S", -1.0)
    for store in pair:
        assert store.list("me") == []
        with pytest.raises(UnknownFile):
            store.get(file, "me")
        store.sweep()
        assert copies(store) == []
    assert one._pool.rows("SELECT name FROM upload_files") == []


def test_a_file_that_cannot_be_stored_for_all_is_not_kept(
    pair: list[SharedFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise JobStoreFailed("PostgreSQL is away.")

    monkeypatch.setattr(pair[0]._blobs, "put", fail)
    with pytest.raises(JobStoreFailed):
        put(pair[0])
    assert (copies(pair[0]), pair[0].list("me")) == ([], [])


async def test_a_job_gets_the_paths_of_the_gateway_that_runs_it(
    pair: list[SharedFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    file = put(one)
    api = FilesApi(other, Origins(()), lambda _: "")
    url = f"http://h/replicate/v1/files/{file}"
    about = {"id": "mine", "files": {url: str(one.get(file, "me")[1])}}
    job = NewJob("f", orjson.dumps({"image": url}), execution_timeout_s=1.0, ttl_s=1.0, extra={"bare": True, "prediction": about})  # fmt: skip
    queued = job.queued("job-1", 0.0)
    plain = NewJob("f", b"1", execution_timeout_s=1.0, ttl_s=1.0).queued("job-2", 0.0)
    assert await api.brought(plain) is plain
    shutil.rmtree(one._root / file)
    found = (await api.brought(queued)).extra
    assert found is not None
    path = Path(found["prediction"]["files"][url])
    assert (path.read_bytes(), path.is_relative_to(other._root)) == (CONTENT, True)
    assert (found["bare"], found["prediction"]["id"]) == (True, "mine")

    def full(*_: object) -> None:
        raise StorageFull("full")

    monkeypatch.setattr(other, "get", full)
    with pytest.raises(JobStoreFailed):
        await api.brought(queued)
    monkeypatch.undo()
    one.delete(file, "me")
    assert await api.brought(queued) is queued
