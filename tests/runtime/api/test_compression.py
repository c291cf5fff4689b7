"""Compression of answers: who asks gets it, in the coding he prefers; nobody else does."""

from __future__ import annotations

import gzip
import json
import sys
import threading

import pytest
from pilotflame.runtime.api import compression
from pilotflame.runtime.api.compression import LEAST_BYTES, chosen

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNPACK = {"gzip": gzip.decompress, "zstd": zstd.decompress}
SOURCE = """
def handler(event):
    if event.get("raw"):
        return b"x" * event["size"]
    return "x" * event["size"]
"""


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", ""),
        ("identity", ""),
        ("br, deflate", ""),
        ("gzip", "gzip"),
        ("GZIP", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("zstd;q=0.5, gzip", "gzip"),
        ("gzip;q=0.5, zstd;q=0.4", "gzip"),
        ("zstd;q=0, gzip;q=0", ""),
        ("gzip;q=0, *", ""),  # of a wildcard only the coding that all know is taken
        ("*", "gzip"),
        ("*;q=0", ""),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.5, gzip;q=0.5", "gzip"),
        ("gzip;q=nonsense", ""),
    ],
)
async def test_what_is_chosen(header: str, coding: str):
    assert chosen(header) == coding


@pytest.mark.parametrize("size", [LEAST_BYTES, 100_000])
async def test_who_asks_gets_it_smaller(deploy, size: int):
    function = await deploy(SOURCE)
    for coding, unpack in UNPACK.items():
        async with function.client.stream(
            "POST", function.path, json={"size": size}, headers={"Accept-Encoding": coding}
        ) as response:
            packed = b"".join([part async for part in response.aiter_raw()])
        assert response.headers["content-encoding"] == coding
        assert int(response.headers["content-length"]) == len(packed) < size // 2
        assert json.loads(unpack(packed)) == "x" * size
        assert response.headers["vary"] == "Accept-Encoding"
        assert response.headers["content-type"] == "application/json"
    # httpx asks of its own accord, and unpacks.
    response = await function.call({"size": size})
    assert response.headers["content-encoding"] == "gzip"
    assert response.json() == "x" * size


@pytest.mark.parametrize("coding", ["identity", "gzip;q=0", "br"])
async def test_who_does_not_ask_gets_it_as_it_is(deploy, coding: str):
    function = await deploy(SOURCE)
    response = await function.call({"size": 5000}, Accept_Encoding=coding)
    assert "content-encoding" not in response.headers
    assert response.headers["vary"] == "Accept-Encoding"  # a cache must not give it to who did ask
    assert len(response.content) == 5002


async def test_what_is_small_or_does_not_get_smaller_is_left_alone(deploy):
    function = await deploy(SOURCE)
    for event in ({"size": LEAST_BYTES - 3}, {"size": 5000, "raw": True}):
        response = await function.call(event, Accept_Encoding="gzip, zstd")
        assert "content-encoding" not in response.headers
        assert "vary" not in response.headers
        assert len(response.content) >= LEAST_BYTES - 3


async def test_streams_are_left_alone(deploy):
    function = await deploy("def handler(event):\n    for _ in range(10):\n        yield 'x' * 1000\n")
    response = await function.call(None, Accept_Encoding="gzip, zstd")
    assert "content-encoding" not in response.headers
    assert response.text.count("event: output") == 10


async def test_errors_jobs_and_descriptions_too(deploy):
    function = await deploy("def handler(event):\n    raise ValueError('no' * 2000)\n")
    for path in (function.path, f"/v2/{function.name}/runsync"):
        response = await function.client.post(path, json={"input": 1}, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip", path
        assert "nonono" in response.text
    for path in ("/openapi.json", "/metrics"):
        response = await function.client.get(path, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip", path


async def test_what_is_large_is_not_packed_on_the_loop(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(
        compression, "pack_now", lambda body, coding: threads.append(threading.get_ident()) or body
    )
    await compression.pack(b"x" * 100, "gzip")
    await compression.pack(b"x" * (1 << 20), "gzip")
    assert threads[0] == threading.get_ident() != threads[1]
