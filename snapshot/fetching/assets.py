"""Fetches the assets before the shards. Assets are small files beside the weights, which handlers read."""

from __future__ import annotations

from pathlib import Path

import xxhash

from ...errors import SnapshotCorrupt
from ..format.manifest import Asset, Manifest
from ..publish import cannot_write, publish
from ..sources.source import Source


def fetch_assets(manifest: Manifest, source: Source, files: Path) -> None:
    """Fetch and verify the assets that folder `files` does not hold.

    Two processes may do so at the same time. Raises SnapshotCorrupt if an asset differs from the manifest,
    CacheError if one cannot be written, and the errors of Source.read_into.
    """
    for asset in manifest.assets:
        path = files / asset.name
        if holds(path, asset):
            continue
        content = _read(asset, source)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not durable: a disk tier syncs all files before it publishes the snapshot, and a cold start
            # waits for this write.
            with publish(path, durable=False) as stream:
                stream.write(content)
        except OSError as error:
            raise cannot_write(path, error) from error


def holds(path: Path, asset: Asset) -> bool:
    """Return True if the file at `path` is `asset`, byte for byte."""
    try:
        same_size = path.stat().st_size == asset.size_bytes
        return same_size and xxhash.xxh3_128_hexdigest(path.read_bytes()) == asset.digest
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read(asset: Asset, source: Source) -> bytearray:
    content = bytearray(asset.size_bytes)
    # Try twice, as with chunks: wrong bytes may come from a single error in the transfer.
    for _ in range(2):
        count = source.read_into(asset.name, 0, memoryview(content))
        if count == asset.size_bytes and xxhash.xxh3_128_hexdigest(content) == asset.digest:
            return content
    raise SnapshotCorrupt(
        f"Asset {asset.name} from {source.url} is not the file that the manifest describes.",
        remedy="Make the manifest anew.",
        details={"asset": asset.name},
    )
