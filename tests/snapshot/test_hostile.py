"""Hostile manifests and headers either parse to something valid or are refused, quickly and in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.errors import HeaderError, ManifestError, SnapshotError
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.header import MAX_HEADER_BYTES, Header, parse_header, read_header
from pilotflame.snapshot.format.layout import read_index
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, MAX_ASSET_BYTES, Manifest
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.source import name_fault
from safetensors.torch import save

DEADLINE_MS = 2000
CHUNK = 4096
hostile = settings(
    deadline=DEADLINE_MS,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def sound() -> dict[str, Any]:
    """Return the JSON of a valid manifest of two shards that uses every field."""
    return {
        "version": 1,
        "algorithm": "xxh3-128",
        "chunk_bytes": CHUNK,
        "shards": [
            {
                "name": "a.safetensors",
                "size_bytes": 5000,
                "data_offset_bytes": 104,
                "chunks": ["0" * 32, "a" * 32],
            },
            {"name": "b.safetensors", "size_bytes": 200, "data_offset_bytes": 96, "chunks": ["1" * 32]},
        ],
        "tensors": [
            {"name": "w", "dtype": "F32", "shape": [2, 3], "shard": 0, "offset_bytes": 104, "size_bytes": 24},
            {"name": "x", "dtype": "BF16", "shape": [8], "shard": 0, "offset_bytes": 128, "size_bytes": 16},
            {"name": "y", "dtype": "I8", "shape": [], "shard": 1, "offset_bytes": 96, "size_bytes": 1},
            {"name": "z", "dtype": "F64", "shape": [0, 9], "shard": 1, "offset_bytes": 97, "size_bytes": 0},
        ],
        "aliases": {"v": "w"},
        "first_touch": ["x", "w"],
        "assets": [{"name": "1/config.json", "size_bytes": 2, "digest": "b" * 32}],
        "provenance": {"created_by": "x", "source": "y"},
    }


odd_numbers = st.sampled_from(
    [-1, 0, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), 0.0, 1.5, 1e308, -0.0, True, False]
)
odd_texts = st.sampled_from(
    [
        "",
        ".",
        "..",
        "/",
        "/etc/passwd",
        "../../x",
        "a/../b",
        "a//b",
        "a\\b",
        "\x00",
        "\n",
        "\u202e",
        "é",
        "é",
        "😀",
        "x" * 1025,
        "." * 300,
        "a/" * 500 + "a",
        "CON",
        ".hidden",
        "a.safetensors",
        "w",
        "v",
        "F32",
        "__metadata__",
        MANIFEST_NAME,
        MANIFEST_NAME + "/x",
        "0" * 32,
        "A" * 32,
        "9" * 5000,
    ]
)
anything = st.recursive(
    st.none()
    | odd_numbers
    | odd_texts
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(odd_texts | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the pair (container, key) of every value in the document."""
    keys = list(document) if isinstance(document, dict) else range(len(document))
    for key in keys:
        yield document, key
        if isinstance(document[key], (dict, list)):
            yield from places(document[key])


@st.composite
def mutated(draw: st.DrawFn, documents: st.SearchStrategy[Any]) -> bytes:  # noqa: C901
    """Draw JSON in which a few values are swapped, removed, repeated or replaced."""
    document = draw(documents)
    for _ in range(draw(st.integers(1, 4))):
        found = list(places(document))
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        action = draw(st.sampled_from(["replace", "number", "delete", "swap", "double", "add", "nest"]))
        if action == "replace":
            container[key] = draw(anything)
        elif action == "number":
            old = container[key]
            container[key] = old + draw(st.integers(-9, 9)) if type(old) is int else draw(odd_numbers)
        elif action == "delete":
            del container[key]
        elif action == "swap":
            other, at = draw(st.sampled_from(found))
            # Swap copies: otherwise a container could contain itself, which JSON cannot express.
            container[key], other[at] = json.loads(json.dumps([other[at], container[key]]))
        elif action == "double" and isinstance(container, list):
            container.append(container[key])
        elif action == "add" and isinstance(container, dict):
            container[draw(odd_texts | st.text(max_size=9))] = container[key]
        elif action == "nest":
            container[key] = [container[key]]
    text = json.dumps(document)
    if draw(st.booleans()):
        # Insert a key into the text, because a dict cannot have a repeated key.
        key = draw(st.sampled_from(["version", "shards", "name", "w", "dtype"]))
        text = text.replace("{", "{" + json.dumps(key) + ": " + json.dumps(draw(anything)) + ", ", 1)
    return text.encode()


def check_manifest(manifest: Manifest) -> None:
    """Check a manifest again, independently of its own validation."""
    names = [file.name for file in (*manifest.shards, *manifest.assets)]
    assert len(set(names)) == len(names)
    assert MANIFEST_NAME not in names
    for name in names:
        assert name_fault(name) is None
        assert not any(other.startswith(name + "/") for other in (*names, MANIFEST_NAME))
        assert (Path("/folder") / name).resolve().is_relative_to("/folder")
    for shard in manifest.shards:
        assert 0 <= shard.data_offset_bytes <= shard.size_bytes
        assert len(shard.chunks) * manifest.chunk_bytes >= shard.size_bytes
        assert (len(shard.chunks) - 1) * manifest.chunk_bytes < shard.size_bytes or not shard.chunks
    for asset in manifest.assets:
        assert 0 <= asset.size_bytes <= MAX_ASSET_BYTES
    ends: dict[int, int] = {}
    for tensor in sorted(manifest.tensors, key=lambda one: (one.shard, one.offset_bytes, one.size_bytes)):
        count = 1
        for length in tensor.shape:
            count *= length
        assert 8 * tensor.size_bytes == count * DTYPES[tensor.dtype].bits
        shard = manifest.shards[tensor.shard]
        assert shard.data_offset_bytes <= tensor.offset_bytes
        assert tensor.offset_bytes + tensor.size_bytes <= shard.size_bytes
        if tensor.size_bytes:
            assert tensor.offset_bytes >= ends.get(tensor.shard, 0)
            ends[tensor.shard] = tensor.offset_bytes + tensor.size_bytes
    stored = {tensor.name for tensor in manifest.tensors}
    assert len(stored) == len(manifest.tensors)
    assert set(manifest.aliases.values()) | set(manifest.first_touch) <= stored
    assert not stored & manifest.aliases.keys()
    assert Manifest.parse(manifest.to_json()) == manifest
    assert len(manifest.digest) == 64


