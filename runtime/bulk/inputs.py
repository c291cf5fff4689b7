"""Inputs: the lines of JSONL files, in a file, a folder or S3, read piece by piece and numbered through."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import BatchFailed
from ...snapshot.sources.locate import is_remote, open_source
from ...snapshot.sources.source import Listing, Source

ENDINGS = (".jsonl", ".ndjson")
PIECE_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """One input. `number` counts from 1 through all files; `end` is how many bytes of all are read with it."""

    number: int
    place: str
    text: bytes
    end: int


class Inputs:
    """What is to be read: files of one source, in the order of their names."""

    def __init__(self, source: Source, names: list[str]) -> None:
        self._source = source
        self._names = names
        self._infos = [source.stat(name) for name in names]
        self.total_bytes = sum(info.size_bytes for info in self._infos)

    @classmethod
    def open(cls, place: str) -> Inputs:
        """The files behind a path or an S3 URL. BatchFailed, SourceError."""
        if place.endswith(ENDINGS) if is_remote(place) else Path(place).is_file():
            above, _, name = place.rpartition("/")
            return cls(open_source(above or ("/" if place.startswith("/") else ".")), [name])
        if not is_remote(place) and not Path(place).is_dir():
            raise BatchFailed(
                f"{place} is neither a file nor a folder.", remedy="Name what holds the inputs."
            )
        source = open_source(place)
        names = (
            [name for name in source.names() if name.endswith(ENDINGS)] if isinstance(source, Listing) else []
        )
        if not names:
            raise BatchFailed(
                f"There is no {' or '.join(ENDINGS)} file in {source.url}.",
                remedy="Name what holds the inputs.",
            )
        return cls(source, names)

    @property
    def digest(self) -> str:
        """Another one where anything may have changed."""
        told = [
            (name, info.size_bytes, info.version) for name, info in zip(self._names, self._infos, strict=True)
        ]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def lines(self, skip: int = 0) -> Iterator[InputLine]:
        """All lines after the first `skip`. Blocking."""
        number = end = 0
        for name, info in zip(self._names, self._infos, strict=True):
            place, first = f"{name}, line ", number
            for text, size_bytes in self._split(name, info.size_bytes):
                number, end = number + 1, end + size_bytes
                if number > skip:
                    yield InputLine(number, f"{place}{number - first}", text, end)

    def _split(self, name: str, total_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Each line of a file without its ending, and how many bytes it took."""
        rest, offset = b"", 0
        while offset < total_bytes:
            buffer = bytearray(min(PIECE_BYTES, total_bytes - offset))
            count = self._source.read_into(name, offset, memoryview(buffer))
            if count == 0:
                raise BatchFailed(
                    f"{name} became shorter while it was read.", remedy="Begin anew with --restart."
                )
            whole = rest + bytes(buffer[:count])
            if offset == 0 and whole.startswith(_MARK):
                whole = whole.removeprefix(_MARK)
            offset += count
            *texts, rest = whole.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise BatchFailed(
                    f"{name} has a line of more than {MAX_LINE_BYTES} bytes.", remedy="Is it JSONL?"
                )
            yield from ((text.removesuffix(b"\r"), len(text) + 1) for text in texts)
        if rest:
            yield rest, len(rest)
