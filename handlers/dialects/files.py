"""Handles files in inputs and outputs: downloads the URLs that callers send, and returns data URLs."""

from __future__ import annotations

import base64
import dataclasses
import enum
import http.client
import io
import math
import mimetypes
import os
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import IO, Any

from pydantic import BaseModel

from ...errors import OutputInvalid
from .opener import opener

SCHEMES = ("http", "https", "data")
# A download fails if its server sends nothing for this long. It also fails at the invocation's deadline.
SILENCE_S = 30.0
# The limit for all files of one invocation together.
MAX_BYTES = 4 << 30
BLOCK_BYTES = 1 << 20
MAX_SUFFIX_CHARS = 100
OCTETS = "application/octet-stream"
# File types that the module mimetypes does not know in the oldest supported version of Python.
_NEWER_TYPES = {".webp": "image/webp", ".avif": "image/avif", ".safetensors": OCTETS}


class InputFiles(ExitStack):
    """The files of one invocation's input, which are deleted on exit.

    `remaining_ms` returns the time until the invocation's deadline, or None if there is no deadline.
    """

    def __init__(self, remaining_ms: Callable[[], int | None] = lambda: None) -> None:
        super().__init__()
        self._remaining_ms = remaining_ms
        self._bytes = 0

    def fetch(self, url: str) -> Path:
        """Download a URL to a temporary file, and return its path. Raises ValueError if that fails."""
        shown = url if len(url) <= MAX_SUFFIX_CHARS else f"{url[:MAX_SUFFIX_CHARS]}…"
        if urllib.parse.urlsplit(url).scheme not in SCHEMES:
            raise ValueError(f"{shown!r} is not the address of a file: send an http, https or data URL")
        try:
            with opener().open(url, timeout=self._timeout_s()) as response:
                kind = response.headers.get_content_type()
                descriptor, name = tempfile.mkstemp(prefix="pilotflame-", suffix=_suffix(url, kind))
                self.callback(Path(name).unlink, missing_ok=True)
                with os.fdopen(descriptor, "wb") as target:
                    self._copy(response, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(f"{shown} cannot be fetched: {error}") from None
        return Path(name)

    def open(self, url: str) -> IO[bytes]:
        """Download a URL like `fetch`, and return the file, open for reading."""
        return self.enter_context(self.fetch(url).open("rb"))

    def _timeout_s(self) -> float:
        remaining_ms = self._remaining_ms()
        return SILENCE_S if remaining_ms is None else min(SILENCE_S, max(0.001, remaining_ms / 1000))

    def _copy(self, source: Any, target: IO[bytes]) -> None:
        # `read1` returns what has arrived, so that the loop notices the deadline even if a server is slow.
        remaining_ms = self._remaining_ms()
        deadline_s = math.inf if remaining_ms is None else time.monotonic() + remaining_ms / 1000
        # The number of bytes still to be read, if there is a Content-Length.
        left: int | None = getattr(source, "length", None)
        while left != 0:
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the invocation's deadline passed first")
            block = source.read1(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES))
            if not block:
                break
            left = None if left is None else left - len(block)
            self._bytes += len(block)
            if self._bytes > MAX_BYTES:
                raise OSError(f"the files of one invocation may not be larger than {MAX_BYTES >> 30} GiB")
            target.write(block)
        if left:
            raise OSError(f"it ended {left} bytes early")


def with_data_urls(output: Any, path: str = "answer") -> Any:
    """Return the output with its files replaced by data URLs. `path` is its name in error messages.

    Blocks: do not call it on the event loop. Raises OutputInvalid if a file cannot be read.
    """
    if isinstance(output, (PurePath, io.IOBase)):
        return _data_url(output, path)
    if isinstance(output, enum.Enum):
        return output.value
    if isinstance(output, (list, tuple)):
        return [with_data_urls(value, f"{path}[{number}]") for number, value in enumerate(output)]
    if isinstance(output, BaseModel):
        output = dict(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if not isinstance(output, dict):
        return output
    return {name: with_data_urls(value, f"{path}.{name}") for name, value in output.items()}


def _data_url(file: PurePath | io.IOBase, path: str) -> str:
    name = str(getattr(file, "name", ""))
    try:
        content = Path(file).read_bytes() if isinstance(file, PurePath) else _contents(file)
    except (OSError, ValueError) as error:
        # ValueError: the file is closed.
        fault = f"The {path} is the file {name!r}, which cannot be read: {error}."
        raise OutputInvalid(fault, remedy="Return the path of a file that was written.") from None
    kind = _NEWER_TYPES.get(PurePath(name).suffix.lower()) or mimetypes.guess_type(name)[0] or OCTETS
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _contents(opened: io.IOBase) -> bytes:
    if opened.seekable():
        opened.seek(0)
    content = opened.read()
    return content.encode() if isinstance(content, str) else bytes(content)


def _suffix(url: str, kind: str) -> str:
    """Return an extension for a data URL of media type `kind`, or else the end of the URL's path."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "data":
        return mimetypes.guess_extension(kind) or ""
    name = urllib.parse.unquote(PurePath(parts.path).name).replace("/", "_").replace("\0", "_")
    return name.encode()[-MAX_SUFFIX_CHARS:].decode("utf-8", "ignore")
