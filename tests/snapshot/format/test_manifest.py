"""The manifest: round trips, cross-checks, hostile input, atomic writing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import ManifestError, SourceMissing
from pilotflame.snapshot.format.digests import ALGORITHMS
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest, Provenance, read_manifest
from pilotflame.snapshot.sources.folder import FolderSource

CHUNK = 4096


def plain(**changes: Any) -> dict[str, Any]:
    """Return the JSON of a small valid manifest with these changes: one shard of two chunks, two tensors, one alias."""
    return {
        "version": 1,
        "algorithm": "xxh3-128",
        "chunk_bytes": CHUNK,
        "shards": [
            {
                "name": "m.safetensors",
                "size_bytes": 5000,
                "data_offset_bytes": 100,
                "chunks": ["0" * 32, "a" * 32],
            }
        ],
        "tensors": [
            {"name": "a", "dtype": "F32", "shape": [2, 3], "shard": 0, "offset_bytes": 100, "size_bytes": 24},
            {"name": "b", "dtype": "I8", "shape": [], "shard": 0, "offset_bytes": 124, "size_bytes": 1},
        ],
        "aliases": {"c": "a"},
        "first_touch": ["b", "a"],
        "assets": [{"name": "config.json", "size_bytes": 2, "digest": "b" * 32}],
        "provenance": {"created_by": "x", "source": "y"},
    } | changes


def edited(field: str, value: Any, index: int = 0, of: str = "tensors") -> dict[str, Any]:
    document = plain()
    document[of][index][field] = value
    return document


def assets(count: int, size_bytes: int) -> list[dict[str, Any]]:
    return [{"name": f"{index}", "size_bytes": size_bytes, "digest": "b" * 32} for index in range(count)]


def many_chunks() -> list[dict[str, Any]]:
    """Return two shards. Each has fewer chunks than the limit, but together they have more."""
    count = (1 << 18) + 1
    shard = {"size_bytes": count * CHUNK, "data_offset_bytes": 100, "chunks": ["0" * 32] * count}
    return [{"name": name, **shard} for name in "ab"]


def sha256_shards() -> list[dict[str, Any]]:
    return [{**plain()["shards"][0], "chunks": ["0" * 64, "a" * 64]}]


def parse(document: dict[str, Any]) -> Manifest:
    return Manifest.parse(json.dumps(document).encode())


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tensors, shards = [], []
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    digits = ALGORITHMS[algorithm].digits
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True, max_size=8)
    )
    for shard in range(draw(st.integers(1, 3))):
        end = start = draw(st.integers(8, 200))
        for _ in range(draw(st.integers(0, 3))):
            if not names:
                break
            dtype = draw(st.sampled_from(sorted(DTYPES)))
            shape = draw(st.lists(st.integers(0, 9), max_size=3))
            if (size := DTYPES[dtype].size_bytes(shape)) is None:
                continue
            tensors.append(
                {
                    "name": names.pop(),
                    "dtype": dtype,
                    "shape": shape,
                    "shard": shard,
                    "offset_bytes": end,
                    "size_bytes": size,
                }
            )
            end += size
        digests = [f"{draw(st.integers(0, 16**digits - 1)):0{digits}x}" for _ in range(-(-end // CHUNK))]
        shards.append(
            {"name": f"{shard}.safetensors", "size_bytes": end, "data_offset_bytes": start, "chunks": digests}
        )
    aliases = {name: draw(st.sampled_from(tensors))["name"] for name in names} if tensors else {}
    assets = [{"name": "config.json", "size_bytes": 2, "digest": "b" * digits}]
    fields = {"shards": shards, "tensors": tensors, "aliases": aliases, "assets": assets}
    return parse(plain(algorithm=algorithm, first_touch=[], **fields))


@given(manifests())
def test_every_manifest_is_read_back(manifest: Manifest) -> None:
    again = Manifest.parse(manifest.to_json())
    assert again == manifest
    assert again.digest == manifest.digest


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5))
def test_corrupted_bytes_never_crash(changes: list[tuple[int, int]]) -> None:
    text = bytearray(json.dumps(plain()).encode())
    for position, value in changes:
        text[position % len(text)] = value
    try:
        Manifest.parse(bytes(text))
    except ManifestError as error:
        str(error).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(plain())), json_values)
def test_any_value_in_any_field_never_crashes(field: str, value: Any) -> None:
    with contextlib.suppress(ManifestError):
        parse(plain(**{field: value}))


def test_the_plain_one_is_sound() -> None:
    manifest = parse(plain())
    assert manifest.aliases == {"c": "a"}
    assert manifest.total_bytes == 5000


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (plain(version=2), "version"),
        (plain(algorithm="md5"), "algorithm"),
        (plain(algorithm="sha256"), "the 64 digits of sha256"),
        (plain(algorithm="sha256", assets=[]), "the 64 digits of sha256"),
        (edited("chunks", ["0" * 64, "a" * 32], of="shards"), "the 32 digits of xxh3-128"),
        (edited("chunks", ["0" * 48, "a" * 32], of="shards"), "chunks"),
        (edited("digest", "b" * 64, of="assets"), "the 32 digits of xxh3-128"),
        (
            plain(
                algorithm="sha256", observed={"url": "x", "versions": [""]}, shards=sha256_shards(), assets=[]
            ),
            "another algorithm than xxh3-128",
        ),
        (plain(chunk_bytes=1), "chunk_bytes"),
        (plain(chunk_bytes=1 << 40), "chunk_bytes"),
        (plain(extra=1), "extra"),
        (plain(aliases={"c": "z"}), "'z', which is not a tensor"),
        (plain(aliases={"a": "b"}), "shadows"),
        (plain(aliases={"c": "d", "d": "a"}), "'d', which is not a tensor"),
        (plain(first_touch=["z"]), "first touch names 'z'"),
        (plain(first_touch=["a", "a"]), "there twice"),
        (plain(shards=[]), "shard 0 of 0"),
        (plain(shards=plain()["shards"] * 2), "'m.safetensors' is there twice"),
        (edited("name", "b"), "tensor 'b' is there twice"),
        (edited("shard", 1), "shard 1 of 1"),
        (edited("shard", -1), "shard"),
        (edited("offset_bytes", 99), "outside the data"),
        (edited("offset_bytes", 4990), "outside the data"),
        (edited("offset_bytes", 1 << 60), "offset_bytes"),
        (edited("offset_bytes", 101), "overlap"),
        (edited("size_bytes", 25), "shape and dtype do not make"),
        (edited("shape", [1 << 50] * 64), "do not make"),
        (edited("shape", [1] * 65), "shape"),
        (edited("shape", [2.0, 3]), "shape"),
        (edited("dtype", "F31"), "unknown dtype"),
        (edited("name", ""), "name"),
        (edited("chunks", [], of="shards"), "0 chunk digests and needs 2"),
        (edited("chunks", ["0" * 31, "a" * 32], of="shards"), "chunks"),
        (edited("chunks", ["0" * 32 + "\n", "a" * 32], of="shards"), "chunks"),
        (edited("data_offset_bytes", 5001, of="shards"), "data after its end"),
        (edited("size_bytes", 1 << 52, of="shards"), "needs"),
        (edited("name", "../m.safetensors", of="shards"), "not a file inside"),
        (edited("name", "/etc/passwd", of="shards"), "absolute"),
        (edited("name", "a//b", of="shards"), "component"),
        (edited("name", "a\x00b", of="shards"), "control character"),
        (edited("name", "a\\b", of="shards"), "backslash"),
        (edited("name", "pilotflame.manifest.json", of="shards"), "name of the manifest or of its signature"),
        (edited("name", "pilotflame.manifest.json", of="assets"), "name of the manifest or of its signature"),
        (edited("name", "pilotflame.manifest.json.sig", of="assets"), "manifest or of its signature"),
        (edited("name", "pilotflame.manifest.json/x", of="assets"), "both a file and a folder"),
        (edited("name", "m.safetensors", of="assets"), "'m.safetensors' is there twice"),
        (edited("name", "m.safetensors/x", of="assets"), "'m.safetensors' is both a file and a folder"),
        (edited("name", "../config.json", of="assets"), "not a file inside"),
        (edited("name", ".landed", of="assets"), "hidden"),
        (edited("name", "a/.b/c", of="assets"), "hidden"),
        (edited("name", "1/2/3/4/5/c", of="assets"), "folders deep"),
        (edited("size_bytes", (64 << 20) + 1, of="assets"), "size_bytes"),
        (edited("digest", "b" * 31, of="assets"), "digest"),
        (plain(assets=assets(1025, 1)), "assets"),
        (plain(assets=assets(9, 64 << 20)), "over the limit of 536870912"),
        (plain(shards=many_chunks()), "over the limit of 524288"),
    ],
)
def test_each_defect_is_named(document: dict[str, Any], fault: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(document)
    assert fault in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b"\xff\xfe", b'{"version": 1e999}'])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(text)


def test_the_digest_is_of_the_weights_not_of_their_history() -> None:
    manifest = parse(plain())
    other = manifest.model_copy(update={"provenance": Provenance(created_by="someone else")})
    assert other.digest == manifest.digest
    assert parse(plain(aliases={})).digest != manifest.digest
    assert parse(plain(first_touch=["a", "b"])).digest == manifest.digest
    assert parse(edited("digest", "c" * 32, of="assets")).digest != manifest.digest


def parts(*chunks: tuple[int, int]) -> Manifest:
    """Return a manifest of two shards, one with three chunks and one with two. `chunks` is its part; without it, all are needed."""
    shards = [
        {"name": name, "size_bytes": size, "data_offset_bytes": 8, "chunks": ["a" * 32] * -(-size // CHUNK)}
        for name, size in (("one", 2 * CHUNK + 5), ("two", CHUNK + 7))
    ]
    document = plain(shards=shards, tensors=[], aliases={}, first_touch=[])
    return parse(document | {"part": {"chunks": chunks}} if chunks else document)


def test_the_bytes_of_a_part_are_those_of_its_chunks() -> None:
    whole = parts()
    assert whole.needed_extents(0) == [(0, 2 * CHUNK + 5)]
    assert whole.needed_bytes == whole.total_bytes == 3 * CHUNK + 12
    across = parts((0, 0), (2, 3))
    assert across.needed_extents(0) == [(0, CHUNK), (2 * CHUNK, 2 * CHUNK + 5)]
    assert across.needed_extents(1) == [(0, CHUNK)]
    assert across.needed_bytes == 2 * CHUNK + 5
    assert parts((4, 4)).needed_extents(0) == []


@pytest.mark.parametrize("chunks", [[(1, 0)], [(2, 3), (3, 4)], [(2, 3), (0, 1)], [(4, 5)]])
def test_a_part_of_disorderly_chunks_is_refused(chunks: list[tuple[int, int]]) -> None:
    with pytest.raises(ManifestError, match="part"):
        parts(*chunks)


def test_digests_are_known_once_each_chunk_that_is_needed_has_one() -> None:
    observed = {"url": "http://weights/m", "versions": ["v1"]}
    manifest = parse(plain(observed=observed))
    # The first chunk of the plain manifest has UNKNOWN_DIGEST. Only in an observed manifest does it mean an unknown digest.
    assert parse(plain()).has_digests
    assert not manifest.has_digests
    assert manifest.with_chunks(["b" * 32, "a" * 32]).has_digests
    assert parse(plain(observed=observed, part={"chunks": [(1, 1)]})).has_digests
    assert not parse(plain(observed=observed, part={"chunks": [(0, 0)]})).has_digests


def test_where_there_is_no_manifest_the_remedy_makes_one(tmp_path: Path) -> None:
    folder = FolderSource(tmp_path)
    with pytest.raises(SourceMissing, match="There is no manifest at") as caught:
        read_manifest(folder)
    assert caught.value.remedy.endswith(f"pilotflame snapshot create {folder.url}")


def test_a_manifest_of_a_cache_is_not_read_from_a_source(tmp_path: Path) -> None:
    parts((0, 0)).write(tmp_path / MANIFEST_NAME)
    with pytest.raises(ManifestError, match="one of a cache: it has `part`"):
        read_manifest(FolderSource(tmp_path))
    parts().write(tmp_path / MANIFEST_NAME)
    assert read_manifest(FolderSource(tmp_path)) == parts()


def test_an_older_manifest_has_no_assets() -> None:
    document = plain()
    del document["assets"]
    assert parse(document).assets == ()
    assert parse(document).digest == parse(plain(assets=[])).digest


@pytest.mark.parametrize(
    "text",
    [
        b'{"x": [' + b"[]," * 2_000_000 + b"[]]}",
        b'{"x": [' + b"0," * 5_000_000 + b"0]}",
        b'{"version": 1, "shards": [], "tensors": [], "aliases": {'
        + b",".join(b'"%d": 1' % index for index in range(300))
        + b"}}",
    ],
    ids=["brackets", "commas", "faults"],
)
def test_bulk_is_refused_unparsed(text: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ManifestError, match=r"over the limit of|300 faults"):
        Manifest.parse(text)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


MANY = ",".join(f'"{index:x}": 1' for index in range(200_000))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{" + MANY + "}", "manifest's fields"),
        ('{"version": 1, "shards": [{' + MANY + '}], "tensors": []}', "shards is not a list of objects"),
        ('{"version": 1, "shards": [], "tensors": [{' + MANY + "}]}", "tensors is not a list of objects"),
        ('{"version": 1, "shards": [], "tensors": {' + MANY + "}}", "tensors is not a list of objects"),
        ('{"shards": [], "tensors": [], "provenance": {' + MANY + "}}", "provenance is not an object"),
        ('{"shards": [], "tensors": [], "aliases": {' + MANY + "}}", "200000 faults"),
        ("[" * 1_000_000 + " " * 100_000, "not JSON"),
    ],
)
def test_a_large_text_of_faults_is_refused_cheaply(text: str, fault: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(text.encode())
    assert fault in caught.value.message


def test_a_large_manifest_is_read() -> None:
    chunks = ["0" * 32] * 40_000
    shard = {"name": "m", "size_bytes": CHUNK * 40_000, "data_offset_bytes": 100, "chunks": chunks}
    text = json.dumps(
        plain(shards=[shard], aliases={f"alias {index}": "a" for index in range(9000)})
    ).encode()
    assert len(text) > 1 << 20
    assert len(Manifest.parse(text).aliases) == 9000


def test_written_whole_and_read_from_file_or_folder(tmp_path: Path) -> None:
    manifest = parse(plain())
    manifest.write(tmp_path / MANIFEST_NAME)
    assert Manifest.read(tmp_path) == Manifest.read(tmp_path / MANIFEST_NAME) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_a_failed_write_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = parse(plain())
    manifest.write(tmp_path / MANIFEST_NAME)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        parse(plain(aliases={})).write(tmp_path / MANIFEST_NAME)
    assert Manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_a_missing_file_is_a_manifest_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_torch_is_not_loaded() -> None:
    modules = "format.manifest, pilotflame.snapshot.format.create, pilotflame.snapshot.format.verify, pilotflame.snapshot.sources.folder"
    code = f"import sys, pilotflame.snapshot.{modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
