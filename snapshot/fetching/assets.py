"""Assets: the small files beside the weights that a handler reads by name. Fetched before shards."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

import xxhash

from ...errors import CacheError, SnapshotCorrupt
from ..format.manifest import Asset, Manifest
from ..sources.source import Source


def fetch_assets(manifest: Manifest, source: Source, files: Path) -> None:
    """Fetch and verify the assets that folder `files` does not hold. Two processes may do this at once."""
    for asset in manifest.assets:
        path = files / asset.name
        if not _is_there(path, asset):
            _fetch(asset, source, path)


def _is_there(path: Path, asset: Asset) -> bool:
    try:
        same_size = path.stat().st_size == asset.size_bytes
        return same_size and xxhash.xxh3_128_hexdigest(path.read_bytes()) == asset.digest
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fetch(asset: Asset, source: Source, path: Path) -> None:
    # As with chunks, bytes that differ once may be an accident on the way.
    content = _read(asset, source)
    if content is None:
        content = _read(asset, source)
    if content is None:
        raise SnapshotCorrupt(
            f"Asset {asset.name} from {source.url} is not the file that the manifest describes.",
            remedy="Make the manifest anew.",
            details={"asset": asset.name},
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content)
    except OSError as error:
        raise CacheError(
            f"{path} cannot be written: {error.strerror}.", remedy="Make room, or put the cache elsewhere."
        ) from error


def _read(asset: Asset, source: Source) -> bytearray | None:
    """The asset's bytes; None if they differ from the manifest."""
    content = bytearray(asset.size_bytes)
    count = source.read_into(asset.name, 0, memoryview(content))
    return (
        content if count == asset.size_bytes and xxhash.xxh3_128_hexdigest(content) == asset.digest else None
    )


def _write(path: Path, content: bytearray) -> None:
    """Write the file whole or not at all."""
    with NamedTemporaryFile(dir=path.parent, prefix=".asset.", delete=False) as stream:
        try:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            Path(stream.name).replace(path)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise
