"""Compression of answers, for callers that ask for it: zstd or gzip, by the quality they give each.

aiohttp's own knows neither quality values nor zstd. Event streams are left alone: their pieces are small and wanted at
once. So are images, archives and arrays of floats, which do not get smaller.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import zlib

from aiohttp import web
from aiohttp.typedefs import Handler

from ...handlers.negotiation import weigh

# The standard library's since Python 3.14, where the backport does not install.
zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

LEAST_BYTES = 1024
"""What is smaller goes into one packet or two as it is."""
MOST_ON_LOOP_BYTES = 16 << 10
"""What is larger is compressed in a thread: it would hold up everybody else."""
LEVEL = 1
"""Of both: callers wait for this, and better ones take long for little."""
_GZIP_BITS = zlib.MAX_WBITS | 16
_TYPES = ("application/json", "application/xml", "application/javascript", "application/x-ndjson")


@web.middleware
async def compressed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around every route: what it answered, smaller where that is worth it and asked for."""
    response = await handler(request)
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return response
    if "Content-Encoding" not in response.headers and pays(response.body, response.content_type):
        response.headers["Vary"] = "Accept-Encoding"
        if coding := chosen(request.headers.get("Accept-Encoding", "")):
            response.body = await pack(response.body, coding)
            response.headers["Content-Encoding"] = coding
    return response


def chosen(header: str) -> str:
    """ "zstd", "gzip" or, to send it as it is, "". Who names neither but takes anything gets gzip."""
    zstd_weight, gzip_weight, plain = (weigh(header, name) for name in ("zstd", "gzip", "identity"))
    zstd_quality = zstd_weight.quality if zstd_weight.exact else 0.0
    best = max(zstd_quality, gzip_weight.quality)
    if not best or (plain.exact and plain.quality > best):
        return ""
    return "zstd" if zstd_quality == best else "gzip"


async def pack(body: bytes, coding: str) -> bytes:
    if len(body) <= MOST_ON_LOOP_BYTES:
        return pack_now(body, coding)
    return await asyncio.to_thread(pack_now, body, coding)


def pack_now(body: bytes, coding: str) -> bytes:
    """Blocks for as long as it takes."""
    return zstd.compress(body, LEVEL) if coding == "zstd" else zlib.compress(body, LEVEL, _GZIP_BITS)


def pays(body: bytes, kind: str) -> bool:
    """Whether an answer of this media type, without parameters, could become smaller by more than it costs."""
    return len(body) >= LEAST_BYTES and (
        kind.startswith("text/") or kind in _TYPES or kind.endswith(("+json", "+xml"))
    )