def refused(error: SnapshotError) -> None:
    """Check that the message is short, and that it can be printed."""
    assert len(str(error).encode()) < 3000


def try_manifest(text: bytes) -> None:
    try:
        manifest = Manifest.parse(text)
    except ManifestError as error:
        refused(error)
        return
    check_manifest(manifest)


@hostile
@given(st.binary(max_size=400))
def test_random_bytes_are_no_manifest(content: bytes) -> None:
    try_manifest(content)


@hostile
@given(mutated(st.builds(sound)))
def test_a_mutated_manifest_holds_or_is_refused(text: bytes) -> None:
    try_manifest(text)


def test_the_sound_manifest_holds() -> None:
    """If this manifest were refused, its mutations would be refused, too, and would test nothing."""
    check_manifest(Manifest.parse(json.dumps(sound()).encode()))


# -- headers


def check_header(header: Header) -> None:
    end = header.data_offset_bytes
    for tensor in header.tensors:
        count = 1
        for length in tensor.shape:
            count *= length
        assert 8 * tensor.size_bytes == count * DTYPES[tensor.dtype].bits
        assert tensor.offset_bytes == end
        end += tensor.size_bytes
    assert end == header.file_bytes
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)


def try_header(text: bytes, file_bytes: int) -> None:
    try:
        header = parse_header(text, file="x.safetensors", file_bytes=file_bytes)
    except HeaderError as error:
        refused(error)
        return
    check_header(header)


def sound_header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
        "d": {"dtype": "F16", "shape": [0], "data_offsets": [40, 40]},
    }


@hostile
@given(mutated(st.builds(sound_header)), st.integers(-3, 50))
def test_a_mutated_header_holds_or_is_refused(text: bytes, more: int) -> None:
    try_header(text, 8 + len(text) + 40)
    try_header(text, max(0, 8 + len(text) + more))


def test_the_sound_header_holds() -> None:
    text = json.dumps(sound_header()).encode()
    check_header(parse_header(text, file="x", file_bytes=8 + len(text) + 40))


@hostile
@given(st.integers(0, 2**64 - 1) | st.integers(0, 300), st.binary(max_size=60))
def test_any_length_of_a_header_is_checked_first(
    tmp_path_factory: pytest.TempPathFactory, length: int, rest: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "m.safetensors").write_bytes(length.to_bytes(8, "little") + rest)
    try:
        header = read_header(FolderSource(folder), "m.safetensors")
    except HeaderError:
        return
    check_header(header)


@hostile
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 9)
)
def test_a_file_of_the_library_damaged_anywhere(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(save({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}))
    for position, value in changes:
        content[position % len(content)] = value
    (folder / "d.safetensors").write_bytes(content[: len(content) - cut])
    try:
        header = read_header(FolderSource(folder), "d.safetensors")
    except HeaderError:
        return
    check_header(header)


@hostile
@given(mutated(st.builds(lambda: {"weight_map": {"a": "1.safetensors", "b": "sub/2.safetensors"}})))
def test_a_mutated_index_names_plain_files_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "i.json").write_bytes(text)
    try:
        found = read_index(FolderSource(folder), "i.json")
    except SnapshotError as error:
        refused(error)
        return
    assert all(name_fault(name) is None for name in found.values())


# -- bulk: little text that wants much memory or time

DEEP = b'{"a":' + b"[" * 500_000
BULK = {
    "deep lists": DEEP,
    "deep objects": b'{"a":' * 300_000,
    "empty lists": b'{"a":[' + b"[]," * 3_000_000 + b"0]}",
    "empty objects": b'{"a":[' + b"{}," * 3_000_000 + b"0]}",
    "numbers": b'{"a":[' + b"0," * 6_000_000 + b"0]}",
    "keys": b"{" + b",".join(b'"%x":0' % index for index in range(200_000)) + b"}",
    "digits": b'{"a":' + b"9" * 3_000_000 + b"}",
    "one text": b'{"a":"' + b"x" * 10_000_000 + b'"}',
}


@pytest.mark.parametrize("kind", BULK)
@pytest.mark.timeout(20)
def test_bulk_is_refused_in_time_and_memory(kind: str) -> None:
    text = BULK[kind]
    tracemalloc.start()
    with pytest.raises(ManifestError):
        Manifest.parse(text)
    with pytest.raises(HeaderError):
        parse_header(text, file="x", file_bytes=8 + len(text))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The limit is high because orjson reserves twelve times the size of the text. It touches only what it needs.
    assert peak_bytes < 200 << 20
    assert len(text) < MAX_HEADER_BYTES
