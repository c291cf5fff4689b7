"""The inputs of a batch: numbered lines of JSONL files, in a file, a folder or S3."""

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
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line. `number` counts from 1 through all files; `end` is its offset in all files together."""

    number: int
    place: str
    text: bytes
    end: int


class Inputs:
    """The files of one source, read in the order of their names."""

    def __init__(self, source: Source, names: list[str]) -> None:
        self._source = source
        self._names = names
        self._infos = [source.stat(name) for name in names]
        self.total_bytes = sum(info.size_bytes for info in self._infos)

    @classmethod
    def open(cls, place: str) -> Inputs:
        """Return the inputs at a path or an S3 URL. Raise BatchFailed or SourceError."""
        if place.endswith(ENDINGS) if is_remote(place) else Path(place).is_file():
            above, _, name = place.rpartition("/")
            return cls(open_source(above or ("/" if place.startswith("/") else ".")), [name])
        remedy = "Name a JSONL file, or a folder of them."
        if not is_remote(place) and not Path(place).is_dir():
            raise BatchFailed(f"{place} is neither a file nor a folder.", remedy=remedy)
        source = open_source(place)
        listed = source.names() if isinstance(source, Listing) else ()
        names = [name for name in listed if name.endswith(ENDINGS)]
        if not names:
            raise BatchFailed(f"There is no {' or '.join(ENDINGS)} file in {source.url}.", remedy=remedy)
        return cls(source, names)

    @property
    def digest(self) -> str:
        """A digest of the files' names, sizes and versions: it differs if a file may have changed."""
        infos = zip(self._names, self._infos, strict=True)
        facts = [(name, info.size_bytes, info.version) for name, info in infos]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def lines(self, skip: int = 0) -> Iterator[InputLine]:
        """Yield all lines after the first `skip`. Blocks."""
        number = end = 0
        for name, info in zip(self._names, self._infos, strict=True):
            first = number
            for text, size_bytes in self._split(name, info.size_bytes):
                number, end = number + 1, end + size_bytes
                if number > skip:
                    yield InputLine(number, f"{name}, line {number - first}", text, end)

    def _split(self, name: str, total_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Yield each line of a file without its ending, and its size in bytes with the ending."""
        rest, offset = b"", 0
        while offset < total_bytes:
            buffer = bytearray(min(PIECE_BYTES, total_bytes - offset))
            count = self._source.read_into(name, offset, memoryview(buffer))
            if count == 0:
                raise BatchFailed(
                    f"{name} became shorter during the batch.", remedy="Begin again with --restart."
                )
            data = rest + bytes(buffer[:count])
            if offset == 0:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            offset += count
            *texts, rest = data.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise BatchFailed(
                    f"{name} has a line of more than {MAX_LINE_BYTES} bytes.",
                    remedy="Check that it is JSONL.",
                )
            yield from ((text.removesuffix(b"\r"), len(text) + 1) for text in texts)
        if rest:
            yield rest, len(rest)
