"""Headers: a valid header is read back, and an invalid one is refused with the tensor's name. No header causes a crash."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import HeaderError
from pilotflame.snapshot.format import header
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.header import MAX_HEADER_BYTES, Header, HeaderRoom, parse_header, read_header
from pilotflame.snapshot.sources.folder import FolderSource
from safetensors import SafetensorError, deserialize, safe_open


def parse(entries: dict[str, Any] | str, data_bytes: int) -> Header:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode(errors="surrogatepass")
    return parse_header(text, file="x.safetensors", file_bytes=8 + len(text) + data_bytes)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
kinds = st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4)).filter(
    lambda kind: DTYPES[kind[0]].size_bytes(kind[1]) is not None
)
layouts = st.dictionaries(names, kinds, max_size=6)


def lay_out(layout: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    entries, end = {}, 0
    for name, (dtype, shape) in layout.items():
        size = DTYPES[dtype].size_bytes(shape) or 0
        entries[name] = entry(dtype, shape, [end, end + size])
        end += size
    return entries, end


@given(layouts)
def test_every_sound_header_is_read_back(layout: dict[str, tuple[str, list[int]]]) -> None:
    entries, data_bytes = lay_out(layout)
    header = parse(entries, data_bytes)
    assert {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in header.tensors} == {
        name: (dtype, shape) for name, (dtype, shape) in layout.items()
    }
    assert sum(tensor.size_bytes for tensor in header.tensors) == data_bytes


@settings(max_examples=400)
@given(layouts, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_corrupted_bytes_never_crash(layout: dict[str, Any], changes: list[tuple[int, int]]) -> None:
    entries, data_bytes = lay_out(layout)
    text = bytearray(json.dumps(entries).encode())
    for position, value in changes:
        text[position % len(text)] = value
    try:
        parse_header(bytes(text), file="x", file_bytes=8 + len(text) + data_bytes)
    except HeaderError as error:
        # Raises if the message cannot be printed.
        str(error).encode()


@given(st.binary(max_size=200))
def test_random_files_never_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "random.safetensors").write_bytes(content)
    with contextlib.suppress(HeaderError):
        read_header(FolderSource(folder), "random.safetensors")


notes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
spaces = st.text(" \t\r\n", max_size=3)
odd_values = st.sampled_from([None, True, -1, 1.0, "F32", "F31", [], [1], [0, 0], [0, 4, 4], [8, 0], {}])


@settings(max_examples=300)
@given(st.data(), layouts, spaces, spaces)
def test_a_header_is_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    layout: dict[str, Any],
    before: str,
    after: str,
) -> None:
    entries, data_bytes = lay_out(layout)
    if entries and data.draw(st.booleans(), "with notes"):
        noted = entries[data.draw(st.sampled_from(list(entries)))]
        noted |= data.draw(st.dictionaries(names.filter(lambda name: name not in noted), notes, max_size=2))
    if data.draw(st.booleans(), "with metadata"):
        texts = st.dictionaries(st.text(max_size=3), names | st.none(), max_size=2)
        entries["__metadata__"] = data.draw(st.none() | texts | st.just([]))
    if entries and data.draw(st.integers(0, 3), "spoilt at 0") == 0:
        spoilt = data.draw(st.sampled_from(list(entries)))
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        entries[spoilt] = {**(entries[spoilt] or {}), key: data.draw(odd_values)}
    body = bytes(
        index % 251 for index in range(max(0, data_bytes + data.draw(st.sampled_from([0, 0, 0, -1, 1]))))
    )
    text = f"{before}{json.dumps(entries)}{after}".encode()
    folder = tmp_path_factory.getbasetemp()
    file = folder / "one.safetensors"
    file.write_bytes(content := len(text).to_bytes(8, "little") + text + body)
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata()
        library = {
            name: (kind["dtype"], kind["shape"], bytes(kind["data"])) for name, kind in deserialize(content)
        }
    except SafetensorError:
        with pytest.raises(HeaderError):
            read_header(FolderSource(folder), file.name)
        return
    ours = read_header(FolderSource(folder), file.name)
    assert ours.metadata == (metadata or {})
    assert library == {
        tensor.name: (
            tensor.dtype,
            list(tensor.shape),
            content[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes],
        )
        for tensor in ours.tensors
    }


@pytest.mark.parametrize(
    "text",
    [
        # The format forbids a key that occurs twice. Readers differ in the entry that counts.
        '{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "t": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
        # The format allows no list or object in these places. The library reads them, because its parser accepts them for any Rust type.
        '{"t": ["F32", [2], [0, 8]]}',
        '{"t": {"dtype": {"F32": null}, "shape": [2], "data_offsets": [0, 8]}}',
        # No module can have a tensor with such a name or such a shape. The limits keep messages and manifests short.
        '{"": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        f'{{"{"t" * 1025}": {{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}}}',
        f'{{"t": {{"dtype": "F32", "shape": {[2] + [1] * 64}, "data_offsets": [0, 8]}}}}',
        f'{{"s": {{"dtype": "F32", "shape": [0, {1 << 60}], "data_offsets": [0, 0]}}, "t": {{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}}}',
    ],
)
def test_some_files_that_the_library_opens_are_refused(text: str) -> None:
    deserialize(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(HeaderError):
        parse(text, 8)


@pytest.mark.parametrize(
    ("entries", "data_bytes", "fault"),
    [
        ({"t": entry(offsets=[0, 9])}, 9, "span 9 bytes, but F32"),
        ({"t": entry(dtype="F31")}, 8, "dtype 'F31' is unknown"),
        ({"t": entry(dtype=["F32"])}, 8, "is unknown"),
        (
            {"t": entry(dtype="F4", shape=[3], offsets=[0, 2])},
            2,
            "F4 of shape (3,) does not fill whole bytes",
        ),
        ({"t": entry(dtype="F4", shape=[], offsets=[0, 1])}, 1, "does not fill whole bytes"),
        ({"t": entry(dtype="F6_E2M3", shape=[2], offsets=[0, 2])}, 2, "does not fill whole bytes"),
        (
            {"t": entry(dtype="F4", shape=[4], offsets=[0, 4])},
            4,
            "span 4 bytes, but F4 of shape (4,) takes 2",
        ),
        ({"t": entry(shape=[-2])}, 8, "holds -2"),
        ({"t": entry(shape=[2.0])}, 8, "holds 2.0"),
        ({"t": entry(shape=[True, 2])}, 8, "holds True"),
        ({"t": entry(shape=[1 << 62, 4])}, 8, "not a whole number in range"),
        ({"t": entry(shape=[1 << 40, 1 << 40])}, 8, "span 8 bytes"),
        ({"t": entry(shape=[1] * 65)}, 8, "list of at most 64"),
        ({"t": entry(shape="22")}, 8, "list of at most 64"),
        ({"t": entry(offsets=[8, 0])}, 8, "a begin and an end"),
        ({"t": entry(offsets=[8])}, 8, "a begin and an end"),
        ({"t": entry(offsets=[0, 4, 8])}, 8, "list of at most 2"),
        ({"t": entry()}, 7, "truncated"),
        ({"t": entry()}, 9, "1 bytes at its end belong to no tensor"),
        ({"t": entry(offsets=[4, 12])}, 12, "gap of 4 bytes"),
        ({"s": entry(), "t": entry(offsets=[4, 12])}, 12, "overlap"),
        ({"t": {"dtype": "F32", "shape": [2]}}, 8, "does not hold data_offsets, dtype, shape"),
        ({"t": 3}, 8, "does not hold"),
        ({"t" * 1025: entry()}, 8, "name is empty, too long"),
        ({"": entry()}, 8, "name is empty"),
        ('{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8, "no valid text"),
        ({"__metadata__": {"format": 1}}, 0, "__metadata__"),
        ({"__metadata__": []}, 0, "__metadata__"),
        ('{"t": 1, "t": 2}', 0, "key 't' twice"),
        ("[]", 0, "start with"),
        ('"{}"', 0, "start with"),
        ("{", 0, "not JSON"),
        ('{"t": NaN}', 0, "not JSON"),
        ('{"t":' + "[" * 100_000, 0, "not JSON"),
        ('{"t": ' + "9" * 5000 + "}", 0, "not JSON"),
    ],
)
def test_each_defect_is_named(entries: Any, data_bytes: int, fault: str) -> None:
    with pytest.raises(HeaderError, match=r"^x\.safetensors") as caught:
        parse(entries, data_bytes)
    assert fault in caught.value.message
    assert caught.value.remedy
    assert len(caught.value.message) < 400
    if isinstance(entries, dict) and list(entries) == ["t"] and "its end" not in fault:
        assert "tensor 't'" in caught.value.message


@pytest.mark.parametrize(
    ("text", "fault"),
    [(b'{"t": [' + b"0," * 5_000_000 + b"0]}", "5000000 commas"), (b'{"t": ' + b"[" * 1_500_000, "opening brackets")],
    ids=["commas", "brackets"],
)  # fmt: skip
def test_bulk_is_refused_unparsed(text: bytes, fault: str) -> None:
    with pytest.raises(HeaderError, match=fault):
        parse_header(text, file="x", file_bytes=8 + len(text))


def test_a_long_name_is_shortened_in_messages() -> None:
    for name, shown in (("n" * 80, "n" * 80), ("n" * 81, "n" * 77 + "...")):
        with pytest.raises(HeaderError) as caught:
            parse({name: 3}, 0)
        assert f"tensor '{shown}'" in caught.value.message


def test_other_encodings_are_refused() -> None:
    with pytest.raises(HeaderError):
        parse_header("{}".encode("utf-16"), file="x", file_bytes=100)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "fewer than the 8"),
        (b"1234567", "fewer than the 8"),
        ((100).to_bytes(8, "little"), "the file has 8 in all"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "over the limit"),
        (b"\xff" * 8, "over the limit"),
    ],
)
def test_the_length_is_checked_before_anything_is_allocated(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "f.safetensors").write_bytes(content)
    with pytest.raises(HeaderError, match=fault):
        read_header(FolderSource(tmp_path), "f.safetensors")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 90868376\n"
TORCH = b"PK\x03\x04\x00\x00\x08\x08"


@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        (POINTER, "a pointer of Git LFS", "git lfs pull"),
        (b"version http://git-media.io/v/2\noid 4d7a\nsize 9\n", "a pointer of Git LFS", "git lfs pull"),
        (b"<!DOCTYPE html><html><head><title>Sign in</title>", "a page of HTML", "log in"),
        (b"\n  <html lang=en><body>Not here</body></html>", "a page of HTML", "log in"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a page of HTML or XML", "log in"),
        (gzip.compress(bytes(100), mtime=0), "compressed with gzip", "gunzip"),
        (gzip.compress(b"{" * 99, mtime=0) + bytes(600_000), "compressed with gzip", "gunzip"),
        (TORCH + bytes(99), "a zip file", "snapshot convert"),
        (b'{"error": "Repository not found"}', "a text of JSON", "the address of the file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_weights_is_named_as_what_it_is(
    tmp_path: Path, content: bytes, kind: str, remedy: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(HeaderError, match=f"^model.safetensors is {kind}") as caught:
        read_header(FolderSource(tmp_path), "model.safetensors")
    assert remedy in caught.value.remedy


def test_a_header_as_long_as_a_page_begins_is_no_page(tmp_path: Path) -> None:
    """A file begins with the header's length. The length may look like the first bytes of gzip, so only a file that cannot be read
    is named as gzip."""
    text = json.dumps({"t": entry()}).encode().ljust(int.from_bytes(b"\x1f\x8b\x08", "little"))
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert read_header(FolderSource(tmp_path), "f.safetensors").tensors[0].name == "t"


def test_the_real_model_is_read(minilm: Path) -> None:
    found = read_header(FolderSource(minilm), "model.safetensors")
    assert len(found.tensors) == 104
    assert found.data_offset_bytes == 11416
    assert found.metadata == {"format": "pt"}


def test_no_tensors_is_a_sound_file() -> None:
    assert parse({}, 0).tensors == ()


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 6), max_size=4), st.integers(-1, 1))
def test_sizes_and_shapes_are_the_librarys(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], more: int
) -> None:
    """Compare with the safetensors library: it accepts the same files, and gives the same shapes in torch."""
    data_bytes = max(0, (DTYPES[dtype].size_bytes(shape) or 1) + more)
    text = json.dumps({"t": entry(dtype, shape, [0, data_bytes])}).encode()
    path = tmp_path_factory.getbasetemp() / "types.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    try:
        with safe_open(path, "pt") as file:
            theirs = None if DTYPES[dtype].torch_name is None else _torch_shape(file)
        refused = False
    except SafetensorError:
        refused = True
    if refused:
        with pytest.raises(HeaderError):
            parse_header(text, file="x", file_bytes=8 + len(text) + data_bytes)
        return
    [tensor] = parse_header(text, file="x", file_bytes=8 + len(text) + data_bytes).tensors
    assert tensor.size_bytes == data_bytes
    if theirs is not None or DTYPES[dtype].packed > 1:
        assert DTYPES[dtype].torch_shape(tensor.shape) == theirs


def _torch_shape(file: Any) -> tuple[int, ...] | None:
    try:
        return tuple(file.get_tensor("t").shape)
    except SafetensorError:
        # The library cannot make a tensor whose rows do not fill whole bytes.
        return None


def test_the_headers_of_a_snapshot_share_a_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADERS_BYTES", 100)
    text = b"{}".ljust(40)
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    source, room = FolderSource(tmp_path), HeaderRoom()
    for _ in range(2):
        assert read_header(source, "f.safetensors", room).tensors == ()
    with pytest.raises(HeaderError, match="over 100 bytes together"):
        read_header(source, "f.safetensors", room)
