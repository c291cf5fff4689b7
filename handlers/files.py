"""Handles files in inputs and outputs: downloads the URLs that callers send, and returns data URLs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import http.client
import io
import math
import mimetypes
import os
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from email.message import Message
from pathlib import Path, PurePath
from typing import IO, Any, TypeAlias

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from ..errors import OutputInvalid
from .opener import encoded, opener

SCHEMES = ("http", "https", "data")
# A download fails if its server sends nothing for this long. It also fails at the invocation's deadline.
SILENCE_S = 30.0
# The limit for all files of one invocation together.
MAX_BYTES = 4 << 30
BLOCK_BYTES = 1 << 20
MAX_SUFFIX_CHARS = 100
OCTETS = "application/octet-stream"
# The problem type for a file that cannot be fetched. All other problems are faults of the input itself.
UNAVAILABLE = "file_unavailable"
Publish: TypeAlias = Callable[[PurePath | io.IOBase, str], str]
"""Takes an output file and its name in error messages, and returns the file's URL."""
# File types that the module mimetypes does not know in the oldest supported version of Python.
_NEWER_TYPES = {".webp": "image/webp", ".avif": "image/avif", ".safetensors": OCTETS}


class InputFiles(ExitStack):
    """The files of one invocation's input, which are deleted on exit.

    `remaining_ms` returns the time until the invocation's deadline, or None if there is no deadline. `known` maps URLs
    to the paths of files on this machine, which the gateway has stored for the caller.
    """

    def __init__(
        self, remaining_ms: Callable[[], int | None] = lambda: None, known: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._remaining_ms = remaining_ms
        self._known = known or {}
        self._bytes = 0

    def fetch(self, url: str) -> Path:
        """Download a URL to a temporary file, and return its path. Raise ValueError if that fails."""
        shown = url if len(url) <= MAX_SUFFIX_CHARS else f"{url[:MAX_SUFFIX_CHARS]}…"
        if url not in self._known and urllib.parse.urlsplit(url).scheme not in SCHEMES:
            raise ValueError(f"{shown!r} is not the address of a file: send an http, https or data URL")
        try:
            if url in self._known:
                return self._copied(Path(self._known[url]))
            with opener().open(encoded(url), timeout=self._timeout_s()) as response:
                target, path = self._temporary(self.suffix(url, response.headers))
                with target:
                    self._copy(response, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # The text of an OSError can have a path of the gateway's state folder, which callers must not see.
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            fault = {"fault": f"{shown} cannot be fetched: {reason}"}
            raise PydanticCustomError(UNAVAILABLE, "{fault}", fault) from None
        return path

    def suffix(self, url: str, headers: Message) -> str:
        """Return the end of the name of the temporary file for a URL."""
        return _suffix(url, headers)

    def _copied(self, source: Path) -> Path:
        """Return a copy of a file, because handlers may change and delete the files that they are given."""
        with source.open("rb") as opened:
            target, path = self._temporary(source.suffix)
            with target:
                shutil.copyfileobj(opened, target, BLOCK_BYTES)
        return path

    def _temporary(self, suffix: str) -> tuple[IO[bytes], Path]:
        """Return a new file, open for writing, and its path. The file is deleted on exit."""
        descriptor, name = tempfile.mkstemp(prefix="pilotflame-", suffix=suffix)
        self.callback(Path(name).unlink, missing_ok=True)
        return os.fdopen(descriptor, "wb"), Path(name)

    def open(self, url: str) -> IO[bytes]:
        """Download a URL like `fetch`, and return the file, open for reading."""
        return self.enter_context(self.fetch(url).open("rb"))

    def _timeout_s(self) -> float:
        remaining_ms = self._remaining_ms()
        return SILENCE_S if remaining_ms is None else min(SILENCE_S, max(0.001, remaining_ms / 1000))

    def _copy(self, source: Any, target: IO[bytes]) -> None:
        # `read1` does not wait for a full block, so that the loop notices the deadline even if a server is slow.
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


def with_urls(output: Any, path: str = "answer", publish: Publish | None = None) -> Any:
    """Return the output with each file replaced by the URL that `publish` returns. Without `publish`, use data URLs.

    `path` is the output's name in error messages. Bytes become text, or a data URL if they are no text.
    Blocks: do not call it on the event loop. Raise OutputInvalid if a file cannot be read.
    """
    if isinstance(output, (PurePath, io.IOBase)):
        return (publish or data_url)(output, path)
    if isinstance(output, enum.Enum):
        return output.value
    if isinstance(output, (list, tuple)):
        return [with_urls(value, f"{path}[{number}]", publish) for number, value in enumerate(output)]
    if isinstance(output, (bytes, bytearray)):
        return text_of(bytes(output))
    if isinstance(output, BaseModel):
        output = dict(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if not isinstance(output, dict):
        return output
    return {name: with_urls(value, f"{path}.{name}", publish) for name, value in output.items()}


def text_of(content: bytes) -> str:
    """Return bytes as text, as Cog does in JSON. Bytes that are not UTF-8 become a data URL."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"data:{OCTETS};base64,{base64.b64encode(content).decode()}"


def media_type(name: str) -> str:
    """Return the media type of a file with this name."""
    return _NEWER_TYPES.get(PurePath(name).suffix.lower()) or mimetypes.guess_type(name)[0] or OCTETS


def data_url(file: PurePath | io.IOBase, path: str) -> str:
    with opened_file(file, path) as source:
        content = source.read()
    encoded = base64.b64encode(content.encode() if isinstance(content, str) else bytes(content)).decode()
    return f"data:{media_type(str(getattr(file, 'name', '')))};base64,{encoded}"


@contextlib.contextmanager
def opened_file(file: PurePath | io.IOBase, path: str) -> Iterator[Any]:
    """Open an output file at its beginning. Raise OutputInvalid, which names `path`, if it cannot be read."""
    try:
        if isinstance(file, PurePath):
            with Path(file).open("rb") as source:
                yield source
        else:
            if file.seekable():
                file.seek(0)
            yield file
    except (OSError, ValueError) as error:
        # ValueError means that the file is closed.
        fault = f"The {path} is the file {str(getattr(file, 'name', ''))!r}, which cannot be read: {error}."
        raise OutputInvalid(fault, remedy="Return the path of a file that was written.") from None


def _suffix(url: str, headers: Message) -> str:
    """Return the last part of the URL's path. For a data URL, return the suffix of its parameter `name`, or the suffix
    for its media type.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "data":
        name = urllib.parse.unquote(PurePath(parts.path).name).replace("/", "_").replace("\0", "_")
        return name.encode()[-MAX_SUFFIX_CHARS:].decode("utf-8", "ignore")
    suffix = PurePath(str(headers.get_param("name") or "")).suffix
    if not suffix.isprintable() or len(suffix) > MAX_SUFFIX_CHARS:
        suffix = ""
    return suffix or mimetypes.guess_extension(headers.get_content_type()) or ""
