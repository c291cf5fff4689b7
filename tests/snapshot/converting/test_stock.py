"""A push to S3 sends only what changed: the rest is copied at the store, byte for byte, or not at all."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some
from moto.server import DomainDispatcherApplication, create_backend_app
from pilotflame.errors import SnapshotError, SourceDenied
from pilotflame.snapshot.converting.push import Pushed, push
from pilotflame.snapshot.converting.stock import COPY_BYTES, PART_BYTES, Stock
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest, Shard
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.s3 import S3Source
from safetensors.numpy import save_file
from werkzeug.serving import make_server

MIB = 1 << 20


class Store:
    """moto behind a count of the bytes that are sent to it. It refuses the requests for which `refuses` is true."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.put_bytes = 0
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _environ: False
        self.refusal = "501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>"
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        if self.refuses(environ):
            status, text = self.refusal
            start_response(status, [("Content-Type", "application/xml")])
            return [text]
        if environ["REQUEST_METHOD"] == "PUT":
            self.put_bytes += int(environ.get("CONTENT_LENGTH") or 0)
        return self._moto(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store with bucket `weights`, to which the environment points."""
    store = Store()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_ENDPOINT_URL_S3", store.url)
        boto3.client("s3").create_bucket(Bucket="weights")
        yield store
    store.close()


def write(folder: Path, layers: dict[str, list[int]], value: int = 0) -> Manifest:
    """Shards of layers of 4 MiB each, of random bytes that the layer's number decides."""
    folder.mkdir(exist_ok=True)
    for name, numbers in layers.items():
        arrays = {
            f"{name}.{position}": numpy.frombuffer(random.Random(number).randbytes(4 * MIB), numpy.uint8)
            for position, number in enumerate(numbers)
        }
        save_file(arrays, folder / f"{name}.safetensors")
    places = {
        f"{name}.{position}": f"{name}.safetensors"
        for name in layers
        for position in range(len(layers[name]))
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(str(value))
    return create(folder, chunk_bytes=MIB)


def sums(url: str, manifest: Manifest) -> list[str]:
    source, found = S3Source(url), []
    for shard in manifest.shards:
        bytes_ = bytearray(shard.size_bytes)
        source.read_into(shard.name, 0, memoryview(bytes_))
        found.append(hashlib.sha256(bytes_).hexdigest())
    return found


def wanted(folder: Path, manifest: Manifest) -> list[str]:
    return [hashlib.sha256((folder / shard.name).read_bytes()).hexdigest() for shard in manifest.shards]


@dataclass(frozen=True)
class Existing:
    """A snapshot in a folder, which is also at a URL of the store."""

    folder: Path
    manifest: Manifest
    url: str


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Existing:
    """Two shards, of two layers and of four."""
    folder = tmp_path_factory.mktemp("first")
    manifest = write(folder, {"a": [0, 1], "b": [2, 3, 4, 5]})
    push(folder, manifest, S3Source("s3://weights/original"))
    assert store.put_bytes > manifest.total_bytes
    return Existing(folder, manifest, "s3://weights/original")


@pytest.fixture
def first(store: Store, original: Existing) -> Iterator[Existing]:
    """A copy of it, for one test."""
    client = boto3.client("s3")
    for name in S3Source(original.url).names():
        place = {"Bucket": "weights", "Key": f"original/{name}"}
        client.copy_object(Bucket="weights", Key=f"first/{name}", CopySource=place)
    store.put_bytes = 0
    yield Existing(original.folder, original.manifest, "s3://weights/first")
    store.refuses = lambda _environ: False
    assert "Uploads" not in client.list_multipart_uploads(Bucket="weights")
    for entry in client.list_objects_v2(Bucket="weights")["Contents"]:
        if not entry["Key"].startswith("original/"):
            client.delete_object(Bucket="weights", Key=entry["Key"])
    client.close()


@pytest.mark.parametrize("how", ["base", "force"])
def test_only_the_changed_parts_are_sent(tmp_path: Path, store: Store, first: Existing, how: str) -> None:
    folder = tmp_path / "second"
    second = write(folder, {"a": [0, 1], "b": [2, 3, 4, 100]}, value=1)
    url = "s3://weights/second" if how == "base" else first.url
    base = S3Source(first.url) if how == "base" else None
    pushed = push(folder, second, S3Source(url), base=base, force=how == "force", verified=True)
    # A layer of 4 MiB, in parts of 8 MiB on a grid; the file ends shortly after it.
    assert store.put_bytes <= 9 * MIB
    assert pushed.sent_bytes <= 9 * MIB
    assert (
        pushed.sent_bytes + pushed.kept_bytes + pushed.copied_bytes
        == second.total_bytes + second.assets_bytes
    )
    assert pushed.sent_files == (4 if how == "base" else 2)
    assert sums(url, second) == wanted(folder, second)
    assert push(folder, second, S3Source(url)) == Pushed(0, 0, 4, second.total_bytes + second.assets_bytes)


@pytest.mark.parametrize("base", [None, "s3://weights"])
def test_shards_that_change_places_are_not_made_of_what_was_overwritten(
    tmp_path: Path, store: Store, first: Existing, base: str | None
) -> None:
    folder = tmp_path / "second"
    if base == "s3://weights":
        # The same objects, seen from further above.
        text = (
            first.manifest.to_json()
            .replace(b'"a.safe', b'"first/a.safe')
            .replace(b'"b.safe', b'"first/b.safe')
        )
        above = Manifest.parse(text).model_copy(update={"assets": ()})
        S3Source(base).put(MANIFEST_NAME, above.to_json())
    second = write(folder, {"a": [2, 3, 4, 5], "b": [0, 1]})
    # But for the chunks with a part of the header.
    assert {*second.shards[1].chunks[1:]} <= {*first.manifest.shards[0].chunks}
    push(
        folder, second, S3Source(first.url), force=True, verified=True, base=S3Source(base) if base else None
    )
    assert sums(first.url, second) == wanted(folder, second)


def test_an_object_that_is_not_as_its_manifest_says_is_not_copied(store: Store, first: Existing) -> None:
    boto3.client("s3").put_object(Bucket="weights", Key="first/a.safetensors", Body=b"short")
    store.put_bytes = 0
    url = "s3://weights/second"
    push(first.folder, first.manifest, S3Source(url), base=S3Source(first.url), verified=True)
    assert sums(url, first.manifest) == wanted(first.folder, first.manifest)
    assert 8 * MIB <= store.put_bytes <= 9 * MIB


def test_a_store_that_copies_no_parts_gets_all_bytes(store: Store, first: Existing) -> None:
    store.refuses = lambda environ: "HTTP_X_AMZ_COPY_SOURCE" in environ
    url, manifest = "s3://weights/second", first.manifest
    pushed = push(first.folder, manifest, S3Source(url), base=S3Source(first.url), verified=True)
    assert pushed == Pushed(4, manifest.total_bytes + manifest.assets_bytes, 0, 0, 0)
    assert sums(url, manifest) == wanted(first.folder, manifest)


def test_a_push_that_fails_leaves_the_object_as_it_was(tmp_path: Path, store: Store, first: Existing) -> None:
    folder = tmp_path / "second"
    second = write(folder, {"a": [0, 1], "b": [2, 3, 4, 100]})
    store.refuses = lambda environ: (
        environ["REQUEST_METHOD"] == "PUT"
        and "partNumber" in environ["QUERY_STRING"]
        and "HTTP_X_AMZ_COPY_SOURCE" not in environ
    )
    store.refusal = "403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>"
    with pytest.raises(SourceDenied):
        push(folder, second, S3Source(first.url), force=True, verified=True)
    assert sums(first.url, first.manifest) == wanted(first.folder, first.manifest)


def test_a_base_elsewhere_is_refused(tmp_path: Path, store: Store, first: Existing) -> None:
    own = {"AWS_ACCESS_KEY_ID": "k", "AWS_ENDPOINT_URL": store.url}
    there = S3Source("s3://weights/second")
    for destination, base in (
        (there, FolderSource(first.folder)),
        (there, S3Source(first.url, own)),
        (FolderSource(tmp_path / "there"), S3Source(first.url)),
    ):
        with pytest.raises(SnapshotError, match="cannot copy from"):
            push(first.folder, first.manifest, destination, base=base, verified=True)


# -- the plan


def shard(name: str, numbers: list[int], chunk_bytes: int, short: int) -> Shard:
    chunks = tuple(f"{number:032x}" for number in numbers)
    size_bytes = max(0, len(chunks) * chunk_bytes - short)
    return Shard(name=name, size_bytes=size_bytes, data_offset_bytes=0, chunks=chunks)


NUMBERS = some.lists(some.integers(1, 30), min_size=1, max_size=30)
CHUNKS = some.sampled_from([512 << 10, MIB, 4 * MIB, 64 * MIB])


@given(some.lists(NUMBERS, max_size=3), NUMBERS, CHUNKS, some.integers(0, 4000))
def test_pieces_are_all_of_the_shard_and_say_where_its_very_chunks_are(
    there: list[list[int]], here: list[int], chunk_bytes: int, short: int
) -> None:
    stock, source = Stock(), FolderSource(Path("/nowhere"))
    shards = {
        f"{index}": shard(f"{index}", numbers, chunk_bytes, short) for index, numbers in enumerate(there)
    }
    manifest = Manifest.build(chunk_bytes=chunk_bytes, shards=tuple(shards.values()), tensors=())
    stock.add(source, manifest, {name: one.size_bytes for name, one in shards.items()})
    new = shard("new", here, chunk_bytes, short)
    pieces = stock.pieces(new, chunk_bytes)
    assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == new.size_bytes
    assert all(piece.end - piece.begin >= PART_BYTES for piece in pieces[:-1])
    for piece in pieces:
        if piece.there is None:
            continue
        assert piece.end - piece.begin <= max(COPY_BYTES, chunk_bytes)
        old = shards[piece.there[1]]
        count = -(-(piece.end - piece.begin) // chunk_bytes)
        at, was = piece.begin // chunk_bytes, piece.offset // chunk_bytes
        assert new.chunks[at : at + count] == old.chunks[was : was + count]
        assert piece.offset + piece.end - piece.begin <= old.size_bytes
    if here in there and len(set(here)) == len(here):
        assert all(piece.there is not None for piece in pieces)
