"""What a web server's answer to a range means: the bytes asked for, or an error that says what is wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from ...errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from .exchange import Head
from .source import ObjectInfo, same_version

OK, PARTIAL = 200, 206
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Asked:
    """One range: bytes [begin, end) of object `name` at `where`, a URL that may be shown."""

    name: str
    where: str
    begin: int
    end: int
    version: str = ""


@dataclass(frozen=True, slots=True)
class ContentRange:
    """What a Content-Range says; `end` is exclusive, `total` None where the server does not know it."""

    begin: int
    end: int
    total: int | None

    @staticmethod
    def parse(text: str) -> ContentRange | None:
        """None for what is no range of bytes; [0, 0) for an unsatisfied one (`bytes */5`)."""
        if (found := _CONTENT_RANGE.fullmatch(text)) is None:
            return None
        first, last, total = found.groups()
        size = None if total == "*" else int(total)
        return ContentRange(int(first or 0), int(last) + 1 if last else 0, size)


def is_strong(version: str) -> bool:
    """Whether a version is an ETag that If-Match takes."""
    return version.startswith('"')


def version_of(headers: Mapping[str, str]) -> str:
    """The ETag, else when the object was last modified, else nothing."""
    return headers.get("etag") or headers.get("last-modified", "")


def described(head: Head, asked: Asked) -> ObjectInfo:
    """What a good answer says of the whole object; SourceError if it does not tell the size."""
    found = ContentRange.parse(head.headers.get("content-range", "")) if head.status != OK else None
    size = found.total if found is not None else None
    if head.status == OK and head.headers.get("content-length", "").isdigit():
        size = int(head.headers["content-length"])
    if size is None:
        raise SourceError(
            f"{asked.where} does not tell how large it is.",
            remedy="Serve it as a static file, with Content-Length and ranges.",
        )
    return ObjectInfo(size, version_of(head.headers))


def check(head: Head, asked: Asked, size_bytes: int | None) -> None:
    """Raise unless this is exactly the range that was asked for, of the object it was asked of, and not encoded.

    `size_bytes` is what is known of the object's size.
    """
    encoding = head.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise SourceError(
            f"{asked.where} comes encoded as {encoding[:40]}.",
            remedy="Serve safetensors files as they are: no compression on the way.",
        )
    total = _check_whole(head, asked, size_bytes) if head.status == OK else _check_range(head, asked)
    if size_bytes is not None and total is not None and total != size_bytes:
        raise changed(asked, f"it has {total} bytes, and had {size_bytes}")
    _check_version(head, asked)


def refusal(head: Head, asked: Asked) -> PilotflameError:
    """The error behind a status that is neither a success nor a redirect."""
    status, where = head.status, asked.where
    details = {"object": asked.name, "status": status}
    if status in {412, 416}:
        return changed(asked, "it is not the version asked for" if status == 412 else "it is shorter by now")
    if status in {404, 410}:
        return SourceMissing(
            f"{where} is not there (HTTP {status}).",
            remedy="Check the URL; the manifest names files relative to it.",
            details=details,
        )
    if status in {401, 403, 407}:
        return SourceDenied(
            f"{where} may not be read (HTTP {status}).",
            remedy="Check the credentials, and that they may read this object.",
            details=details,
        )
    if status in _PASSING or status >= 500:
        return unavailable(asked, f"the server answers HTTP {status}", head)
    return SourceError(
        f"{where} is answered with HTTP {status}, which is no range of bytes.",
        remedy="Check that the URL is that of a file server.",
        details=details,
    )


def unavailable(asked: Asked, what: str, head: Head | None = None) -> SourceUnavailable:
    """What may pass when tried again; with the Retry-After of `head`."""
    details: dict[str, object] = {"object": asked.name}
    if head is not None:
        details["status"] = head.status
        wanted_s = retry_after_s(head.headers.get("retry-after", ""), time.time())
        if wanted_s is not None:
            details["retry_after_s"] = wanted_s
    return SourceUnavailable(
        f"{asked.where}, bytes {asked.begin} to {asked.end}: {what}.",
        remedy="Try again; see that the server can be reached if it stays.",
        details=details,
    )


def changed(asked: Asked, how: str) -> SnapshotChanged:
    """The object is no longer the one that was asked for."""
    return SnapshotChanged(
        f"{asked.where} changed while it was read: {how}.",
        remedy="Publish new weights under a new name, and make their manifest anew.",
        details={"object": asked.name},
    )


def retry_after_s(text: str, now_s: float) -> float | None:
    """Retry-After in seconds, from seconds or a date; None where it says nothing. `now_s` as time.time()."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except ValueError:
        return None


def _check_whole(head: Head, asked: Asked, size_bytes: int | None) -> int | None:
    length = head.headers.get("content-length", "")
    total = int(length) if length.isdigit() else size_bytes
    if asked.begin != 0 or total is None or total != asked.end:
        raise SourceError(
            f"{asked.where} is not served in ranges: the whole of it was answered.",
            remedy="Serve it from a server with support for Range requests (nginx, any object storage).",
            details={"object": asked.name},
        )
    return total


def _check_range(head: Head, asked: Asked) -> int | None:
    text = head.headers.get("content-range", "")
    found = ContentRange.parse(text)
    if found is None or (found.begin, found.end) != (asked.begin, asked.end):
        came = f"bytes {found.begin} to {found.end}" if found else f"Content-Range {text[:80]!r}"
        raise unavailable(asked, f"the answer is another range, {came}")
    length = head.headers.get("content-length", "")
    if length.isdigit() and int(length) != asked.end - asked.begin:
        raise unavailable(asked, f"the answer has {length} bytes")
    return found.total


def _check_version(head: Head, asked: Asked) -> None:
    if not asked.version:
        return
    came = version_of(head.headers)
    if not came:
        raise unavailable(asked, "the answer does not say of which version it is")
    if not same_version(came, asked.version):
        raise changed(asked, "its version is another")
