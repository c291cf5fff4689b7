"""From a URL, or a path, to its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ManifestError, SourceMissing
from .folder import FolderSource
from .source import Source, Writable

if TYPE_CHECKING:
    from ..format.manifest import Manifest


def is_remote(url: str) -> bool:
    """Whether `url` is somewhere else than in a folder of this machine."""
    return url.startswith(("s3://", "http://", "https://"))


def open_source(url: str) -> Source:
    """The source behind `s3://bucket/prefix`, `http(s)://host/prefix` or a folder's path."""
    if url.startswith("s3://"):
        from .s3 import S3Source  # noqa: PLC0415  boto3 takes a quarter of a second to import

        return S3Source(url)
    if url.startswith(("http://", "https://")):
        from .http import HttpSource  # noqa: PLC0415  ssl and h11, for those who use them

        return HttpSource(url)
    return FolderSource(Path(url))


def read_manifest(source: Source) -> Manifest:
    """The manifest that lies beside a source's shards; SourceMissing if there is none, ManifestError if it is wrong."""
    # For a URL alone, as the command line has, pydantic is not loaded.
    from ..format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest  # noqa: PLC0415

    try:
        size_bytes = source.size(MANIFEST_NAME)
    except SourceMissing as error:
        if error.details.get("code") == "NoSuchBucket":
            raise
        raise _without_manifest(source, error) from error
    if size_bytes > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"The manifest at {source.url} has {size_bytes} bytes, over the limit of {MAX_MANIFEST_BYTES}."
        )
    text = bytearray(size_bytes)
    count = source.read_into(MANIFEST_NAME, 0, memoryview(text))
    return Manifest.parse(bytes(text[:count]))


def _without_manifest(source: Source, error: SourceMissing) -> SourceMissing:
    """Where there is no manifest there may well be weights: say how theirs is made."""
    place = source.url if isinstance(source, Writable) else "FOLDER (the one that is served)"
    return SourceMissing(
        f"There is no manifest at {source.url}: {error.message}",
        remedy=f"Check the URL. If weights are there, make their manifest: pilotflame snapshot create {place}",
        details=error.details,
    )
