"""Reads the inputs of a batch: the numbered lines of a JSONL file, or of all such files in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....errors import BatchFailed
from ....snapshot.sources.locate import is_remote, open_source
from ....snapshot.sources.source import Listing, Source

ENDINGS = (".jsonl", ".ndjson")
PIECE_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of an input file. `place` names the file and the number of the line in this file.

    `number` counts the lines of all files from 1. `end` counts the bytes of all files up to the end of this line.
    """

    number: int
    place: str
    text: bytes
    end: int


class Inputs:
    """The input files in one source. The files are read in the order of their names."""

    def __init__(self, source: Source, names: list[str]) -> None:
        self._source = source
        self._infos = {name: source.stat(name) for name in names}
        self.total_bytes = sum(info.size_bytes for info in self._infos.values())

    @classmethod
    def open(cls, place: str) -> Inputs:
        """Return the inputs at a path or an S3 URL.

        Raise BatchFailed if there is no JSONL file, SourceError if the place cannot be read.
        """
        if place.endswith(ENDINGS) if is_remote(place) else Path(place).is_file():
            above, _, name = place.rpartition("/")
            return cls(open_source(above or ("/" if place.startswith("/") else ".")), [name])
        remedy = "Name a JSONL file, or a folder of them."
        if not is_remote(place) and not Path(place).is_dir():
            raise BatchFailed(f"{place} is neither a file nor a folder.", remedy=remedy)
        source = open_source(place)
        if not isinstance(source, Listing):
            raise BatchFailed(f"{source.url} cannot be listed.", remedy="Name a JSONL file.")
        names = [name for name in source.names() if name.endswith(ENDINGS)]
        if not names:
            raise BatchFailed(f"There is no {' or '.join(ENDINGS)} file in {source.url}.", remedy=remedy)
        return cls(source, names)

    @property
    def digest(self) -> str:
        """A digest of the files' names, sizes and versions. Another digest means that a file may have changed."""
        facts = [(name, info.size_bytes, info.version) for name, info in self._infos.items()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def lines(self, skip: int = 0) -> Iterator[InputLine]:
        """Yield all lines except the first `skip`. Blocks: do not call it on the event loop."""
        number = end = 0
        for name, info in self._infos.items():
            first = number
            for text, size_bytes in self._split(name, info.size_bytes):
                number, end = number + 1, end + size_bytes
                if number > skip:
                    yield InputLine(number, f"{name}, line {number - first}", text, end)

    def _split(self, name: str, total_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Yield (line without its line ending, size in bytes including the line ending) for one file."""
        rest, offset = b"", 0
        while offset < total_bytes:
            buffer = bytearray(min(PIECE_BYTES, total_bytes - offset))
            count = self._source.read_into(name, offset, memoryview(buffer))
            if count == 0:
                raise BatchFailed(f"{name} became shorter during the batch.", remedy="Pass --restart.")
            data = rest + bytes(buffer[:count])
            if offset == 0:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            offset += count
            *texts, rest = data.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise BatchFailed(f"{name} has a line over {MAX_LINE_BYTES} bytes.", remedy="Is it JSONL?")
            yield from ((text.removesuffix(b"\r"), len(text) + 1) for text in texts)
        if rest:
            yield rest, len(rest)
