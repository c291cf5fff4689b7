"""Reads which files a web server has below a URL, from the pages that list its folders.

Apache, nginx, Caddy and `python -m http.server` write such pages in HTML. nginx and Caddy can write JSON.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit

from ...errors import SourceError
from .source import name_fault

MAX_PAGES = 64
MAX_DEPTH = 4
MAX_NAMES = 16_384

ReadPage = Callable[[str], tuple[str, bytes]]
"""Returns the content type and the bytes of the page at a URL. Raises SourceError."""


def listed_names(url: str, read_page: ReadPage) -> list[str]:
    """Return the names of the files below `url`, which ends with a slash, sorted and relative to it.

    Hidden files are left out, and so are folders that have no page, or are too deep or too many. Raises
    SourceError if `url` itself has no page that lists its folder.
    """
    names: set[str] = set()
    folders = deque([("", entries(url, *read_page(url)))])
    read = 1
    while folders:
        folder, found = folders.popleft()
        for entry in found:
            path = f"{folder}{entry}"
            if not entry.endswith("/"):
                names.add(path)
            elif path.count("/") <= MAX_DEPTH and read < MAX_PAGES:
                read += 1
                folders.append((path, _entries_of(f"{url}{quote(path)}", read_page)))
        if len(names) > MAX_NAMES:
            fault = f"{url} lists more than {MAX_NAMES} files."
            raise SourceError(fault, remedy="Put the weights and their files into a separate folder.")
    return sorted(names)


def _entries_of(url: str, read_page: ReadPage) -> list[str]:
    try:
        return entries(url, *read_page(url))
    except SourceError:
        return []


def entries(url: str, content_type: str, page: bytes) -> list[str]:
    """Return the names in the folder at `url` that a page lists; those of folders end with a slash.

    Raises SourceError if the page is neither HTML nor the JSON of a listing.
    """
    kind = content_type.partition(";")[0].strip().lower()
    text = page.decode("utf-8", "replace")
    if kind == "application/json":
        names = _json_entries(text)
    elif kind in {"text/html", "application/xhtml+xml"}:
        names = _html_entries(url, text)
    else:
        raise SourceError(f"{url} is no page that lists a folder.", remedy="Name one file in the URL.")
    return sorted(name for name in names if not name.startswith(".") and _is_plain(name.removesuffix("/")))


def _is_plain(name: str) -> bool:
    return "/" not in name and name_fault(name) is None


def _json_entries(text: str) -> set[str]:
    """nginx: [{"name": "a", "type": "file"}]. Caddy: [{"name": "a/", "is_dir": true}]."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    found = set()
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(name := entry.get("name"), str):
            folder = entry.get("type") == "directory" or entry.get("is_dir") is True
            found.add(f"{name.removesuffix('/')}/" if folder else name)
    return found


def _html_entries(url: str, text: str) -> set[str]:
    links = _Links()
    links.feed(text)
    base, found = urlsplit(url), set()
    for target in links.targets:
        try:
            parts = urlsplit(urljoin(url, target))
        except ValueError:
            continue
        # Links to the folder above, to other sites, and those that sort the columns ("?C=N").
        if (parts.scheme, parts.netloc) != (base.scheme, base.netloc) or parts.query:
            continue
        below = unquote(parts.path).removeprefix(unquote(base.path))
        if unquote(parts.path) != below and below:
            found.add(below)
    return found


class _Links(HTMLParser):
    """Collects the targets of the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]
