"""Creates a source from its URL or path."""

from __future__ import annotations

from pathlib import Path

from .folder import FolderSource
from .source import Source

ANONYMOUS_VARIABLE = "PILOTFLAME_S3_ANONYMOUS"
"""The environment variable that, if it is 1, lets S3 be read without credentials."""


def is_remote(url: str) -> bool:
    """Return True if `url` is of S3 or a web server. Anything else is a path on this machine."""
    return url.startswith(("s3://", "http://", "https://"))


def open_source(url: str) -> Source:
    """Return the source for `url`: `s3://bucket/prefix`, `http(s)://host/prefix` or the path of a folder."""
    if url.startswith("s3://"):
        from .s3 import S3Source  # noqa: PLC0415  ssl and h11 take time to import

        return S3Source(url)
    if is_remote(url):
        from .http import HttpSource  # noqa: PLC0415  ssl and h11 take time to import

        return HttpSource(url)
    return FolderSource(Path(url))
