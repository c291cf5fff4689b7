"""A body that aiohttp sends in slices, so that other callbacks of the event loop run between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

SLICE_BYTES = 256 << 10
"""Larger bodies are sent in slices of this size, because a write of all bytes would stop the event loop."""


class SlicedBody(Payload):
    """The parts of a body, which are sent one after the other."""

    def __init__(self, parts: Sequence[bytes], content_type: str) -> None:
        super().__init__(parts, content_type=content_type)
        self.parts = parts
        self.sending: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns a context that is entered while the body is sent."""
        self.timeout_s: float | None = None
        """The time limit for sending a slice; None for no limit."""

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self.parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the body. Raise TimeoutError if a slice is not sent in time."""
        with self.sending():
            await write_slices(self.parts, writer.write, self.timeout_s)


async def write_slices(
    parts: Sequence[bytes], write: Callable[[memoryview], Awaitable[None]], timeout_s: float | None
) -> None:
    """Pass the bytes of all parts to `write`, a slice at a time. Raise TimeoutError if a slice is not written in time."""
    for slice_ in _slices(parts):
        async with asyncio.timeout(timeout_s):
            await write(slice_)
        await asyncio.sleep(0)


def _slices(parts: Sequence[bytes]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), SLICE_BYTES):
            yield memoryview(part)[start : start + SLICE_BYTES]
