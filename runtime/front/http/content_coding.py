"""Decompresses the bodies of requests that have a Content-Encoding, up to a limit of the decompressed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from aiohttp.compression_utils import HAS_BROTLI, BrotliDecompressor, ZLibDecompressor, ZSTDDecompressor

from ....errors import BadInput, UnsupportedMedia

SLICE_BYTES = 1 << 20


class _Decompressor(Protocol):
    @property
    def data_available(self) -> bool: ...
    def decompress_sync(self, data: bytes, max_length: int) -> bytes: ...


def _deflate(body: bytes) -> _Decompressor:
    """Return a decompressor for "deflate". Some clients omit the zlib header, whose first byte
    ends with the four bits 1000.
    """
    return ZLibDecompressor("deflate", suppress_deflate_header=body[0] & 0xF != 8)


_DECOMPRESSORS: dict[str, Callable[[bytes], _Decompressor]] = {
    "gzip": lambda _: ZLibDecompressor("gzip"),
    "deflate": _deflate,
    "zstd": lambda _: ZSTDDecompressor(),
}
if HAS_BROTLI:
    _DECOMPRESSORS["br"] = lambda _: BrotliDecompressor()
CODINGS = frozenset(("gzip", "deflate", "zstd", "br"))
"""The codings that a body may have. Brotli needs its package."""


def unpack(body: bytes, coding: str, limit: int) -> bytes:
    """Return the decompressed body. If it is larger than `limit`, return only its beginning, which is longer than
    `limit`. This blocks, so call it in a thread.

    Raise UnsupportedMedia without the package of the coding, and BadInput if the body does not have this coding.
    """
    if (make := _DECOMPRESSORS.get(coding)) is None:
        raise UnsupportedMedia(f"The body has the Content-Encoding {coding}.", remedy="Send it with gzip.")
    parts, size = [], 0
    decompressor = make(body) if body else None
    try:
        for part in _slices(decompressor, body) if decompressor is not None else ():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
    except Exception as error:  # noqa: BLE001  each coding's library raises errors of its own
        raise BadInput(f"The body does not have the Content-Encoding {coding}: {error}.") from None
    # Check only deflate: the other decompressors do not tell whether the body is complete.
    if (
        isinstance(decompressor, ZLibDecompressor)
        and coding == "deflate"
        and size <= limit
        and not decompressor.eof
    ):
        raise BadInput("The body is not complete: its Content-Encoding deflate has no end.")
    return b"".join(parts)


def _slices(decompressor: _Decompressor, body: bytes) -> Iterator[bytes]:
    yield decompressor.decompress_sync(body, SLICE_BYTES)
    while decompressor.data_available:
        yield decompressor.decompress_sync(b"", SLICE_BYTES)
