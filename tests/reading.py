"""Reading objects of sources in tests."""

from __future__ import annotations

from pilotflame.snapshot.sources.source import Source


def read(source: Source, name: str, size: int, begin: int = 0) -> bytes:
    """Up to `size` bytes of an object, from byte `begin` on."""
    buffer = bytearray(size)
    return bytes(buffer[: source.read_into(name, begin, memoryview(buffer))])
