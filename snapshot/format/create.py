"""Creates a manifest of existing safetensors files, without changing them, from their headers and digests.

`create` reads all bytes. `observe` reads only the headers of the shards, and the assets. The digests of chunks are added
when the bytes are fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...errors import HeaderError, SnapshotError, SourceError
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, Listing, ObjectInfo, ReportProgress, Served, Source, changed
from .digests import (
    ASSET_BUFFER_BYTES,
    XXH3,
    Algorithm,
    AlgorithmName,
    chunk_digests,
    file_digest,
    in_order,
)
from .header import Header, HeaderRoom, aliases_of, read_header
from .layout import SUFFIX, Layout, lay_out
from .manifest import (
    DEFAULT_CHUNK_BYTES,
    MAX_ASSET_BYTES,
    UNKNOWN_DIGEST,
    Asset,
    Manifest,
    Observed,
    Provenance,
    Shard,
    TensorEntry,
)

# The number of threads that read remote files: one stream seldom uses all the bandwidth of a network link.
REMOTE_READERS = 4
# Headers and assets are small: a thread that reads them mostly waits for the source.
HEADER_READERS = 16


def create(
    where: Path | Source,
    *,
    file: str | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    algorithm: AlgorithmName = "xxh3-128",
    progress: ReportProgress | None = None,
) -> Manifest:
    """Return a manifest of the safetensors files at `where`: a folder, a source or one file. Write nothing.

    The top folder must have either one `*.safetensors`, or several and the `*.safetensors.index.json` that lists
    them. With `file`, that file is the only shard. If the source cannot be listed (a web server), `file` is required.
    Raise SnapshotError if it is not clear which files to use, HeaderError if a file is not valid, SourceError if a file
    cannot be read, SnapshotChanged if a file changes meanwhile, and ManifestError if the format does not allow the result.
    """
    # Refuse wrong arguments here, before the files are read.
    how = {"chunk_bytes": chunk_bytes, "algorithm": algorithm}
    digests = Manifest.build(**how, shards=(), tensors=()).digest_algorithm
    origin = str(where) if isinstance(where, Path) else where.url
    source, file = _open(where, file)
    readers = 1 if isinstance(source, FolderSource) else REMOTE_READERS
    found = _read_headers(source, lay_out(source, _names(source, file), file), readers)
    chunks = _digest_shards(source, found.headers, chunk_bytes, readers, digests, progress)
    assets = _assets(source, found.layout, readers, digests)
    for name, info in found.infos.items():
        if source.stat(name) != info:
            raise changed(f"{source.url}/{name}", name, "it was replaced or written to")
    provenance = Provenance(created_by=f"pilotflame {__version__}", source=origin[:4096])
    return _manifest(found, chunks, assets, **how, provenance=provenance)


def observe(source: Source, names: Sequence[str], file: str | None = None) -> Manifest:
    """Return a manifest of the safetensors files at `source` without the digests of their chunks.

    `names` are the files at `source`. With `file`, that file is the only shard. Raise what `create` raises.
    """
    found = _read_headers(source, lay_out(source, names, file), HEADER_READERS)
    chunks = {
        name: [UNKNOWN_DIGEST] * -(-header.file_bytes // DEFAULT_CHUNK_BYTES)
        for name, header in found.headers.items()
    }
    assets = _assets(source, found.layout, HEADER_READERS, XXH3)
    versions = tuple(info.version for info in found.infos.values())
    # Prefer the address of a shard to the source's URL, because with another endpoint, the same URL may have other
    # bytes with the same versions.
    first = found.layout.shards[0]
    url = source.served_at(first) if isinstance(source, Served) else source.url
    observed = Observed(url=url[:4096], versions=tuple(version[:1024] for version in versions))
    return _manifest(found, chunks, assets, observed=observed, provenance=observed.provenance)


@dataclass(frozen=True, slots=True)
class _Headers:
    """The object infos and headers of a layout's shards, by name, in the order of the shards."""

    layout: Layout
    infos: dict[str, ObjectInfo]
    headers: dict[str, Header]


def _read_headers(source: Source, layout: Layout, readers: int) -> _Headers:
    room = HeaderRoom()

    def read(name: str, _buffer: memoryview) -> tuple[ObjectInfo, Header]:
        return source.stat(name), read_header(source, name, room)

    found = list(in_order((partial(read, name) for name in layout.shards), readers, 0))
    infos = {name: info for name, (info, _) in zip(layout.shards, found, strict=True)}
    headers = {name: header for name, (_, header) in zip(layout.shards, found, strict=True)}
    _check_index(layout, headers)
    return _Headers(layout, infos, headers)


