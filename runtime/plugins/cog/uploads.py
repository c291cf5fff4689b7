"""Uploads a prediction's output files to URLs with a prefix that the caller or the function's owner sets."""

from __future__ import annotations

import functools
import http.client
import io
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import IO, Any
from urllib import error, parse, request

from ....addresses import INPUT_NETWORKS, UPLOAD_URL
from ....errors import OutputInvalid
from ....handlers.contract import Context
from ....handlers.files import BLOCK_BYTES, media_type, opened_file
from ....handlers.opener import opener

# An upload fails if the server neither accepts nor sends any bytes for this time.
SILENCE_S = 30.0
TRIES = 3
PAUSE_S = 0.2
# A request with one of these statuses is repeated.
BUSY = frozenset({408, 429, 500, 502, 503, 504})


class Uploader:
    """Uploads files with PUT. It connects only to addresses from which input files may also be fetched."""

    def __init__(self, prefix: str, headers: Mapping[str, str], *, form: bool) -> None:
        """With `form`, a file is sent as the field `file` of a form, as Cog does for `output_file_prefix`."""
        self._prefix, self._headers, self._form = prefix, headers, form

    @classmethod
    def of(cls, about: Mapping[str, Any], context: Context, environ: Mapping[str, str]) -> Uploader | None:
        """Return the uploader for a prediction, or None if its output files are returned as data URLs.

        `about` holds the gateway's facts about the prediction.
        """
        own = {"traceparent": context.traceparent} if context.traceparent else {}
        headers = about.get("trace") or own
        if prefix := about.get("output_file_prefix"):
            return cls(prefix, headers, form=True)
        endpoint = environ.get(UPLOAD_URL, "")
        if not endpoint or not about.get("asynchronous"):
            return None
        return cls(
            f"{endpoint.rstrip('/')}/",
            headers | {"X-Prediction-ID": about.get("id") or context.id},
            form=False,
        )

    def __call__(self, file: PurePath | io.IOBase, path: str) -> str:
        """Upload a file and return its URL. Raise OutputInvalid, with `path` in its message, if the upload fails."""
        name = PurePath(str(getattr(file, "name", ""))).name or ("output" if self._form else "file")
        url = self._prefix + parse.quote(name)
        with opened_file(file, path) as source:
            try:
                return self._put(url, name, source)
            except (OSError, ValueError, http.client.HTTPException) as fault:
                remedy = f"Correct the address, or allow its network in {INPUT_NETWORKS}."
                message = f"The {path} cannot be uploaded to {url}: {fault}."
                raise OutputInvalid(message, remedy=remedy) from None

    def _put(self, url: str, name: str, source: IO[Any]) -> str:
        """Send the file, and repeat this if the server is busy. Return the file's URL."""
        for tried in range(1, TRIES):
            try:
                return self._put_once(url, name, source)
            except error.HTTPError as refusal:
                refusal.close()
                if refusal.code not in BUSY or not source.seekable():
                    raise
            threading.Event().wait(PAUSE_S * tried)
        return self._put_once(url, name, source)

    def _put_once(self, url: str, name: str, source: IO[Any]) -> str:
        body, length, kind = self._body(name, source)
        headers = {**self._headers, "Content-Type": kind, "Content-Length": str(length)}
        wanted = request.Request(url, data=body, headers=headers, method="PUT")  # noqa: S310  the opener checks it
        with opener().open(wanted, timeout=SILENCE_S) as response:
            return url if self._form else _final(response.headers.get("Location") or response.geturl())

    def _body(self, name: str, source: IO[Any]) -> tuple[Iterator[bytes], int, str]:
        """Return (blocks, number of bytes, media type) of the request's body."""
        blocks, length = _blocks(source)
        if not self._form:
            return blocks, length, media_type(name)
        boundary = secrets.token_hex(16)
        field = f'Content-Disposition: form-data; name="file"; filename="{parse.quote(name)}"'
        # As in Cog, the part has no Content-Type.
        head = f"--{boundary}\r\n{field}\r\n\r\n".encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        whole = _chained(head, blocks, tail)
        return whole, len(head) + length + len(tail), f"multipart/form-data; boundary={boundary}"


def _blocks(source: Any) -> tuple[Iterator[bytes], int]:
    """Return the blocks of a file and their total size. Text files, and files that cannot seek, become one block."""
    if isinstance(source, io.TextIOBase) or not source.seekable():
        content = source.read()
        whole = content.encode() if isinstance(content, str) else bytes(content)
        return iter((whole,)), len(whole)
    length = source.seek(0, os.SEEK_END)
    source.seek(0)
    return iter(functools.partial(source.read, BLOCK_BYTES), b""), length


def _chained(head: bytes, blocks: Iterator[bytes], tail: bytes) -> Iterator[bytes]:
    yield head
    yield from blocks
    yield tail


def _final(url: str) -> str:
    """Return a URL without its query, which may hold a signature."""
    return parse.urlsplit(url)._replace(query="").geturl()
