"""From a URL, or a path, to its source."""

from __future__ import annotations

from pathlib import Path

from .folder import FolderSource
from .source import Source


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
