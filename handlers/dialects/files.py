"""Files in inputs and answers: fetched from the addresses that callers send, returned as data URLs."""

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
from pathlib import Path, PurePath
from typing import IO, Any, Self, cast

from pydantic import BaseModel

from ...errors import OutputInvalid
from .opener import opener

SCHEMES = ("http", "https", "data")
# How long a source may say nothing; the invocation's own deadline counts beside it.
SILENCE_S = 30.0
MAX_BYTES = 4 << 30
"""Of all files of one invocation."""
BLOCK_BYTES = 1 << 20
MAX_SUFFIX_CHARS = 100
OCTETS = "application/octet-stream"
# What the standard library learned later than our oldest Python.
_NEWER_TYPES = {".webp": "image/webp", ".avif": "image/avif", ".safetensors": OCTETS}


class Fetched:
    """The files of one invocation's input; they go when it ends."""

    def __init__(self, remaining_ms: Callable[[], int | None] = lambda: None) -> None:
        self._remaining_ms = remaining_ms
        self._paths: list[Path] = []
        self._opened: list[IO[bytes]] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._opened:
            opened.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def fetch(self, url: str) -> Path:
        """The content of an http, https or data URL as a file. Raises ValueError, saying why not."""
        shown = url if len(url) <= MAX_SUFFIX_CHARS else f"{url[:MAX_SUFFIX_CHARS]}…"
        if urllib.parse.urlsplit(url).scheme not in SCHEMES:
            raise ValueError(f"{shown!r} is not the address of a file: send an http, https or data URL")
        try:
            with opener().open(url, timeout=self._patience_s()) as answer:
                kind = answer.headers.get_content_type()
                descriptor, name = tempfile.mkstemp(prefix="pilotflame-", suffix=_suffix(url, kind))
                self._paths.append(Path(name))
                with os.fdopen(descriptor, "wb") as target:
                    self._copy(answer, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(f"{shown} cannot be fetched: {error}") from None
        return self._paths[-1]

    def open(self, url: str) -> IO[bytes]:
        """As `fetch`, opened for reading."""
        opened = self.fetch(url).open("rb")
        self._opened.append(opened)
        return opened

    def _patience_s(self) -> float:
        remaining_ms = self._remaining_ms()
        return SILENCE_S if remaining_ms is None else min(SILENCE_S, max(0.001, remaining_ms / 1000))

    def _copy(self, source: Any, target: IO[bytes]) -> None:
        """What has come is written as it comes: a source that drips is found out when the invocation's time is up."""
        remaining_ms = self._remaining_ms()
        deadline_s = math.inf if remaining_ms is None else time.monotonic() + remaining_ms / 1000
        left = cast("int | None", getattr(source, "length", None))  # of an http answer that says so
        while left != 0:
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the invocation's time was up first")
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


def presented(answer: Any, path: str = "answer") -> Any:
    """An answer with each file in it as a data URL. Blocking. Raises OutputInvalid naming one that is not there."""
    if isinstance(answer, (PurePath, io.IOBase)):
        return _data_url(answer, path)
    if isinstance(answer, enum.Enum):
        return answer.value
    if isinstance(answer, (list, tuple)):
        return [presented(value, f"{path}[{number}]") for number, value in enumerate(answer)]
    named = _named(answer)
    return (
        answer
        if named is None
        else {name: presented(value, f"{path}.{name}") for name, value in named.items()}
    )


def _named(answer: Any) -> dict[Any, Any] | None:
    """The parts of what has named parts."""
    if isinstance(answer, BaseModel):
        return dict(answer)
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    return answer if isinstance(answer, dict) else None


def _data_url(file: PurePath | io.IOBase, path: str) -> str:
    name = str(getattr(file, "name", ""))
    try:
        content = Path(file).read_bytes() if isinstance(file, PurePath) else _contents(file)
    except (OSError, ValueError) as error:  # ValueError: it is closed
        raise OutputInvalid(
            f"The {path} is the file {name!r}, which cannot be read: {error}.",
            remedy="Return the path of a file that was written.",
        ) from None
    return f"data:{_type(name)};base64,{base64.b64encode(content).decode()}"


def _contents(opened: io.IOBase) -> bytes:
    if opened.seekable():
        opened.seek(0)
    content = opened.read()
    return content.encode() if isinstance(content, str) else bytes(content)


def _type(name: str) -> str:
    return _NEWER_TYPES.get(PurePath(name).suffix.lower()) or mimetypes.guess_type(name)[0] or OCTETS


def _suffix(url: str, kind: str) -> str:
    """What the file's name should end with, so that who looks at it sees what it is."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "data":
        return mimetypes.guess_extension(kind) or ""
    name = urllib.parse.unquote(PurePath(parts.path).name).replace("/", "_").replace("\0", "_")
    return name.encode()[-MAX_SUFFIX_CHARS:].decode("utf-8", "ignore")
