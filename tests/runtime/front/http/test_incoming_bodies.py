"""Unfinished bodies: one owner cannot use the room of all, and nothing stays counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live import Gateway, failure, gateway_here

JSON = {"Content-Type": "application/json"}


async def test_unfinished_bodies_of_one_caller_leave_room_for_others(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotflame.runtime.front.http.incoming_bodies.IncomingBodies.__init__.__defaults__", (4 << 20,)
    )
    async with gateway_here(state, body_timeout_s=2.0, drain_s=1.0) as gateway, gateway.at_home() as home:
        await gateway.deploy("def handler(event):\n    return len(event)\n", name="f")
        keys = [
            (await home.post("/v1/keys", json={"name": name})).json()["key"] for name in ("greedy", "other")
        ]
        greedy = [asyncio.create_task(unfinished(gateway, keys[0], 1 << 20)) for _ in range(8)]
        # One of them is refused, so the others have sent what there is room for.
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
