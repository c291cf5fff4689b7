"""Creates a source from its URL or path."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...errors import SourceDenied, SourceError
from .access import ANY, Access
from .folder import FolderSource
from .location import shown
from .schemes import Leads, scheme_of
from .source import Kept, Source

WEIGHTS_SUFFIX = ".safetensors"
FILE_SUFFIXES = (WEIGHTS_SUFFIX, ".json")
"""A remote URL with one of these endings names a file of weights or a manifest, and not a folder."""
MOST_KEPT = 16
"""The most sources that a process keeps. It drops the least recently used source."""


def is_remote(url: str) -> bool:
    """Return True if `url` is a URL of a cloud, the hub or a web server. Anything else is a path on this machine."""
    return scheme_of(url) is not None


def split_file(url: str) -> tuple[str, str | None]:
    """Return the URL of the folder and the name of the file, if `url` names a file of weights or a manifest.

    For another URL, return the URL itself and None. A query stays in the folder's URL, since the requests for all files
    need it.
    """
    path, mark, query = url.partition("?")
    above, _, last = path.rstrip("/").rpartition("/")
    if is_remote(url) and last.endswith(FILE_SUFFIXES):
        return f"{above}{mark}{query}", last
    return url, None


def weights_file(url: str) -> str | None:
    """Return the name of the one file of weights that `url` names, or None if it names a folder."""
    file = split_file(url)[1]
    return file if file is not None and file.endswith(WEIGHTS_SUFFIX) else None


def open_source(url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> Source:
    """Return the source for `url`, which is a URL of a cloud (s3, gs, az), the hub (hf) or a web server, or a path.

    If the URL names a file of weights or a manifest, the source is the folder of that file. `secrets` are the secrets
    of a function. They take precedence over the environment of this process (see `variables`). `access` limits
    what else the source uses, and to which addresses it connects.
    """
    folder, _ = split_file(url)
    scheme = scheme_of(folder)
    return FolderSource(Path(folder)) if scheme is None else scheme.open(folder, secrets, access)


def follow(url: str, location: str, secrets: Mapping[str, str] | None, access: Access) -> Source:
    """Return the source at `location`, a URL or path that the server of `url` has named. Only with this function may a source
    open another source.

    The scheme of `url` decides where its servers may lead. If the function has named the server, only the function's own
    credentials are used at the location. Raise SourceError if the scheme leads to no such location, and SourceDenied for
    a folder of this machine that the function may not read.
    """
    scheme, target = scheme_of(url), scheme_of(location)
    leads = Leads.NOWHERE if scheme is None else scheme.leads
    alone = scheme is None or scheme.identity.alone(secrets, access)
    if leads is Leads.STORES_AND_DISK and location.startswith(("/", "file:")):
        if alone or access.addresses is not None:
            fault = (
                f"{url}: its files are in a folder of the server's machine, which this function may not read."
            )
            raise SourceDenied(fault, remedy="Register a version whose files are in an object store.")
        return FolderSource(Path(unquote(urlsplit(location).path)))
    if leads is Leads.NOWHERE or target is None or target is scheme:
        fault = f"{url}: its files are at {shown(location)[:200]}, which cannot be read."
        raise SourceError(
            fault, remedy="Register a version whose files are in S3, Google's cloud or a folder."
        )
    return open_source(location, secrets, replace(access, own_only=alone))


class KeptSources:
    """The most recently used remote sources, with their connections, clients and tokens. Thread-safe.

    Each combination of a URL, secrets and an Access has its own source, so no connection is used with the credentials of another source.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, frozenset[tuple[str, str]], Access], Source] = {}

    def open(self, url: str, secrets: Mapping[str, str], access: Access = ANY) -> Source:
        """Return the kept source for `url`, or open a new source. A kept source first forgets the infos of its objects."""
        key = url, frozenset(secrets.items()), access
        with self._lock:
            source = self._kept.pop(key, None)
        source = source or open_source(url, secrets, access)
        if isinstance(source, Kept):
            source.forget()
            with self._lock:
                self._kept[key] = source
                while len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
        return source

    def drop(self, source: Source) -> None:
        """Stop keeping a source. Call this after the server refused the source, because a new source may find other credentials."""
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if kept is not source}
