"""Checks that the response to a range request has the requested bytes. Turns other responses into errors."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from ...errors import PilotflameError, SourceDenied, SourceError, SourceMissing, SourceUnavailable
from .exchange import Head
from .source import changed, same_version

OK, PARTIAL = 200, 206
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MISPLACED = "misplaced"
"""This key in the details of an error means that the response may belong to another request of the same connection."""
_PLAIN = frozenset({"", "identity", "aws-chunked"})
_TRANSIENT = frozenset({408, 425, 429})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A request for bytes [begin, end) of object `name`. `url` has no secrets, so messages may show it.

    If `version` is not "", the object must have this version.
    """

    name: str
    url: str
    begin: int
    end: int
    version: str = ""


def told_size(head: Head) -> int | None:
    """Return the size of the whole object, from the head of a response. None if the head does not have it."""
    return _content_length(head) if head.status == OK else _content_range(head)[2]


def version_of(head: Head) -> str:
    """Return the version of the object that a response has: its ETag, else its Last-Modified, else ""."""
    return head.headers.get("etag") or head.headers.get("last-modified", "")


def check(head: Head, request: RangeRequest, size_bytes: int | None, *, fresh: bool) -> None:
    """Raise a SourceError or SnapshotChanged unless the response has exactly the requested bytes.

    The response must have the requested range of the requested version, without a content encoding such as gzip. The
    encoding `aws-chunked` is accepted, because some stores repeat it from the upload, but send plain bytes. A response
    without Content-Range, as some mirrors send, is accepted only if the connection is `fresh`: on another connection, the
    response may be a second answer to an earlier request. `size_bytes` is the size of the object, or None if it is unknown.
    """
    encoding = head.headers.get("content-encoding", "").lower()
    if not _PLAIN.issuperset(part.strip() for part in encoding.split(",")):
        fault = f"{request.url} is sent with Content-Encoding {encoding[:40]}."
        raise SourceError(fault, remedy="Serve safetensors files without compression.")
    total = (
        _check_whole(head, request, size_bytes)
        if head.status == OK
        else _check_range(head, request, fresh=fresh)
    )
    if size_bytes is not None and total is not None and total != size_bytes:
        raise changed(request.url, request.name, f"it has {total} bytes, and had {size_bytes}")
    received = version_of(head)
    if request.version and not received:
        raise unavailable(request, "the response has no ETag and no Last-Modified")
    if request.version and not same_version(received, request.version):
        raise changed(request.url, request.name, "its version is another")


def refusal(head: Head, request: RangeRequest) -> PilotflameError:
    """Return the error for a response whose status is neither a success nor a redirect."""
    status, url = head.status, request.url
    cls: type[SourceError]
    if status == 416:
        return changed(request.url, request.name, "it is shorter now")
    if status in _TRANSIENT or status >= 500:
        return unavailable(request, f"the server responds with HTTP {status}", head)
    if status in {404, 410}:
        cls, fault = SourceMissing, f"{url} is not there (HTTP {status})."
        remedy = "Check the URL; the manifest names files relative to it."
    elif status in {401, 403, 407}:
        cls, fault = SourceDenied, f"{url} may not be read (HTTP {status})."
        remedy = "Check the credentials, and that they may read this object."
    else:
        cls, fault = SourceError, f"The response for {url} is HTTP {status}, not a range of bytes."
        remedy = "Check that the URL is that of a file server."
    return cls(fault, remedy=remedy, details={"object": request.name, "status": status})


def unavailable(request: RangeRequest, fault: str, head: Head | None = None) -> SourceUnavailable:
    """Return a SourceUnavailable. If `head` is given, the details have its status and its Retry-After."""
    details: dict[str, object] = {"object": request.name}
    if head is not None:
        details["status"] = head.status
        if (wanted_s := _retry_after_s(head.headers.get("retry-after", ""))) is not None:
            details["retry_after_s"] = wanted_s
    where = f"{request.url}, bytes {request.begin} to {request.end}"
    return SourceUnavailable(f"{where}: {fault}.", remedy="Try again, or check the server.", details=details)


def _content_length(head: Head) -> int | None:
    text = head.headers.get("content-length", "")
    return int(text) if text.isdigit() else None


def _content_range(head: Head) -> tuple[int, int, int | None]:
    """Parse Content-Range. Return the begin, the end (exclusive; 0 without a range) and the total size (None if unknown)."""
    found = _CONTENT_RANGE.fullmatch(head.headers.get("content-range", ""))
    if found is None:
        return 0, 0, None
    first, last, total = found.groups()
    return int(first or 0), int(last) + 1 if last else 0, None if total == "*" else int(total)


def _retry_after_s(text: str) -> float | None:
    """Return the delay in seconds that a Retry-After header gives, or None if the header is not valid."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _check_whole(head: Head, request: RangeRequest, size_bytes: int | None) -> int | None:
    length = _content_length(head)
    total = length if length is not None else size_bytes
    # Accept the whole object only if all of it was requested. If its size is unknown, the range must begin at 0.
    if request.begin != 0 or total not in {None, request.end}:
        fault = f"{request.url} is not served in ranges: the response is the whole object."
        remedy = "Serve it from a server that supports Range requests (nginx, any object storage)."
        if "html" in head.headers.get("content-type", ""):
            fault = f"{request.url} is not the file: the response is a page of HTML."
            remedy = (
                "Open it in a browser: you may have to log in, or the address of the file itself is another."
            )
        raise SourceError(fault, remedy=remedy, details={"object": request.name})
    return total


def _check_range(head: Head, request: RangeRequest, *, fresh: bool) -> int | None:
    unplaced = fresh and "content-range" not in head.headers
    begin, end, total = (request.begin, request.end, None) if unplaced else _content_range(head)
    if (begin, end) != (request.begin, request.end):
        error = unavailable(request, f"the response is another range, bytes {begin} to {end}")
        raise SourceUnavailable(
            error.message, remedy=error.remedy, details={**error.details, MISPLACED: True}
        )
    length = _content_length(head)
    if length is not None and length != end - begin:
        raise unavailable(request, f"the response has {length} bytes")
    return total
