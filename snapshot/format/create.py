"""Making a manifest: safetensors files stay what they are and where they are, and are read once, header and digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from ..._version import __version__
from ...errors import HeaderError, ManifestError, SnapshotChanged, SnapshotError
from ..sources.folder import FolderSource
from ..sources.source import Listing, ObjectInfo, Progress, Source
from .chunk import file_digest
from .header import Header, aliases_of, read_header
from .layout import SUFFIX, Layout, lay_out
from .manifest import (
    DEFAULT_CHUNK_BYTES,
    MAX_ASSET_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Asset,
    Manifest,
    Provenance,
    Shard,
    TensorEntry,
)
from .readers import in_order

# Over a network one stream seldom fills the link; every one costs a chunk of memory.
REMOTE_READERS = 4
ASSET_BUFFER_BYTES = 1 << 20


def create(
    where: Path | Source,
    *,
    file: str | None = None,
    files: Sequence[str] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    progress: Progress | None = None,
) -> Manifest:
    """Describe the safetensors in a folder (or the one file it is) or in a source; writes nothing, copies nothing.

    There is one `*.safetensors` at the top, or several and the `*.safetensors.index.json` that lists them; or `file`
    says which is meant. `files` are all there is, for a source that cannot be listed. Progress is of the shards.
    Raises SnapshotError if it cannot tell what is meant, HeaderError, SourceError, SnapshotChanged.
    """
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ManifestError(
            f"chunk_bytes is {chunk_bytes}.", remedy=f"Take {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes."
        )
    origin = str(where) if isinstance(where, Path) else where.url
    source, file = _open(where, file)
    layout = lay_out(source, _names(source, files, file), file)
    readers = 1 if isinstance(source, FolderSource) else REMOTE_READERS
    infos = {name: source.stat(name) for name in layout.shards}
    headers = {name: read_header(source, name) for name in layout.shards}
    _check_index(layout, headers)
    shards = _shards(source, headers, chunk_bytes, readers, progress)
    assets = in_order((_asset_job(source, name) for name in layout.assets), readers, ASSET_BUFFER_BYTES)
    found = [asset for asset in assets if asset is not None]
    _check_unchanged(source, infos)
    return _manifest(headers, shards, found, chunk_bytes, origin)


def _manifest(
    headers: dict[str, Header], shards: tuple[Shard, ...], assets: list[Asset], chunk_bytes: int, origin: str
) -> Manifest:
    tensors = tuple(
        _entry(header, index, position)
        for index, header in enumerate(headers.values())
        for position in range(len(header.tensors))
    )
    return Manifest.build(
        chunk_bytes=chunk_bytes,
        shards=shards,
        tensors=tensors,
        aliases=aliases_of(headers.values(), {tensor.name for tensor in tensors}),
        assets=tuple(assets),
        provenance=Provenance(created_by=f"pilotflame {__version__}", source=origin[:4096]),
    )


def _open(where: Path | Source, file: str | None) -> tuple[Source, str | None]:
    if not isinstance(where, Path):
        return where, file
    if where.is_file():
        return FolderSource(where.parent), where.name
    if not where.is_dir():
        raise SnapshotError(f"{where} is neither a folder nor a file.", remedy="Check the path.")
    return FolderSource(where), file


def _names(source: Source, files: Sequence[str] | None, file: str | None) -> list[str]:
    if files is not None:
        return list(files)
    if isinstance(source, Listing):
        return source.names()
    if file is not None:
        return [file]
    raise SnapshotError(
        f"{source.url} cannot be listed.",
        remedy=f"Name the one {SUFFIX} file in the URL, or all files: those beside the weights too.",
    )


def _check_index(layout: Layout, headers: dict[str, Header]) -> None:
    # Tensors that the index forgot are taken all the same, as transformers takes them.
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in holders:
                raise HeaderError(
                    f"Tensor {tensor.name!r} is both in {holders[tensor.name]} and in {file}.",
                    remedy="Save the shards again: every tensor belongs into one.",
                )
            holders[tensor.name] = file
    for name, file in layout.places.items():
        if holders.get(name) != file:
            where = f"it is in {holders[name]}" if name in holders else "no shard holds it"
            raise HeaderError(
                f"{layout.index} claims that tensor {name[:80]!r} is in {file}, but {where}.",
                remedy="Fetch the index and the shards again, from the same revision.",
            )


def _check_unchanged(source: Source, infos: dict[str, ObjectInfo]) -> None:
    for name, info in infos.items():
        if source.stat(name) != info:
            raise SnapshotChanged(
                f"{name} in {source.url} was replaced or written to while it was read.",
                remedy="Wait until it is written.",
                details={"object": name},
            )


def _shards(
    source: Source, headers: dict[str, Header], chunk_bytes: int, readers: int, progress: Progress | None
) -> tuple[Shard, ...]:
    total_bytes = sum(header.file_bytes for header in headers.values())
    # Never larger than the largest file: first touch of fresh memory costs more than reading into it.
    largest_bytes = max(header.file_bytes for header in headers.values())
    jobs = (_chunk_job(source, *piece) for piece in _pieces(headers, chunk_bytes))
    digests: dict[str, list[str]] = {name: [] for name in headers}
    done_bytes = 0
    found = in_order(jobs, readers, min(chunk_bytes, largest_bytes))
    for (name, _, count), digest in zip(_pieces(headers, chunk_bytes), found, strict=True):
        digests[name].append(digest)
        done_bytes += count
        if progress is not None:
            progress(done_bytes, total_bytes)
    return tuple(
        Shard(
            name=name,
            size_bytes=header.file_bytes,
            data_offset_bytes=header.data_offset_bytes,
            chunks=tuple(digests[name]),
        )
        for name, header in headers.items()
    )


def _pieces(headers: dict[str, Header], chunk_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Every chunk's file, begin and length."""
    for name, header in headers.items():
        for begin in range(0, header.file_bytes, chunk_bytes):
            yield name, begin, min(chunk_bytes, header.file_bytes - begin)


def _chunk_job(source: Source, name: str, begin: int, length: int) -> Callable[[memoryview], str]:
    def digest(buffer: memoryview) -> str:
        if source.read_into(name, begin, buffer[:length]) != length:
            raise SnapshotError(f"{name} shrank while it was read.", remedy="Wait until it is written.")
        return xxhash.xxh3_128_hexdigest(buffer[:length])

    return digest


def _asset_job(source: Source, name: str) -> Callable[[memoryview], Asset | None]:
    def describe(buffer: memoryview) -> Asset | None:
        """None of what is too large to be one."""
        size_bytes = source.size(name)
        if size_bytes > MAX_ASSET_BYTES:
            return None
        digest, count = file_digest(source, name, size_bytes, buffer)
        if count != size_bytes:
            raise SnapshotError(f"{name} shrank while it was read.", remedy="Wait until it is written.")
        return Asset(name=name, size_bytes=size_bytes, digest=digest)

    return describe


def _entry(header: Header, shard: int, position: int) -> TensorEntry:
    tensor = header.tensors[position]
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        shard=shard,
        offset_bytes=header.data_offset_bytes + tensor.offset_bytes,
        size_bytes=tensor.size_bytes,
    )
