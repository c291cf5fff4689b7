"""Processes of fetchers and gateways that exchange chunks:
the bucket sends each chunk about once, and if one fetcher is killed, the others fetch its chunks elsewhere.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fault_server import Faults, FaultServer
from live import gateway_here, until
from pilotflame.errors import GatewayError
from pilotflame.runtime.node.packaging.snapshots import MANIFEST_FILE
from pilotflame.snapshot.caching.node import node_tiers
from pilotflame.snapshot.format.manifest import Manifest
from pulling import LIMIT_S, Fetching, check, fetching, make

TOKEN = "the token of the cluster"
TENSORS, TENSOR_BYTES = 20, 1 << 20
HANDLER = """
import os

def handler(event, context):
    return [name for name in os.environ if name.startswith("PILOTFLAME_PEERS")]
"""


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Manifest]:
    folder = tmp_path / "weights"
    return folder, make(folder, tensors=TENSORS, tensor_bytes=TENSOR_BYTES).with_realm("a" * 64)


@pytest.fixture
def ports() -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [sock.getsockname()[1] for sock in sockets]


def files_of(cache: Path, manifest: Manifest) -> Path:
    """Return the folder of the snapshot's files in the memory tier of a node."""
    memory, *_ = node_tiers(cache)
    return memory.folder(manifest.digest) / "files"


@pytest.fixture
def cluster(tmp_path: Path, ports: list[int]) -> Iterator[list[Fetching]]:
    """Three fetchers that know each other."""
    with ExitStack() as opened:
        found = [opened.enter_context(fetching(tmp_path / f"cache{index}")) for index in range(3)]
        for fetcher, port in zip(found, ports, strict=True):
            urls = [f"http://127.0.0.1:{each}" for each in ports]
            fetcher.tell(op="share", host="127.0.0.1", port=port, urls=urls, token=TOKEN, certificate=None)
        for fetcher, port in zip(found, ports, strict=True):
            assert fetcher.hear(0, "sharing")["port"] == port
        yield found


def order(weights: tuple[Path, Manifest], bucket: FaultServer) -> dict[str, Any]:
    path = weights[0].parent / "deployed.json"
    weights[1].write(path)
    return {"op": "hold", "id": 1, "manifest": str(path), "url": bucket.url}


def test_the_bucket_gives_every_chunk_about_once(
    cluster: list[Fetching], weights: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = weights
    with FaultServer(folder, total_bytes_per_s=40e6) as bucket:
        for fetcher in cluster:
            fetcher.tell(**order(weights, bucket))
        for fetcher in cluster:
            assert fetcher.hear(1, "done")["bytes"] == manifest.total_bytes
        sent_bytes = sum(request.sent for request in bucket.requests)
    # The bucket may send some bytes twice: if another connection takes over the second half of a range, the server has
    # already put more of this range into the buffer of the first socket.
    assert manifest.total_bytes <= sent_bytes < 1.5 * manifest.total_bytes
    taken_bytes = [fetcher.hear(0, "shared")["taken_bytes"] for fetcher in cluster]
    assert sum(taken_bytes) == 2 * manifest.total_bytes
    for index in range(3):
        check(files_of(tmp_path / f"cache{index}", manifest), folder)


def chunk_of(port: int, key: str, chunk: int) -> bytes | None:
    """Return the bytes of a chunk from a node, or None if the node does not have the chunk."""

    def ask(target: str) -> bytes | None:
        connection.request("GET", target, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        text = answer.read()
        return text if answer.status == 200 else None

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        ticket = json.loads(ask(f"/v1/line/{key}") or b"{}").get("ticket")
        return ask(f"/v1/chunks/{key}/{ticket}/{chunk}")
    finally:
        connection.close()


def test_one_that_is_killed_while_it_gives_is_not_missed(
    cluster: list[Fetching], ports: list[int], weights: tuple[Path, Manifest], tmp_path: Path
) -> None:
    folder, manifest = weights
    first, second, third = cluster
    with FaultServer(folder, Faults(stall_share=1.0, stall_at=1 << 20, stall_s=60.0)) as bucket:
        for fetcher in cluster:
            fetcher.tell(**order(weights, bucket))
            fetcher.hear(1, "held")
            while chunk_of(ports[0], manifest.digest, 0) is None:
                pass
        # Wait until the other fetchers have the chunk, too. They get it from the first fetcher.
        for port in ports[1:]:
            while chunk_of(port, manifest.digest, 0) is None:
                pass
        first.process.kill()
        bucket.faults = Faults()
        for fetcher in (second, third):
            assert fetcher.hear(1, "done")["bytes"] == manifest.total_bytes
    taken_bytes = [fetcher.hear(0, "shared")["taken_bytes"] for fetcher in (second, third)]
    assert min(taken_bytes) > 0
    for index in (1, 2):
        check(files_of(tmp_path / f"cache{index}", manifest), folder)


def test_a_port_that_is_taken_is_named(tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", ports[0])), fetching(tmp_path / "cache") as fetcher:
        fetcher.tell(op="share", host="127.0.0.1", port=ports[0], urls=[], token=TOKEN, certificate=None)
        error = fetcher.hear(0, "sharing")["error"]
        assert f"127.0.0.1:{ports[0]}" in error["message"]
        assert "PILOTFLAME_PEERS_PORT" in error["remedy"]


async def test_a_gateway_gives_weights_to_another_node(
    state: Path,
    tmp_path: Path,
    ports: list[int],
    weights: tuple[Path, Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, manifest = weights
    monkeypatch.setenv("PILOTFLAME_PEERS_TOKEN", TOKEN)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
    settings = {"cache_dir": tmp_path / "cache", "peers": urls, "peers_port": ports[0], "peers_token": TOKEN}
    with FaultServer(folder) as bucket, fetching(tmp_path / "other") as fetcher:
        async with gateway_here(state, **settings) as gateway:
            function = await gateway.deploy(HANDLER, {"snapshot": bucket.url, "name": "net"})
            # The handler must not see the token.
            assert await function.answer(3) == []
            fetcher.tell(
                op="share", host="127.0.0.1", port=ports[1], urls=urls, token=TOKEN, certificate=None
            )
            (deployed,) = state.rglob(MANIFEST_FILE)
            fetcher.tell(op="hold", id=1, manifest=str(deployed), url="http://127.0.0.1:1")
            assert (await asyncio.to_thread(fetcher.hear, 1, "done"))["bytes"] == manifest.total_bytes

            async def counted() -> bool:
                text = (await gateway.client.get("/metrics")).text
                lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
                return float(lines["pilotflame_snapshot_peer_served_bytes_total"]) == manifest.total_bytes

            await until(counted, "the bytes that went to the other node")


async def test_a_gateway_that_cannot_serve_chunks_does_not_start(tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", ports[0])), pytest.raises(GatewayError, match="PEERS_PORT"):
        async with gateway_here(
            tmp_path / "state", cache_dir=tmp_path / "cache", peers=["http://127.0.0.1:1"], peers_port=ports[0],
            peers_token=TOKEN,
        ):  # fmt: skip
            pass