def _assets(source: Source, layout: Layout, readers: int, algorithm: Algorithm) -> tuple[Asset, ...]:
    jobs = (partial(_asset, source, name, algorithm) for name in layout.assets)
    assets = in_order(jobs, readers, ASSET_BUFFER_BYTES)
    return tuple(asset for asset in assets if asset is not None)


def _manifest(
    found: _Headers, chunks: dict[str, list[str]], assets: tuple[Asset, ...], **more: Any
) -> Manifest:
    tensors = tuple(
        TensorEntry(shard=index, **tensor._asdict())
        for index, header in enumerate(found.headers.values())
        for tensor in header.tensors
    )
    return Manifest.build(
        shards=tuple(_shard(name, header, chunks[name]) for name, header in found.headers.items()),
        tensors=tensors,
        aliases=aliases_of(found.headers.values(), {tensor.name for tensor in tensors}),
        assets=assets,
        **more,
    )


def _shard(name: str, header: Header, chunks: list[str]) -> Shard:
    begin, size = header.data_offset_bytes, header.file_bytes
    return Shard(name=name, size_bytes=size, data_offset_bytes=begin, chunks=tuple(chunks))


def _open(where: Path | Source, file: str | None) -> tuple[Source, str | None]:
    if not isinstance(where, Path):
        return where, file
    if where.is_file():
        return FolderSource(where.parent), where.name
    if not where.is_dir():
        raise SnapshotError(f"{where} is neither a folder nor a file.", remedy="Check the path.")
    return FolderSource(where), file


def _names(source: Source, file: str | None) -> list[str]:
    if isinstance(source, Listing):
        try:
            return source.names()
        except SourceError:
            if file is None:
                raise
    if file is not None:
        return [file]
    remedy = f"Name one {SUFFIX} file in the URL, or put there the manifest that `pilotflame snapshot create` makes."
    raise SnapshotError(f"{source.url} cannot be listed.", remedy=remedy)


def _check_index(layout: Layout, headers: dict[str, Header]) -> None:
    # A tensor that is in a shard but not in the index is allowed: transformers loads such tensors too.
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if holders.setdefault(tensor.name, file) != file:
                fault = f"Tensor {tensor.name!r} is both in {holders[tensor.name]} and in {file}."
                raise HeaderError(fault, remedy="Save the shards again, with each tensor in one of them.")
    for name, file in layout.places.items():
        if holders.get(name) != file:
            where = f"it is in {holders[name]}" if name in holders else "no shard holds it"
            fault = f"{layout.index} claims that tensor {name[:80]!r} is in {file}, but {where}."
            raise HeaderError(fault, remedy="Fetch the index and the shards again, from the same revision.")


def _digest_shards(
    source: Source,
    headers: dict[str, Header],
    chunk_bytes: int,
    readers: int,
    algorithm: Algorithm,
    progress: ReportProgress | None,
) -> dict[str, list[str]]:
    digests: dict[str, list[str]] = {name: [] for name in headers}
    sizes = {name: header.file_bytes for name, header in headers.items()}
    read = ByteCounter(sum(sizes.values()), progress)
    for chunk in chunk_digests(source, sizes, chunk_bytes, readers, algorithm=algorithm):
        if chunk.size_bytes != min(chunk_bytes, sizes[chunk.name] - chunk.position * chunk_bytes):
            raise _shrank(chunk.name)
        digests[chunk.name].append(chunk.digest)
        read.add(chunk.size_bytes)
    return digests


def _asset(source: Source, name: str, algorithm: Algorithm, buffer: memoryview) -> Asset | None:
    """Return file `name` as an asset, or None if it is too large to be an asset."""
    size_bytes = source.stat(name).size_bytes
    if size_bytes > MAX_ASSET_BYTES:
        return None
    digest, count = file_digest(source, name, size_bytes, buffer, algorithm)
    if count != size_bytes:
        raise _shrank(name)
    return Asset(name=name, size_bytes=size_bytes, digest=digest)


def _shrank(name: str) -> SnapshotError:
    return SnapshotError(f"{name} shrank while it was read.", remedy="Wait until it is written.")
