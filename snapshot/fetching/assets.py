"""Fetches the assets, which are small files beside the weights that handlers read, while the shards are fetched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import SnapshotChanged, SnapshotCorrupt, SourceUnavailable
from ..format.digests import Algorithm
from ..format.manifest import Asset, Manifest
from ..publish import cannot_write, publish
from ..sources.response import MISPLACED
from ..sources.retries import Retries
from ..sources.source import Source

READERS = 4
"""How many assets are read at the same time. A thread that reads an asset mostly waits for the server's answer."""


def fetch_assets(manifest: Manifest, source: Source, files: Path, copies: Path | None = None) -> None:
    """Write the assets that folder `files` does not have, and verify them.

    Each asset is taken from folder `copies` or, if it is not there, from the source. Two processes may call this at the same
    time.
    Raise SnapshotCorrupt if an asset differs from the manifest, CacheError if an asset cannot be written, and the
    errors of Connection.begin.
    """
    algorithm = manifest.digest_algorithm
    missing = [asset for asset in manifest.assets if not holds(files / asset.name, asset, algorithm)]
    remote = [asset for asset in missing if copies is None or not _copy(asset, copies, files, algorithm)]

    def bring(asset: Asset) -> None:
        _write(files / asset.name, _read(asset, source, algorithm))

    if len(remote) < 2:
        for asset in remote:
            bring(asset)
        return
    # Each thread writes an asset before it reads the next one, so at most READERS assets are in memory.
    with ThreadPoolExecutor(READERS, "assets") as readers:
        for _ in readers.map(bring, remote):
            pass


def holds(path: Path, asset: Asset, algorithm: Algorithm) -> bool:
    """Return True if the file at `path` is `asset`, byte for byte."""
    try:
        return path.stat().st_size == asset.size_bytes and _is(path.read_bytes(), asset, algorithm)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is(content: bytes | bytearray, asset: Asset, algorithm: Algorithm) -> bool:
    return len(content) == asset.size_bytes and algorithm.digest(content) == asset.digest


def _copy(asset: Asset, copies: Path, files: Path, algorithm: Algorithm) -> bool:
    """Copy `asset` from folder `copies`. Return False if `copies` lacks the file, or has other bytes."""
    try:
        content = (copies / asset.name).read_bytes()
    except OSError:
        return False
    if not _is(content, asset, algorithm):
        return False
    _write(files / asset.name, content)
    return True


def _write(path: Path, content: bytes | bytearray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Do not sync: a cold start waits for this write, and a disk tier syncs all files before it publishes the
        # snapshot.
        with publish(path, durable=False) as stream:
            stream.write(content)
    except OSError as error:
        raise cannot_write(path, error) from error


def _read(asset: Asset, source: Source, algorithm: Algorithm) -> bytearray:
    content, retries = bytearray(asset.size_bytes), Retries()
    # Try twice, as with chunks: wrong bytes may come from a single error in the transfer.
    for _ in range(2):
        while True:
            try:
                right = _receive(asset, source, memoryview(content)) and _is(content, asset, algorithm)
                break
            except SourceUnavailable as error:
                if MISPLACED in error.details:
                    right = False
                    break
                retries.wait(error)
        if right:
            return content
    raise SnapshotCorrupt(
        f"Asset {asset.name} from {source.url} is not the file that the manifest describes.",
        remedy="Make the manifest anew.",
        details={"asset": asset.name},
    )


def _receive(asset: Asset, source: Source, view: memoryview) -> bool:
    """Receive an asset into `view`. Return False if the object at the source has another size or has changed."""
    if not asset.size_bytes:
        return True
    connection, done = source.connect(), 0
    try:
        if connection.begin(asset.name, 0, asset.size_bytes).size_bytes != asset.size_bytes:
            return False
        while done < asset.size_bytes and (count := connection.read_into(view[done:])):
            done += count
        connection.release()
    except SnapshotChanged:
        return False
    finally:
        connection.close()
    return True
