"""Assets: the small files beside the weights that a handler reads by name. They are there before weights are waited for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Protocol

import xxhash

from ..errors import CacheError, SnapshotCorrupt
from .manifest import Manifest
from .source import Source


class Asset(Protocol):
    """STAND-IN for manifest.Asset (branch conv); with it, `assets_of(manifest)` is `manifest.assets`."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def digest(self) -> str: ...


def assets_of(manifest: Manifest) -> Sequence[Asset]:
    found: Sequence[Asset] = getattr(manifest, "assets", ())
    return found


def bring_assets(manifest: Manifest, source: Source, files: Path) -> None:
    """Fetch and verify what folder `files` does not hold yet. Two processes may do it at once."""
    for asset in assets_of(manifest):
        path = files / asset.name
        if not _is_there(path, asset):
            _bring(asset, source, path)


def _is_there(path: Path, asset: Asset) -> bool:
    try:
        return path.stat().st_size == asset.size_bytes and _digest(path.read_bytes()) == asset.digest
    except (FileNotFoundError, NotADirectoryError):
        return False


def _bring(asset: Asset, source: Source, path: Path) -> None:
    content = bytearray(asset.size_bytes)
    count = source.read_into(asset.name, 0, memoryview(content))
    if count != asset.size_bytes or _digest(content) != asset.digest:
        raise SnapshotCorrupt(
            f"Asset {asset.name} from {source.url} is not the file that the manifest describes.",
            remedy="Make the manifest anew.",
            details={"asset": asset.name},
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".asset.", delete=False) as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), 0o644)
        Path(stream.name).replace(path)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}.", remedy="Make room.") from error


def _digest(content: bytes | bytearray) -> str:
    return xxhash.xxh3_128_hexdigest(content)
