"""Responses: compressed for callers that accept it, in the coding they prefer."""

from __future__ import annotations

import functools
import gzip
import json
import sys
import threading

import pytest
from pilotflame.runtime.front.http import responses
from pilotflame.runtime.front.http.incoming_bodies import IncomingBodies
from pilotflame.runtime.front.http.responses import MIN_COMPRESSED_BYTES, ErrorResponses, choose_coding
from pilotflame.runtime.ground.access.keys import ANYBODY

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
        # A wildcard selects gzip and never zstd, because every client knows gzip.
        ("gzip;q=0, *", ""),
        ("*", "gzip"),
        ("*;q=0", ""),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.5, gzip;q=0.5", "gzip"),
        ("gzip;q=nonsense", ""),
    ],
)
async def test_the_preferred_coding_is_chosen(header: str, coding: str):
    assert choose_coding(header) == coding


@pytest.mark.parametrize("size", [MIN_COMPRESSED_BYTES, 100_000])
async def test_a_caller_that_accepts_a_coding_gets_it(deploy, size: int):
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
    # httpx accepts gzip by default and decompresses it.
    response = await function.call({"size": size})
    assert response.headers["content-encoding"] == "gzip"
    assert response.json() == "x" * size


@pytest.mark.parametrize("coding", ["identity", "gzip;q=0", "br"])
async def test_others_get_the_response_as_it_is(deploy, coding: str):
    function = await deploy(SOURCE)
    response = await function.call({"size": 5000}, Accept_Encoding=coding)
    assert "content-encoding" not in response.headers
    # An uncompressed response also needs Vary, so that caches do not send it to other callers.
    assert response.headers["vary"] == "Accept-Encoding"
    assert len(response.content) == 5002


async def test_small_and_incompressible_bodies_are_sent_as_they_are(deploy):
    function = await deploy(SOURCE)
    for event in ({"size": MIN_COMPRESSED_BYTES - 3}, {"size": 5000, "raw": True}):
        response = await function.call(event, Accept_Encoding="gzip, zstd")
        assert "content-encoding" not in response.headers
        assert "vary" not in response.headers
        assert len(response.content) >= MIN_COMPRESSED_BYTES - 3


async def test_streams_are_sent_as_they_are(deploy):
    function = await deploy("def handler(event):\n    for _ in range(10):\n        yield 'x' * 1000\n")
    response = await function.call(None, Accept_Encoding="gzip, zstd")
    assert "content-encoding" not in response.headers
    assert response.text.count("event: output") == 10


async def test_errors_jobs_and_documents_are_compressed(deploy):
    function = await deploy("def handler(event):\n    raise ValueError('no' * 2000)\n")
    for path in (function.path, f"/v2/{function.name}/runsync"):
        response = await function.client.post(path, json={"input": 1}, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip", path
        assert "nonono" in response.text
    for path in ("/openapi.json", "/metrics"):
        response = await function.client.get(path, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip", path


async def test_a_large_body_is_compressed_in_a_thread(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(
        responses, "compress_now", lambda body, coding: threads.append(threading.get_ident()) or body
    )
    bodies = IncomingBodies()
    in_turn = functools.partial(bodies.in_turn, "owner")
    await responses.compress(b"x" * 100, "gzip", in_turn)
    await responses.compress(b"x" * (1 << 20), "gzip", in_turn)
    bodies.close()
    assert threads[0] == threading.get_ident() != threads[1]


@pytest.mark.parametrize(("path", "shown"), [("/v1/functions", True), ("/invocations", False)])
async def test_only_a_deploy_shows_a_traceback_without_a_function_in_its_path(path: str, shown: bool) -> None:
    errors = ErrorResponses({}, lambda _caller, _function: False)
    assert errors._shows_private(ANYBODY, None, path) is shown
