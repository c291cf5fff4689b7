"""Unfinished bodies: one owner cannot use the whole limit, and bodies that have ended are not counted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from live import LIMIT_S, Gateway, failure, gateway_here
from pilotflame.errors import Overloaded
from pilotflame.runtime.front.http.incoming_bodies import IncomingBodies

JSON = {"Content-Type": "application/json"}


async def test_unfinished_bodies_of_one_caller_leave_room_for_others(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotflame.runtime.front.http.incoming_bodies.IncomingBodies.__init__.__defaults__", (4 << 20,)
    )
    monkeypatch.setattr("pilotflame.runtime.front.http.requests.BODY_TIMEOUT_S", 2.0)
    async with gateway_here(state, drain_s=1.0) as gateway, gateway.at_home() as home:
        await gateway.deploy("def handler(event):\n    return len(event)\n", name="f")
        keys = [
            (await home.post("/v1/keys", json={"name": name})).json()["key"] for name in ("greedy", "other")
        ]
        greedy = [asyncio.create_task(unfinished(gateway, keys[0], 1 << 20)) for _ in range(8)]
        # Wait until a body of this key is refused. Then the other bodies use all bytes that one owner may use.
        await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
        body, headers = b'"' + b"x" * (200 << 10) + b'"', {"Authorization": f"Bearer {keys[1]}"}
        response = await gateway.client.post("/invoke/f", content=body, headers=headers | JSON)
        assert response.status_code == 200, failure(response)
        assert set(await asyncio.gather(*greedy)) == {408, 503}


async def unfinished(gateway: Gateway, key: str, size: int) -> int:
    """Send half of a body, and return the status of the answer."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    head = f"POST /invoke/f HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    try:
        writer.write(f"{head}Content-Length: {2 * size}\r\n\r\n".encode() + b" " * size)
        return int((await reader.readline()).split()[1])
    finally:
        writer.transport.abort()


async def test_the_owners_of_packed_bodies_take_turns() -> None:
    """An owner whose bodies take long leaves a thread to other owners. Bodies count against the limit until they are unpacked."""
    bodies, held = IncomingBodies(1000), threading.Event()

    def slow(body: bytes) -> bytes:
        held.wait(LIMIT_S)
        return body

    try:
        greedy = [asyncio.create_task(bodies.unpack("greedy", b"x" * 100, slow)) for _ in range(8)]
        async with asyncio.timeout(LIMIT_S):
            assert await bodies.unpack("other", b"y", lambda body: body) == b"y"
        with pytest.raises(Overloaded):
            await bodies.unpack("greedy", b"x" * 150, slow)
        held.set()
        assert await asyncio.gather(*greedy) == [b"x" * 100] * 8
        assert await bodies.unpack("greedy", b"x" * 150, slow) == b"x" * 150
    finally:
        held.set()
        bodies.close()
