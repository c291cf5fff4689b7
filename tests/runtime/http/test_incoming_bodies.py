"""Unfinished bodies: one owner cannot use the room of all, and nothing stays counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import Gateway, failure, gateway_here
from pilotflame.errors import Overloaded
from pilotflame.runtime.http.incoming_bodies import IncomingBodies

JSON = {"Content-Type": "application/json"}
OWNERS = st.sampled_from(["", "a", "b", "c"])


@given(st.lists(st.tuples(OWNERS, st.integers(0, 300), st.booleans())))
def test_the_sum_is_limited_and_a_new_owner_has_room(steps: list[tuple[str, int, bool]]) -> None:
    bodies, held = IncomingBodies(1000), list[tuple[str, int]]()
    for owner, size, ends in steps:
        if ends and held:
            bodies.remove(*held.pop())
            continue
        try:
            bodies.add(owner, size)
        except Overloaded:
            continue
        held.append((owner, size))
        used = Counter[str]()
        for name, count in held:
            used[name] += count
        assert sum(used.values()) <= 1000
        assert max(used.values()) < 900
        # Another owner has room for almost nine tenths of what is free.
        most = (9 * (1000 - sum(used.values())) - 1) // 10
        bodies.add("new", most)
        bodies.remove("new", most)
    while held:
        bodies.remove(*held.pop())
    bodies.add("a", 899)


async def test_unfinished_bodies_of_one_caller_leave_room_for_others(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotflame.runtime.http.incoming_bodies.IncomingBodies.__init__.__defaults__", (4 << 20,)
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
